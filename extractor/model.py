"""What a model is, read from its folder without loading a weight or running its code."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import logging as transformers_log

from extractor.errors import UsageError

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLED_BLOCK = 64 * 1024
SAMPLED_BLOCKS = 9
OVERRIDES = "json_model_override_args"
"""The field of SGLang's ServerArgs that changes fields of config.json."""

# What a multimodal config calls its language model's part, in SGLang's order, and what configs of
# models' own code call the fields of transformers.
TEXT_PARTS = ("thinker_config", "llm_config", "language_config", "text_config")
OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": (
        "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups",
    ),
    "vocab_size": ("padded_vocab_size",),
}  # fmt: skip

# SGLang takes the first of these that a config has for its context, and runs nothing longer.
CONTEXT_NAMES = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings",
)  # fmt: skip
NO_CONTEXT = 2048
"""What SGLang takes where a config has none of CONTEXT_NAMES."""

# Files beside config.json in which quantizers say what they did.
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
NO_KEYS = frozenset({"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"})
"""Layers, by their name in layer_types, that keep no keys and values of each token."""

MOST = 1 << 31
"""No shape is as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts of a checkpoint that decide shapes and limits.

    Attributes:
        path: local folder.
        architecture: the class name in config.json.
        num_layers: decoder layers, n.
        hidden_size: width of the residual stream, H.
        num_heads, num_kv_heads: attention heads and key-value heads, which tensor parallelism splits.
        vocab_size: rows of the embedding; every id must be in [0, vocab_size).
        context_length: the most tokens that the position encoding was made for, its scaling
            included.
        dtype: the checkpoint's own dtype name, such as "bfloat16".
        kv_bytes_per_token: keys and values of one token in all layers, in the model's dtype.
        weight_bytes: of the weight files together; 0 when there are none.
        digest: identity of config and weights (see weights_digest).
        window: tokens that some layer looks back over at most; None where all see everything.
        rope: parameters of the rotary embedding, as the config has them; empty where it has none.
        served_dtype: what SGLang computes in on a GPU where nobody says.
        quantization: identity of the files beside config.json that say how weights are quantized; ""
            where there are none.
    """

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int
    dtype: str
    kv_bytes_per_token: int
    weight_bytes: int
    digest: str
    window: int | None = None
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    served_dtype: str = "bfloat16"
    quantization: str = ""

    @classmethod
    def read(cls, model: str, overrides: str | None = None) -> "ModelSpec":
        """Defaults and nested parts are as transformers' class for the config's model_type has them;
        where it has none, config.json has to name every field.

        Args:
            overrides: the JSON object of --sglang json_model_override_args, whose fields replace
                those of config.json.

        Raises UsageError when there is no such model or its config lacks what is needed."""
        path = local_path(model)
        try:
            return cls._of(path, overridden(_read_json(path), overrides))
        except ConfigError as error:
            raise UsageError(f"--model {model}: config.json {error}") from error
        except OSError as error:
            name = error.filename or path
            raise UsageError(f"--model {model}: {name} cannot be read: {error.strerror}") from error

    @classmethod
    def _of(cls, path: Path, raw: Mapping[str, Any]) -> "ModelSpec":
        architecture, (outer, text) = _architecture(raw), _configs(raw)
        heads = _per_layer(text, "num_attention_heads")
        return cls(
            path=path,
            architecture=architecture,
            num_layers=_number(text, "num_hidden_layers"),
            hidden_size=_number(text, "hidden_size"),
            num_heads=min(heads),
            num_kv_heads=min(_per_layer(text, "num_key_value_heads", heads)),
            vocab_size=_number(text, "vocab_size"),
            context_length=_context_length(text),
            dtype=_dtype(text, outer) or "bfloat16",
            kv_bytes_per_token=_kv_bytes_per_token(text),
            weight_bytes=sum(file.stat().st_size for file in weight_files(path)),
            digest=weights_digest(path),
            window=_window(text),
            rope=_rope(text),
            served_dtype=_served_dtype(text, outer),
            quantization=_digest_of(path, QUANTIZATION_FILES),
        )


class ConfigError(Exception):
    """What is wrong with a config.json, to follow its name in a sentence."""


