"""Every difference between SGLang releases, and nothing else, in one place.

    release          constructor of ModelRunner          process groups
    0.5.17 - 0.5.20  takes ps: ParallelState (its        made inside ModelRunner
                     dcp fields renamed in 0.5.18)
    0.5.21 - 0.5.23  no ps                               bootstrap.init_parallel_runtime first

A symbol that a release lacks is an error here, at the start, with the table of what is supported;
nothing is looked up with a default that would hide a moved API.
"""

import contextlib
import difflib
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from extractor.errors import UsageError
from extractor.ranks.place import Place

FIRST, LAST = (0, 5, 17), (0, 5, 23)
_NO_PS_SINCE = (0, 5, 21)
_KV_PLAN_SINCE = (0, 5, 23)
_CORES_BY_TP_RANK_UNTIL = (0, 5, 18)
_DCP_BY_RANK_SINCE = (0, 5, 18)
_FLAGS_PUBLISHED_SINCE = (0, 5, 19)
_POOLS_BY_PLATFORM_UNTIL = (0, 5, 21)
_NCCL_ON_CPU_UNTIL = (0, 5, 22)
SUPPORTED_TABLE = """\
  sglang           torch
  0.5.17           2.11
  0.5.18 - 0.5.21  2.13
  0.5.22 - 0.5.23  2.14"""

# What this module takes from SGLang, by release: {(module, name): first release, last release}.
SYMBOLS: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("sglang.srt.server_args", "ServerArgs"): (FIRST, LAST),
    ("sglang.srt.configs.model_config", "ModelConfig"): (FIRST, LAST),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"): (FIRST, LAST),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch"): (FIRST, LAST),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode"): (FIRST, LAST),
    ("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode"): (FIRST, LAST),
    ("sglang.srt.model_executor.forward_context", "ForwardContext"): (FIRST, LAST),
    ("sglang.srt.model_executor.forward_context", "forward_context"): (FIRST, LAST),
    ("sglang.srt.layers.moe", "initialize_moe_config"): (FIRST, LAST),
    ("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"): (FIRST, LAST),
    ("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config"): (FIRST, LAST),
    ("sglang.srt.runtime_context", "publish"): (FIRST, LAST),
    ("sglang.srt.runtime_context", "get_model"): (FIRST, LAST),
    ("sglang.srt.runtime_context", "SpawnRanks"): (_NO_PS_SINCE, LAST),
    ("sglang.srt.distributed.bootstrap", "init_parallel_runtime"): (_NO_PS_SINCE, LAST),
    ("sglang.srt.distributed.bootstrap", "init_layer_runtime"): (_NO_PS_SINCE, LAST),
    ("sglang.srt.distributed.parallel_state_wrapper", "ParallelState"): (FIRST, (0, 5, 20)),
    ("sglang.srt.server_args", "add_attention_backend_choices"): (FIRST, LAST),
    ("sglang.srt.model_loader.loader", "DefaultModelLoader"): (FIRST, LAST),
    ("sglang.srt.models.registry", "ModelRegistry"): (FIRST, LAST),
    ("sglang.srt.layers.moe.fused_moe_native", "moe_forward_native"): (FIRST, LAST),
    ("sglang.srt.layers.logits_processor", "LogitsProcessor"): (FIRST, LAST),
    ("sglang.srt.layers.logits_processor", "_is_cpu"): (FIRST, LAST),
    ("sglang.srt.layers.vocab_parallel_embedding", "VocabParallelEmbedding"): (FIRST, LAST),
    ("sglang.srt.layers.moe.moe_runner.triton_utils", "override_config"): (FIRST, LAST),
    (
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
        "get_default_config",
    ): (
        FIRST,
        LAST,
    ),
    ("sglang.srt.layers.rotary_embedding", "RotaryEmbedding"): (FIRST, LAST),
    ("sglang.srt.layers.flashinfer_comm_fusion", "pre_initialize_workspaces"): (FIRST, LAST),
    ("sglang.srt.layers.flashinfer_comm_fusion", "is_flashinfer_allreduce_unavailable"): (
        FIRST,
        LAST,
    ),
}


