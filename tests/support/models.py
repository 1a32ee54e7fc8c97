"""Small models that tests run on, built once into a cache folder.

    python -m tests.support.models FOLDER

SmolLM2 has real weights. The others are random (seed 0), one a family, shaped so that eight tensor-
parallel ranks can share them. Mixture-of-experts ones choose the same experts for every token of a
layer: with random routers a bf16 rounding flips an expert now and then, and then no tolerance that is
tight enough to see a wrong layer would hold.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1"  # a new one makes every cache be built again

COMMON: dict[str, Any] = dict(
    vocab_size=49152,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
MOE: dict[str, Any] = dict(moe_intermediate_size=128, num_experts_per_tok=2)
YARN: dict[str, Any] = dict(
    type="yarn",
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def cache_folder() -> Path:
    """Where models are kept between runs; EXTRACTOR_TEST_MODELS names another place."""
    named = os.environ.get("EXTRACTOR_TEST_MODELS")
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(named or f"{base}/extractor/test-models-{VERSION}").expanduser()


def build(name: str, folder: Path) -> Path:
    """The folder of a model, built now if it is not there."""
    path = folder / name
    if not (path / "config.json").is_file():
        half = folder / f".{name}.{os.getpid()}"
        shutil.rmtree(half, ignore_errors=True)
        half.parent.mkdir(parents=True, exist_ok=True)
        BUILDERS[name](half, folder)
        half.rename(path)
    return path


def _smollm2(path: Path, _: Path) -> None:
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "launch/demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(path)


def _random(
    config: Any, edit: Callable[[Any], None] | None = None, extra: dict[str, Any] | None = None
) -> Callable[[Path, Path], None]:
    def make(path: Path, folder: Path) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        if edit is not None:
            edit(model)
        model.to(torch.bfloat16).save_pretrained(path)
        AutoTokenizer.from_pretrained(build("smollm2", folder)).save_pretrained(path)
        if extra:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | extra, indent=1))

    return make


def _fix_routing(model: Any) -> None:
    """Give two experts of each layer, other ones in each, a selection bias beyond every score."""
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            bias = getattr(getattr(layer.mlp, "gate", None), "e_score_correction_bias", None)
            if bias is not None:
                count = len(bias)
                bias.zero_()
                bias[index * 2 % count] = bias[(index * 2 + 1) % count] = 2.0


def _dsv3_config() -> Any:
    return transformers.DeepseekV3Config(
        num_hidden_layers=10,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        **MOE,
        **COMMON,
    )


# What SGLang reads in a DeepSeek config and transformers does not write.
_DSV3_EXTRA: dict[str, Any] = dict(
    moe_layer_freq=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    rope_theta=10000.0,
    rope_scaling=YARN,
    rope_parameters=YARN | {"rope_theta": 10000.0},
)


def _variant(
    *,
    template: str | None = None,
    files: dict[str, dict[str, Any]] | None = None,
    weights: Callable[[Path], None] | None = None,
) -> Callable[[Path, Path], None]:
    """tiny_qwen3 with another chat template, edited JSON files, or edited weights."""

    def make(path: Path, folder: Path) -> None:
        shutil.copytree(build("tiny_qwen3", folder), path)
        if template is not None:
            source = ROOT / "tests/data/templates" / f"{template}.jinja"
            shutil.copy(source, path / "chat_template.jinja")
        for name, values in (files or {}).items():
            file = path / name
            file.write_text(json.dumps(json.loads(file.read_text()) | values))
        if weights is not None:
            weights(path)

    return make


def _nan_for_zebra(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    ids = AutoTokenizer.from_pretrained(path)(" zebra", add_special_tokens=False).input_ids
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][ids[-1]] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


_BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    },
}

BUILDERS: dict[str, Callable[[Path, Path], None]] = {
    "smollm2": _smollm2,
    "tiny_qwen3": _random(
        lambda: transformers.Qwen3Config(num_hidden_layers=6, head_dim=64, **COMMON)
    ),
    "tiny_qwen3moe": _random(
        lambda: transformers.Qwen3MoeConfig(
            num_hidden_layers=6, head_dim=64, num_experts=8, **MOE, **COMMON
        )
    ),
    "tiny_dsv3": _random(_dsv3_config, _fix_routing, _DSV3_EXTRA),
    "think": _variant(template="case_think"),
    "strict": _variant(template="case_strict"),
    "gentag": _variant(template="case_generation_tag"),
    "bos": _variant(
        template="case_bos",
        files={
            "tokenizer.json": {"post_processor": _BOS},
            "tokenizer_config.json": {"bos_token": "<|endoftext|>"},
        },
    ),
    "left": _variant(
        files={"tokenizer_config.json": {"padding_side": "left", "truncation_side": "left"}}
    ),
    "nan_token": _variant(weights=_nan_for_zebra),
}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder()
    for each in BUILDERS:
        print(build(each, target))
