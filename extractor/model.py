"""What a model is, read from its folder without loading a weight or running its code."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig

from extractor.errors import UsageError

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# SGLang lets these look at every earlier token even when their config has a sliding window (Mistral 7B
# v0.1; Qwen with use_sliding_window): up to the window that is the same, beyond it another model.
WINDOW_IGNORED = frozenset(
    {
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
SAMPLED_BLOCK = 64 * 1024
SAMPLED_BLOCKS = 9


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
        context_length: the most tokens that the position encoding was made for, or that SGLang
            gives the model's own states for (see WINDOW_IGNORED).
        dtype: the checkpoint's own dtype name, such as "bfloat16".
        kv_bytes_per_token: keys and values of one token in all layers, in the model's dtype.
        weight_bytes: of the weight files together; 0 when there are none.
        digest: identity of config and weights (see weights_digest).
        text_config: the language model's part of config.json, as it stands there.
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
    text_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def read(cls, model: str) -> "ModelSpec":
        """Raises UsageError when there is no such model or its config lacks what is needed."""
        path = local_path(model)
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {model}: no config.json in {path}")
        try:
            config, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # or not an object
            raise UsageError(f"--model {model}: config.json is not readable: {error}") from error
        if not isinstance(config, Mapping):
            raise UsageError(f"--model {model}: config.json is no JSON object")
        text = text_config(config)
        try:
            return cls(
                path=path,
                architecture=config["architectures"][0],
                num_layers=int(text["num_hidden_layers"]),
                hidden_size=int(text["hidden_size"]),
                num_heads=int(text["num_attention_heads"]),
                num_kv_heads=int(text.get("num_key_value_heads") or text["num_attention_heads"]),
                vocab_size=int(text["vocab_size"]),
                context_length=_context_length(text, config["architectures"][0]),
                dtype=str(_first(text, config, "dtype", "torch_dtype", default="bfloat16")),
                kv_bytes_per_token=_kv_bytes_per_token(text),
                weight_bytes=sum(file.stat().st_size for file in weight_files(path)),
                digest=weights_digest(path),
                text_config=text,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"--model {model}: config.json lacks {error}") from error


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


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config; multimodal ones nest it under text_config."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    return config


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, in name order; safetensors alone when there are any."""
    for patterns in (("*.safetensors",), WEIGHT_PATTERNS):
        files = sorted({file for pattern in patterns for file in path.glob(pattern)})
        if files:
            return files
    return []


def _context_length(text: Mapping[str, Any], architecture: str) -> int:
    length = int(text.get("max_position_embeddings", 1 << 31))
    window = text.get("sliding_window")
    if architecture in WINDOW_IGNORED and window and text.get("use_sliding_window", True):
        return min(length, int(window))
    return length


def _kv_bytes_per_token(text: Mapping[str, Any]) -> int:
    layers = int(text["num_hidden_layers"])
    if text.get("kv_lora_rank"):  # MLA keeps one latent vector and the rotary part
        return layers * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))) * 2
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return layers * 2 * int(text.get("num_key_value_heads") or heads) * head_dim * 2


def _first(*places_and_keys: Any, default: str) -> Any:
    places = [p for p in places_and_keys if isinstance(p, Mapping)]
    keys = [k for k in places_and_keys if isinstance(k, str)]
    return next((p[k] for p in places for k in keys if p.get(k)), default)


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
