"""Which settings of the engine can change a stored number: parts of a folder's fingerprint.

Every --sglang field that is given is one, but for HARMLESS. What is not known to be harmless is in: a
folder that is refused costs a flag or another folder, two models in one folder cost the folder.
"""

import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from extractor.engine import compat
from extractor.engine.base import Numbers
from extractor.errors import UsageError
from extractor.model import ModelSpec

_OURS = "batches are made here, and what SGLang would do with a queue of requests is not run"
_BUDGET = "it follows the token budget, which may change between runs"
_WHERE = "it says where a rank runs or meets the others; sums are split among ranks in any case"
_READ = "it says how the bytes of weight files are read, not which"
_SAID = "it says what is logged or measured"
HARMLESS: dict[str, str] = {
    "max_total_tokens": _BUDGET,
    "max_running_requests": _BUDGET,
    "max_prefill_tokens": _BUDGET,
    "chunked_prefill_size": _BUDGET,
    "mem_fraction_static": "the pools' sizes are given, so it only bounds memory",
    "cpu_offload_gb": "the same weights are multiplied, from wherever they wait",
    "skip_tokenizer_init": _OURS,
    "disable_cuda_graph": _OURS,
    "disable_overlap_schedule": _OURS,
    "schedule_policy": _OURS,
    "skip_server_warmup": _OURS,
    "watchdog_timeout": _OURS,
    "tp_size": _WHERE,
    "ep_size": _WHERE,
    "base_gpu_id": _WHERE,
    "gpu_id_step": _WHERE,
    "numa_node": _WHERE,
    "nccl_port": _WHERE,
    "dist_init_addr": _WHERE,
    "dist_timeout": _WHERE,
    "host": _WHERE,
    "port": _WHERE,
    "download_dir": _READ,
    "weight_loader_disable_mmap": _READ,
    "weight_loader_prefetch_checkpoints": _READ,
    "weight_loader_prefetch_num_threads": _READ,
    "weight_loader_drop_cache_after_load": _READ,
    "log_level": _SAID,
    "log_level_http": _SAID,
    "log_requests": _SAID,
    "log_requests_level": _SAID,
    "decode_log_interval": _SAID,
    "enable_metrics": _SAID,
    "show_time_cost": _SAID,
    "crash_dump_folder": _SAID,
}

# The engine gives these another value than SGLang's default (sglang.py), so that one who gives
# the default asks for something else.
SET_HERE = frozenset(
    {
        "attention_backend",
        "context_length",
        "device",
        "disable_custom_all_reduce",
        "disable_hybrid_swa_memory",
        "disable_radix_cache",
        "enforce_disable_flashinfer_allreduce_fusion",
        "model_path",
        "moe_runner_backend",
        "page_size",
        "random_seed",
    }
)
_SHORT_NAMES = {"half": "float16", "float": "float32"}

# The first GPUs with bfloat16; SGLang computes in float16 on older ones.
_BFLOAT16_SINCE = 8


def numbers(spec: ModelSpec, device: torch.device, sglang_args: Mapping[str, str]) -> Numbers:
    """See Backend.numbers. Imports SGLang's ServerArgs when there are any, which takes seconds."""
    return Numbers(computing_dtype(spec, device, sglang_args), given(sglang_args))


def given_then(sglang_args: Mapping[str, str]) -> dict[str, str]:
    """given() of an earlier run, which may have been one of a release with other fields."""
    try:
        return given(sglang_args)
    except UsageError:
        named = sglang_args.items()
        return {name: _spelled(text) for name, text in named if name not in HARMLESS}


def computing_dtype(spec: ModelSpec, device: torch.device, sglang_args: Mapping[str, str]) -> str:
    """What the model computes in, by name: --sglang dtype, else what suits the device
    (docs/decisions/0004-cpu-computes-in-float32.md), else what SGLang makes of the checkpoint's."""
    if asked := asked_dtype(sglang_args):
        return asked
    if device.type == "cpu":
        own = compat.cpu_values(spec.architecture).get("dtype")
        return own or (spec.served_dtype if cpu_multiplies_bfloat16() else "float32")
    if spec.served_dtype == "bfloat16" and not _gpu_has_bfloat16(device):
        return "float16"
    return spec.served_dtype


def asked_dtype(sglang_args: Mapping[str, str]) -> str | None:
    """--sglang dtype by its full name; None where it is not given, or auto."""
    text = sglang_args.get("dtype", "auto").strip().lower()
    return None if text in ("auto", "none", "null") else _SHORT_NAMES.get(text, text)


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has matrix instructions for bfloat16, without which it is emulated."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if "flags" in line), "")
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


def _gpu_has_bfloat16(device: torch.device) -> bool:
    return not torch.cuda.is_available() or (
        torch.cuda.get_device_capability(device)[0] >= _BFLOAT16_SINCE
    )


def given(sglang_args: Mapping[str, str]) -> dict[str, str]:
    """Name to value, in one spelling whatever way it was given in; without fields that are harmless or
    say SGLang's own default.

    Raises UsageError for an unknown field, and for a value of another type."""
    if not sglang_args:
        return {}
    found: dict[str, str] = {}
    for name, value in sorted(compat.typed_args(sglang_args).items()):
        spelled = _spelled(value)
        if name == "dtype":
            spelled = asked_dtype(sglang_args) or _default(name)
        if name not in HARMLESS and (name in SET_HERE or spelled != _default(name)):
            found[name] = spelled
    return found


@cache
def _default(name: str) -> str:
    kind = compat.symbol("sglang.srt.server_args", "ServerArgs")
    return _spelled(inspect.signature(kind).parameters[name].default)


def _spelled(value: Any) -> str:
    """One text for a value, in whatever spaces, order or case of words its JSON or its truth was."""
    if isinstance(value, str):
        text = value.strip()
        if text[:1] in ("{", "[") or text.lower() in ("true", "false", "none", "null"):
            text = _as_json(text)
        return text
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(_plain_number(value))


def _as_json(text: str) -> str:
    if text[:1] not in ("{", "["):
        return text.lower().replace("null", "none")
    try:
        value = json.loads(text, parse_float=lambda number: _plain_number(float(number)))
    except (ValueError, RecursionError):
        return text
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain_number(value: Any) -> Any:
    """4 for 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