def local_path(model: str) -> Path:
    """The folder of a model given as a path or a hub id; a hub id is fetched into the hub's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"--model {model}: not a folder")
    try:
        return Path(snapshot_download(model, ignore_patterns=["*.pth", "original/*"]))
    except Exception as error:  # the hub library raises a dozen kinds, all with a readable message
        raise UsageError(
            f"--model {model}: no such folder, and the hub did not give it: {error}"
        ) from error


# config.json --------------------------------------------------------------------------------------
def _read_json(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise ConfigError(f"is no file in {path}")
    try:
        config, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"is not readable: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError("is no JSON object")
    return config


def overridden(config: dict[str, Any], overrides: str | None) -> dict[str, Any]:
    """config with the fields of overrides in their places: nested ones one by one, as SGLang does."""
    try:
        values: Any = json.loads(overrides or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"--sglang {OVERRIDES}={overrides}: wanted a JSON object")
    if not values:
        return config
    changed = dict(config)
    for name, value in values.items():
        before = _replaced_by(config, name)
        nested = isinstance(before, dict) and isinstance(value, dict)
        changed[name] = {**before, **value} if nested else value
    if values.keys() & {"rope_scaling", "rope_parameters"}:  # two names of one field
        for name in {"rope_scaling", "rope_parameters"} - values.keys():
            changed.pop(name, None)
    return changed


def _replaced_by(config: Mapping[str, Any], name: str) -> Any:
    if name not in ("rope_scaling", "rope_parameters"):
        return config.get(name)
    return config.get("rope_parameters") or config.get("rope_scaling")


def _configs(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """The whole config and its language model's part, by attributes; of transformers' classes as far
    as it has them for their model_type."""
    outer = _typed(raw)
    if outer is not None:
        try:
            return outer, outer.get_text_config(decoder=True)
        except ValueError as error:
            raise ConfigError(f"has no one language model: {_first_line(error)}") from error
    part = next((name for name in TEXT_PARTS if isinstance(raw.get(name), dict)), None)
    if part is None:
        return SimpleNamespace(**raw), SimpleNamespace(**raw)
    around = {name: value for name, value in raw.items() if name not in (part, "model_type")}
    inner = _typed(raw[part])
    return SimpleNamespace(**raw), inner or _configs({**around, **raw[part]})[1]


def config_class(kind: Any) -> Any:
    """transformers' own config class of a model_type, or None. SGLang registers classes of its own when
    it is imported. They are not asked, so that the answer is the same before and after."""
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    found = CONFIG_MAPPING[kind]
    return found if found.__module__.startswith("transformers.") else None


def _typed(raw: Mapping[str, Any]) -> Any:
    """transformers' config of these fields, or None where it has no class for the model_type."""
    kind = raw.get("model_type")
    if (known := config_class(kind)) is None:
        return None
    loud = transformers_log.get_verbosity()
    transformers_log.set_verbosity_error()  # SGLang reads it too, and says the rest
    try:
        return known.from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # a dozen kinds: each class checks in its own way
        if "auto_map" in raw:  # written for a class of the model's own code
            return None
        raise ConfigError(f"is no {kind} config: {_first_line(error)}") from error
    finally:
        transformers_log.set_verbosity(loud)


def _first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"has architectures {names!r}; wanted a list with the model's class name")
    return names[0]


def _get(text: Any, name: str) -> Any:
    names = (name, *OTHER_NAMES.get(name, ()))
    return next((v for v in (getattr(text, n, None) for n in names) if v is not None), None)


def _number(text: Any, name: str) -> int:
    value = _get(text, name)
    if value is None:
        raise ConfigError(f"lacks {name}")
    return _whole(name, value)


def _whole(name: str, value: Any) -> int:
    """A whole number from 1 up, also when it is written as 4096.0."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value < MOST:
        raise ConfigError(f"has {name} {str(value)[:60]!r}; wanted a whole number of 1 or more")
    return int(value)


def _per_layer(text: Any, name: str, default: list[int] | None = None) -> list[int]:
    """A number of each layer, where layers differ, or one of them all."""
    value = _get(text, name)
    if value is None:
        if default is None:
            raise ConfigError(f"lacks {name}")
        return default
    values = value if isinstance(value, list | tuple) and value else [value]
    return [_whole(name, each) for each in values]


def _context_length(text: Any) -> int:
    given = [(name, getattr(text, name, None)) for name in CONTEXT_NAMES]
    lengths = [int(_positive(name, value)) for name, value in given if value is not None]
    # The first is SGLang's limit, the last is what the scaling multiplies, which may be less.
    least = min(lengths[0], lengths[-1]) if lengths else NO_CONTEXT
    return min(_scaled(text, least), MOST)


def _window(text: Any) -> int | None:
    """transformers' configs clear sliding_window where use_sliding_window is off."""
    window = getattr(text, "sliding_window", None)
    kinds: Any = getattr(text, "layer_types", None)
    unused = isinstance(kinds, list) and "sliding_attention" not in kinds
    if not window or unused or not getattr(text, "use_sliding_window", True):
        return None
    return _whole("sliding_window", window)