def installed_version() -> tuple[int, ...]:
    """SGLang's release as three numbers, without importing it. Raises UsageError."""
    try:
        text = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"SGLang is not installed; supported:\n{SUPPORTED_TABLE}") from None
    # Not the digits of each part: 0.5.23+cu130 is a 0.5.23.
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))


def require_supported() -> tuple[int, ...]:
    """The installed release, if it is one this program was tested with. Raises UsageError."""
    version = installed_version()
    if not FIRST <= version <= LAST:
        shown = ".".join(map(str, version))
        raise UsageError(f"SGLang {shown} is installed; supported:\n{SUPPORTED_TABLE}")
    return version


def symbol(module: str, name: str) -> Any:
    """A symbol of SYMBOLS. Raises UsageError when this release, though supported, lacks it."""
    first, last = SYMBOLS[module, name]
    assert first <= installed_version() <= last, (module, name)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"SGLang's {module}.{name} is missing ({error}); supported:\n{SUPPORTED_TABLE}"
        ) from error


def import_all() -> None:
    """Every module of SYMBOLS that this release has."""
    installed = installed_version()
    for (module, name), (first, last) in SYMBOLS.items():
        if first <= installed <= last:
            symbol(module, name)


# Server arguments ---------------------------------------------------------------------------------
def typed_args(user: Mapping[str, str]) -> dict[str, Any]:
    """The user's --sglang KEY=VALUE as values of ServerArgs' own types.

    Raises UsageError for an unknown key, naming the nearest, and for a value of another type."""
    kind = symbol("sglang.srt.server_args", "ServerArgs")
    fields = list(inspect.signature(kind).parameters)
    hints = typing.get_type_hints(kind)
    typed: dict[str, Any] = {}
    for key, text in user.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UsageError(f"--sglang {key}: no such field of SGLang's ServerArgs{hint}")
        typed[key] = _typed(key, text, hints.get(key, str))
    return typed


def server_args(values: dict[str, Any]) -> Any:
    return symbol("sglang.srt.server_args", "ServerArgs")(**values)


def _typed(key: str, text: str, hint: Any) -> Any:
    kinds = {k for k in (typing.get_args(hint) or (hint,)) if isinstance(k, type)}
    if text.lower() in ("none", "null"):
        return None
    if bool in kinds and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    if str in kinds or not kinds & {bool, int, float}:
        return text
    raise UsageError(f"--sglang {key}={text}: wanted {hint}")


# The fused all-reduce -----------------------------------------------------------------------------

# The most tokens of a pass that SGLang fuses; its own constant moves between modules.
FUSED_TOKENS = 2048


def fusion_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """ServerArgs that keep FlashInfer's fused all-reduce off, unless the user names a backend for it.

    On Hopper and Blackwell SGLang turns it on by itself for most mixtures of experts. It serves passes
    of at most FUSED_TOKENS only, so there is next to nothing to gain here, and up to 0.5.20 it can be
    wrong (docs/decisions/0006-no-fused-all-reduce.md)."""
    if given.get("flashinfer_allreduce_fusion_backend") is not None:
        return {}
    return {"enforce_disable_flashinfer_allreduce_fusion": True}


def prepare_fusion(runner: Any, args: Any) -> str:
    """Make the fused all-reduce's buffers before the first pass, as SGLang's own start does, and say
    what came of it: "off", "on", or "unavailable".

    Up to 0.5.20 a pass that finds none goes on without any all-reduce, so that the first one, which
    would have to make them, were wrong wherever they cannot be made."""
    if args.flashinfer_allreduce_fusion_backend is None or args.tp_size == 1:
        return "off"
    if args.device != "cuda":
        return "unavailable"
    config = runner.model_config
    prepare = symbol("sglang.srt.layers.flashinfer_comm_fusion", "pre_initialize_workspaces")
    try:
        prepare(max_token_num=FUSED_TOKENS, hidden_dim=config.hidden_size, dtype=config.dtype)
    except ValueError as error:  # not on this kind of GPU
        raise UsageError(f"--sglang flashinfer_allreduce_fusion_backend: {error}") from error
    unavailable = symbol(
        "sglang.srt.layers.flashinfer_comm_fusion", "is_flashinfer_allreduce_unavailable"
    )
    return "unavailable" if unavailable() else "on"