def _rope(text: Any) -> Mapping[str, Any]:
    given: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    rope = dict(given) if isinstance(given, Mapping) else {}
    chunks = getattr(text, "dual_chunk_attention_config", None)
    return {**rope, "dual_chunk_attention_config": chunks} if chunks else rope


def _scaled(text: Any, length: int) -> int:
    """The context of a model with this max_position_embeddings, with its rope's scaling.

    Published configs of llama3 and longrope, and those with a rope a kind of layer (Gemma 3), have it
    in max_position_embeddings already; linear ones have the length before the scaling; YaRN's say what
    it multiplies, and max_position_embeddings may be either. A dynamic one is run up to the length
    before the scaling, where it scales nothing (engine/rope.py)."""
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return length
    kind = rope.get("rope_type") or rope.get("type")
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if factor is None or kind not in ("linear", "yarn", "deepseek_yarn"):
        return length
    times = max(_positive("rope factor", factor), 1.0)
    if original is None:
        return int(length * times)
    if kind == "linear":
        return length
    return max(length, int(_positive("original_max_position_embeddings", original) * times))


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"has {name} {str(value)[:60]!r}; wanted a number above 0")
    return float(min(value, 1 << 62))


def _kv_bytes_per_token(text: Any) -> int:
    kinds: Any = getattr(text, "layer_types", None)
    layers = _number(text, "num_hidden_layers")
    if isinstance(kinds, list) and len(kinds) == layers:
        layers -= sum(kind in NO_KEYS for kind in kinds)
    if latent := getattr(
        text, "kv_lora_rank", None
    ):  # MLA keeps one latent vector and the rotary part
        rotary = getattr(text, "qk_rope_head_dim", None) or 0
        return layers * (_whole("kv_lora_rank", latent) + int(rotary)) * 2
    heads = _per_layer(text, "num_attention_heads")
    kv_heads = _per_layer(text, "num_key_value_heads", heads)
    own = getattr(text, "head_dim", None)
    head_dim = _whole("head_dim", own) if own else _number(text, "hidden_size") // heads[0]
    return layers * 2 * -(-sum(kv_heads) // len(kv_heads)) * head_dim * 2


def _dtype(text: Any, outer: Any) -> str | None:
    """By name, or None where neither config has one."""
    for config in (text, outer):
        for name in ("dtype", "torch_dtype"):
            value = getattr(config, name, None)
            if isinstance(value, str | torch.dtype) and value != "auto":
                return str(value).removeprefix("torch.")
    return None


def _served_dtype(text: Any, outer: Any) -> str:
    """SGLang's own rule: float32 is halved, and so is what no config names."""
    named = _dtype(text, outer) or "float32"
    if named != "float32":
        return named
    gemma = str(getattr(text, "model_type", "")).startswith("gemma")
    return "bfloat16" if gemma else "float16"


# Weights ------------------------------------------------------------------------------------------
def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, in name order; safetensors alone when there are any."""
    for patterns in (("*.safetensors",), WEIGHT_PATTERNS):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        files = sorted(file for file in found if not file.is_dir())
        if strange := [file for file in files if not file.is_file()]:
            raise UsageError(f"{strange[0]}: is a link to nothing, or no regular file")
        if files:
            return files
    return []


def weights_digest(path: Path) -> str:
    """xxh3 of config.json, of the weight index, and of each weight file's name, size and nine evenly
    spaced blocks of 64 KiB: reads under a megabyte a file, and tells retrained weights apart."""
    digest = xxhash.xxh3_128()
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for index in sorted(path.glob("*.index.json")):
        digest.update(index.read_bytes())
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        last = max(size - SAMPLED_BLOCK, 0)
        with file.open("rb") as handle:
            for block in range(SAMPLED_BLOCKS):
                handle.seek(last * block // (SAMPLED_BLOCKS - 1))
                digest.update(handle.read(SAMPLED_BLOCK))
    return digest.hexdigest()


def _digest_of(path: Path, names: Sequence[str]) -> str:
    """xxh3 of those of these files that are there; "" where none is."""
    digest = xxhash.xxh3_128()
    found = [file for file in (path / name for name in names) if file.is_file()]
    for file in found:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16] if found else ""