# Keys and values that nobody reads ------------------------------------------------------------------
def can_skip_kv(runner: Any) -> bool:
    """Whether the attention backend can read a pass's keys and values where the layer made them: FA3's
    own path for embedding models, which latent and local attention and a pool of another dtype do not
    have. (Up to 0.5.21 it calls FA3 even when the backend is FA4.)"""
    backend = runner.attn_backend
    return (
        hasattr(backend, "fa_skip_kv_cache")
        and backend.fa_impl_ver == 3
        and backend.kv_cache_dtype_str == "auto"
        and not backend.use_mla
        and not backend.has_local_attention
    )


def skip_kv(runner: Any, whole: bool) -> None:
    """Leave a pass's keys and values out of the pool, where every sequence of it is whole; write and
    read them there for one chunk of several. For a runner that can_skip_kv."""
    runner.attn_backend.fa_skip_kv_cache = whole


# Tiles for experts ----------------------------------------------------------------------------------

# Shared memory of a Hopper GPU in bytes: a smaller one may be too small for the tile.
SHARED_MEMORY = 227 * 1024

# Rows of tokens that meet an expert, from which EXPERT_TILE was measured to be the faster.
EXPERT_ROWS = 256
EXPERT_TILE = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 8,
    "num_stages": 3,
}


def prefer_long_tiles(shared_memory: int) -> bool:
    """Give SGLang's Triton experts a tile for passes as long as ours, where SGLang has no measured one
    for a model's shape and takes one that suits decoding; whether this GPU, of so much shared memory a
    block in bytes, can (docs/decisions/0009-tiles-for-experts.md)."""
    if shared_memory < SHARED_MEMORY:
        return False
    default = symbol(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
        "get_default_config",
    )
    module: Any = importlib.import_module(default.__module__)

    def choose(*given: Any) -> dict[str, int]:
        tokens, experts, _, _, chosen, dtype, marlin, *_ = given
        # No dtype: neither quantized nor float32.
        if dtype is None and not marlin and tokens * chosen >= EXPERT_ROWS * experts:
            return dict(EXPERT_TILE)
        return default(*given)

    module.get_default_config = choose
    return True


def expert_tile(config: dict[str, int] | None) -> contextlib.AbstractContextManager[None]:
    """A context in which SGLang's Triton experts multiply in this tile; for None, in its own choice."""
    override = symbol("sglang.srt.layers.moe.moe_runner.triton_utils", "override_config")
    return override(config)


# The runner ---------------------------------------------------------------------------------------
def allow_attention_backend(name: str) -> None:
    """Let ServerArgs accept the CPU platform's own attention backend by name."""
    symbol("sglang.srt.server_args", "add_attention_backend_choices")([name])


def cpu_values(architecture: str) -> dict[str, Any]:
    """ServerArgs without which SGLang does not run a model on this CPU platform.

    GPT-OSS: an attention backend by a name of its own list (one that no CPU has), experts without
    Triton's kernels, and bfloat16, which its weights are whatever is asked for."""
    if architecture != "GptOssForCausalLM":
        return {}
    return {
        "attention_backend": "ascend",
        "moe_runner_backend": "triton",
        "dtype": "bfloat16",
    }


def skip_absent_experts() -> None:
    """Make SGLang's PyTorch experts, which the CPU platform uses, right under expert parallelism: a
    token's expert that lives on another rank has id -1, which they take for an index."""
    native = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    inner = symbol("sglang.srt.layers.moe.fused_moe_native", "moe_forward_native")

    def forward(layer: Any, x: torch.Tensor, topk: Any, config: Any) -> torch.Tensor:
        weights, ids, *rest = topk
        absent = ids < 0
        weights, ids = weights.masked_fill(absent, 0), ids.masked_fill(absent, 0)
        # A choice at a time, since they count an expert once that a token has twice.
        parts = [
            inner(layer, x, type(topk)(weights[:, j : j + 1], ids[:, j : j + 1], *rest), config)
            for j in range(ids.shape[1])
        ]
        return torch.stack(parts).sum(0)

    native.moe_forward_native = forward


@contextlib.contextmanager
def loading_through(
    watch: Callable[[Any, Callable[[Any], Any], Any], Any],
) -> Iterator[None]:
    """Within it, SGLang's common loader calls watch(model, load_weights, weights) where it would call
    the model's load_weights(weights). Other loaders, such as the one of dummy weights, do not."""
    loader = symbol("sglang.srt.model_loader.loader", "DefaultModelLoader")
    inner = loader.load_weights_and_postprocess

    def outer(model: Any, weights: Any, target_device: Any) -> None:
        load = model.load_weights
        model.load_weights = lambda weights: watch(model, load, weights)
        try:
            inner(model, weights, target_device)
        finally:
            del model.load_weights

    loader.load_weights_and_postprocess = staticmethod(outer)
    try:
        yield
    finally:
        loader.load_weights_and_postprocess = staticmethod(inner)


def build_runner(args: Any, *, tp_rank: int, gpu_id: int) -> Any:
    """ModelRunner with its weights loaded, for this rank of already initialised process groups."""
    ranks = {}
    new = installed_version() >= _NO_PS_SINCE
    if new:
        ranks["ranks"] = symbol("sglang.srt.runtime_context", "SpawnRanks")(
            world_rank=tp_rank, gpu_id=gpu_id
        )
    symbol("sglang.srt.runtime_context", "publish")(args, role="scheduler", **ranks)
    _initialize_kernels(args)
    config = symbol("sglang.srt.configs.model_config", "ModelConfig").from_server_args(args)
    common = {
        "model_config": config,
        "mem_fraction_static": args.mem_fraction_static,
        "gpu_id": gpu_id,
        "nccl_port": 0,  # never used: the process groups exist already
        "server_args": args,
    }
    runner_class = symbol("sglang.srt.model_executor.model_runner", "ModelRunner")
    if not new:
        return runner_class(**common, ps=_parallel_state(args, tp_rank, gpu_id))
    symbol("sglang.srt.distributed.bootstrap", "init_parallel_runtime")(
        server_args=args, device=args.device, dist_port=0
    )
    symbol("sglang.srt.distributed.bootstrap", "init_layer_runtime")(model_config=config)
    return runner_class(**common)


def _initialize_kernels(args: Any) -> None:
    given = (args,) if installed_version() < _FLAGS_PUBLISHED_SINCE else ()
    symbol("sglang.srt.layers.moe", "initialize_moe_config")(*given)
    symbol("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config")(*given)
    symbol("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config")(*given)


def _parallel_state(args: Any, tp_rank: int, gpu_id: int) -> Any:
    # Decode context parallelism, of which there is none here (engine.sglang.SINGLE).
    dcp = {"attn_dcp_rank": 0, "attn_dcp_size": args.dcp_size}
    if installed_version() < _DCP_BY_RANK_SINCE:
        dcp = {"dcp_size": args.dcp_size}
    return symbol("sglang.srt.distributed.parallel_state_wrapper", "ParallelState")(
        **dcp,
        tp_rank=tp_rank,
        tp_size=args.tp_size,
        pp_rank=0,
        pp_size=1,
        dp_rank=None,
        dp_size=args.dp_size,
        attn_tp_rank=tp_rank,
        attn_tp_size=args.tp_size,
        attn_cp_rank=0,
        attn_cp_size=args.attn_cp_size,
        attn_dp_rank=0,
        attn_dp_size=1,
        moe_ep_rank=tp_rank // (args.tp_size // args.ep_size),
        moe_ep_size=args.ep_size,
        moe_dp_rank=None,
        moe_dp_size=args.moe_dp_size,
        gpu_id=gpu_id,
    )


# One forward --------------------------------------------------------------------------------------
@contextlib.contextmanager
def forward_scope(runner: Any, forward_batch: Any) -> Iterator[None]:
    """What a model's layers find around them during a forward: the attention backend, by context."""
    context = symbol("sglang.srt.model_executor.forward_context", "ForwardContext")
    enter = symbol("sglang.srt.model_executor.forward_context", "forward_context")
    with contextlib.ExitStack() as stack:
        if installed_version() >= _KV_PLAN_SINCE:
            get_model = symbol("sglang.srt.runtime_context", "get_model")
            shared = runner.model.shared_experts_config
            stack.enter_context(get_model().override(shared_experts=shared))
            stack.enter_context(
                enter(context(attn_backend=runner.attn_backend), forward_batch=forward_batch)
            )
        else:
            stack.enter_context(enter(context(attn_backend=runner.attn_backend)))
        yield


def bind_cache_slots(runner: Any, forward_batch: Any) -> None:
    """Tell a batch where its keys and values go; from 0.5.23 through the runner's slot translator."""
    if installed_version() >= _KV_PLAN_SINCE:
        translator = runner.kv_index_translator
        translator.own_plan(forward_batch).bind(forward_batch, translator)


@contextlib.contextmanager
def wrapper_scope(device: str) -> Iterator[None]:
    """Around a wrapper's own forward. On a CPU that SGLang has no build for, it would cap logits with a
    Triton kernel; it has the same in PyTorch for a CPU that it knows."""
    known = symbol("sglang.srt.layers.logits_processor", "_is_cpu")
    module: Any = importlib.import_module("sglang.srt.layers.logits_processor")
    try:
        module._is_cpu = known or device == "cpu"
        yield
    finally:
        module._is_cpu = known


def model_class(architecture: str) -> type | None:
    """SGLang's class for an architecture of config.json, or None."""
    registry = symbol("sglang.srt.models.registry", "ModelRegistry")
    if architecture not in registry.get_supported_archs():
        return None
    return registry.resolve_model_cls([architecture])[0]


def has_marks(model_class: type) -> bool:
    """Whether SGLang's class can be marked for capture: its EAGLE-3 or DFlash setter says so."""
    names = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")
    return any(hasattr(model_class, name) for name in names)


def architectures_with_marks() -> list[str]:
    registry = symbol("sglang.srt.models.registry", "ModelRegistry")
    return sorted(name for name, kind in registry.models.items() if has_marks(kind))


def hide_nccl() -> None:
    """Up to 0.5.22 SGLang opens NCCL whenever the library is there, and gives it the CPU for a GPU."""
    if installed_version() <= _NCCL_ON_CPU_UNTIL:
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent/libnccl.so")
        wrapper = "sglang.srt.distributed.device_communicators.pynccl_wrapper"
        logging.getLogger(wrapper).setLevel(logging.CRITICAL)


def bind_cores(cores: Sequence[int], place: Place) -> None:
    """Tell SGLang a core for each rank of this node: it refuses more ranks than NUMA nodes otherwise.

    Up to 0.5.18 it wants one for each tp rank and takes its own by that number; later it looks by the
    index of the device, which is this rank's on its node."""
    if installed_version() <= _CORES_BY_TP_RANK_UNTIL:
        first = place.local_rank - place.tp_rank
        cores = [cores[(first + n) % len(cores)] for n in range(place.tp)]
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))


# The CPU platform's memory pools ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PoolClasses:
    mha: type
    mla: type
    allocator: type | None


def cpu_pool_classes() -> PoolClasses:
    """SGLang's own pools, which work on any device; up to 0.5.21 a platform must name them, and they
    are given arguments that the in-tree classes do not take."""
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    if installed_version() > _POOLS_BY_PLATFORM_UNTIL:
        return PoolClasses(pools.MHATokenToKVPool, pools.MLATokenToKVPool, None)
    token = importlib.import_module("sglang.srt.mem_cache.allocator").TokenToKVPoolAllocator

    class TokenAllocator(token):
        def __init__(self, size: int, *, page_size: int, **kwargs: Any) -> None:
            assert page_size == 1, page_size
            super().__init__(size, **kwargs)

    class LatentPool(pools.MLATokenToKVPool):
        def __init__(self, size: int, *, index_head_dim: int | None, **kwargs: Any) -> None:
            assert index_head_dim is None, "sparse-attention indexers need a GPU"
            super().__init__(size, **kwargs)

    return PoolClasses(pools.MHATokenToKVPool, LatentPool, TokenAllocator)
