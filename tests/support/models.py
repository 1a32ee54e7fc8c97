"""Small models that tests run on, built once into a cache folder.

    python -m tests.support.models FOLDER

SmolLM2 has real weights. The others are random (seed 0), one a family, shaped so that eight tensor-
parallel ranks can share them. Mixture-of-experts ones choose the same experts for every token of a
layer: with random routers a bf16 rounding flips an expert now and then, and then no tolerance that is
tight enough to see a wrong layer would hold.

WIDE ones have heads and latents as wide as real ones, for kernels of GPUs that take no others, and no
tokenizer: build_weights makes them, and only them that are asked for.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.quantized import SCHEMES, quantize

ROOT = Path(__file__).resolve().parents[2]
VERSION = "2"  # a new one makes every cache be built again

COMMON: dict[str, Any] = dict(
    vocab_size=49152,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
# A head of 128, and matrices that 128 divides on each of two ranks.
BROAD: dict[str, Any] = {
    **COMMON,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "head_dim": 128,
}
BROAD_MOE: dict[str, Any] = {
    **BROAD,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
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


def build_weights(name: str, folder: Path) -> Path:
    """The folder of a random model without a tokenizer, for machines that cannot get one."""
    path = folder / f"{name}.weights"
    if not (path / "config.json").is_file():
        maker = WIDE.get(name) or BUILDERS[name]
        assert isinstance(maker, Random | Quantized), name
        half = folder / f".{path.name}.{os.getpid()}"
        shutil.rmtree(half, ignore_errors=True)
        half.parent.mkdir(parents=True, exist_ok=True)
        maker.weights(half)
        half.rename(path)
    return path


def _smollm2(path: Path, _: Path) -> None:
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "launch/demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(path)


@dataclass(frozen=True)
class Random:
    """Makes a model of random weights.

    Attributes:
        config: makes transformers' config.
        edit: changes the model before it is saved.
        extra: fields of config.json that transformers does not write.
    """

    config: Callable[[], Any]
    edit: Callable[[Any], None] | None = None
    extra: dict[str, Any] | None = None

    def __call__(self, path: Path, folder: Path) -> None:
        self.weights(path)
        AutoTokenizer.from_pretrained(build("smollm2", folder)).save_pretrained(path)

    def weights(self, path: Path) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config())
        if self.edit is not None:
            self.edit(model)
        model.to(torch.bfloat16).save_pretrained(path)
        if self.extra:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | self.extra, indent=1))


@dataclass(frozen=True)
class Quantized:
    """Makes a quantized checkpoint of a random model, by a format of tests/support/quantized.py."""

    base: Random
    scheme: str

    def weights(self, path: Path) -> None:
        self.base.weights(path / "reference")
        quantize(path, SCHEMES[self.scheme])


def _fix_routing(model: Any) -> None:
    """Give two experts of each layer, other ones in each, a selection bias beyond every score."""
    for index, layer in enumerate(model.model.layers):
        bias = getattr(getattr(layer.mlp, "gate", None), "e_score_correction_bias", None)
        if bias is not None:
            _prefer(bias, index, 2.0)


def _fix_biased_router(model: Any) -> None:
    """The same for routers that are a linear layer with a bias. Small, since the bias takes part in
    the experts' weights, and a bfloat16 logit near 100 is rounded by a half."""
    for index, layer in enumerate(model.model.layers):
        _prefer(layer.mlp.router.bias, index, 4.0)


def _separate_experts(model: Any) -> None:
    """The same for routers without any bias: every token gets a common component, which two experts
    of each layer look for and the others do not."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.1
        for index, layer in enumerate(model.model.layers):
            gate = getattr(layer.mlp, "gate", None)
            if gate is None:
                continue
            gate.weight[:, 0] = 0.0
            _prefer(gate.weight[:, 0], index, 2.0)


def _prefer(values: torch.Tensor, index: int, by: float) -> None:
    """values [experts]: zero, but for two of them, others in each layer."""
    with torch.no_grad():
        values.zero_()
        values[index * 2 % len(values)] = values[(index * 2 + 1) % len(values)] = by


def _vary(model: Any) -> None:
    """Biases and norm weights start as zeros and ones, under which a forgotten one changes nothing."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and name.endswith("bias"):
                weight.normal_(std=0.1)
            elif weight.dim() == 1 and "norm" in name:
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))


def _carry_more(model: Any) -> None:
    """Embeddings as large as what layers add to them, as in trained models. By default they are a tenth
    of it, each layer works on little but the layer before, and the rounding of quantized inputs grows
    from layer to layer until the noise is as large as the quantization itself."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20.0)


def _strengthen(model: Any) -> None:
    """Matrices four times as large: attention that looks at some tokens and not at all alike."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4.0)


def _vary_sinks(model: Any) -> None:
    """Attention sinks start near zero, alike in all heads; trained ones take much of the weight."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(mean=1.0)


def _both(*edits: Callable[[Any], None]) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for each in edits:
            each(model)

    return edit


def _grouped(kv_heads: int, **more: Any) -> dict[str, Any]:
    """COMMON with fewer key-value heads, and fields of one family."""
    return {**COMMON, "num_hidden_layers": 6, "num_key_value_heads": kv_heads, **more}


def _dsv3_config(**more: Any) -> Any:
    narrow: dict[str, Any] = dict(
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
    )
    return transformers.DeepseekV3Config(**{**COMMON, **MOE, **narrow, **more})


def _gptoss_config(**more: Any) -> Any:
    narrow: dict[str, Any] = dict(
        head_dim=32,
        intermediate_size=128,
        sliding_window=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
            "rope_theta": 150000.0,
        },
    )
    return transformers.GptOssConfig(**_grouped(4, **{**narrow, **more}))


# What SGLang reads in a GPT-OSS config and not every transformers writes; its value is the only one.
_GPTOSS_EXTRA: dict[str, Any] = {"swiglu_limit": 7.0}


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


def _kimi(path: Path, folder: Path) -> None:
    """tiny_dsv3 inside Kimi-K2.5's multimodal wrapper, whose vision tower text rows never meet.
    The plain model is kept beside it, in reference/, for transformers to read."""
    text = build("tiny_dsv3", folder)
    shutil.copytree(text, path / "reference")
    for file in text.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, path)
    tensors = load_file(text / "model.safetensors")
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    inner = json.loads((text / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": inner,
        "vision_config": {
            "vt_hidden_size": 64,
            "vt_num_attention_heads": 4,
            "vt_num_hidden_layers": 1,
            "vt_intermediate_size": 128,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "intermediate_size": 128,
            "mm_hidden_size": 64,
            "text_hidden_size": inner["hidden_size"],
        },
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))


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
            source = ROOT / "tests/data/case_templates" / f"{template}.jinja"
            shutil.copy(source, path / "chat_template.jinja")
        for name, values in (files or {}).items():
            file = path / name
            file.write_text(json.dumps(json.loads(file.read_text()) | values))
        if weights is not None:
            weights(path)

    return make


def _nan_for_zebra(path: Path) -> None:
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
    "tiny_qwen3": Random(
        lambda: transformers.Qwen3Config(num_hidden_layers=6, head_dim=64, **COMMON)
    ),
    "tiny_qwen3moe": Random(
        lambda: transformers.Qwen3MoeConfig(
            num_hidden_layers=6, head_dim=64, num_experts=8, **MOE, **COMMON
        ),
        _separate_experts,
    ),
    "tiny_dsv3": Random(_dsv3_config, _fix_routing, _DSV3_EXTRA),
    "tiny_llama": Random(lambda: transformers.LlamaConfig(**_grouped(4)), _vary),
    "tiny_qwen2": Random(lambda: transformers.Qwen2Config(**_grouped(2)), _vary),
    "tiny_mistral": Random(
        lambda: transformers.MistralConfig(**_grouped(4, head_dim=64, sliding_window=None)), _vary
    ),
    "tiny_gemma3": Random(
        lambda: transformers.Gemma3TextConfig(
            **_grouped(
                4,
                head_dim=32,
                sliding_window=32,
                query_pre_attn_scalar=32,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
                tie_word_embeddings=True,
            )
        ),
        _vary,
    ),
    "tiny_gptoss": Random(_gptoss_config, _both(_vary, _fix_biased_router), _GPTOSS_EXTRA),
    "tiny_glm4moe": Random(
        lambda: transformers.Glm4MoeConfig(
            **_grouped(
                4,
                head_dim=32,
                n_routed_experts=8,
                n_shared_experts=1,
                first_k_dense_replace=1,
                use_qk_norm=True,
                attention_bias=True,
                num_nextn_predict_layers=0,
                **MOE,
            )
        ),
        _both(_vary, _fix_routing),
    ),
    # For top-k logits: a tied head and a soft cap near the size of these logits; and a vocabulary that
    # is no multiple of what SGLang pads it to.
    "tiny_softcap": Random(
        lambda: transformers.Gemma3TextConfig(
            **_grouped(
                4,
                head_dim=32,
                sliding_window=32,
                query_pre_attn_scalar=32,
                tie_word_embeddings=True,
                final_logit_softcapping=0.5,
            )
        ),
        _vary,
    ),
    "tiny_vocab100": Random(
        lambda: transformers.Qwen3Config(
            **{**COMMON, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 100}
        )
    ),
    "tiny_kimi": _kimi,
    "tiny_llama4": Random(
        lambda: transformers.Llama4TextConfig(
            **_grouped(
                4,
                head_dim=32,
                intermediate_size=128,
                intermediate_size_mlp=512,
                num_local_experts=8,
                num_experts_per_tok=1,
                interleave_moe_layer_step=2,
                attention_chunk_size=8192,
            )
        ),
        _vary,
    ),
    "tiny_qwen3next": Random(
        lambda: transformers.Qwen3NextConfig(
            **_grouped(
                4,
                head_dim=32,
                linear_key_head_dim=32,
                linear_value_head_dim=32,
                linear_num_key_heads=8,
                linear_num_value_heads=8,
                num_experts=8,
                shared_expert_intermediate_size=128,
                **MOE,
            )
        ),
        _separate_experts,
    ),
    # What the start-up proof is for: two tables of one rotary embedding, a window that SGLang's class
    # leaves out, biases that it leaves out, and a factor that it does not read.
    "odd_longrope": Random(
        lambda: transformers.LlamaConfig(
            **_grouped(
                4,
                num_hidden_layers=2,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 16,
                    "long_factor": [1 + n / 2 for n in range(16)],
                },
                max_position_embeddings=512,
            ),
        ),
        _both(_vary, _strengthen),
    ),
    "odd_window": Random(
        lambda: transformers.MistralConfig(
            **_grouped(4, num_hidden_layers=2, head_dim=32, sliding_window=64)
        ),
        _both(_vary, _strengthen),
    ),
    "odd_bias": Random(
        lambda: transformers.LlamaConfig(**_grouped(4, num_hidden_layers=2, mlp_bias=True)),
        _both(_vary, _strengthen),
    ),
    "odd_yarn": Random(
        lambda: transformers.LlamaConfig(
            **_grouped(
                4,
                num_hidden_layers=2,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                    "attention_factor": 0.7,
                },
            )
        ),
        _both(_vary, _strengthen),
    ),
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


def _qwen3_config() -> Any:
    return transformers.Qwen3Config(**BROAD)


def _wide_dsv3_config() -> Any:
    """A latent of 512 beside 64 rotary features, as every DeepSeek and Kimi has."""
    return _dsv3_config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        moe_intermediate_size=256,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


_QWEN3 = Random(_qwen3_config, _both(_vary, _carry_more))
_QWEN3_MOE = Random(
    lambda: transformers.Qwen3MoeConfig(**BROAD_MOE), _both(_vary, _separate_experts, _carry_more)
)
_DSV3 = Random(_wide_dsv3_config, _both(_vary, _fix_routing, _carry_more), _DSV3_EXTRA)

WIDE: dict[str, Random | Quantized] = {
    "wide_llama": Random(lambda: transformers.LlamaConfig(**BROAD), _vary),
    "wide_qwen3": Random(_qwen3_config, _vary),
    "wide_dsv3": Random(_wide_dsv3_config, _both(_vary, _fix_routing), _DSV3_EXTRA),
    "wide_gptoss": Random(
        lambda: _gptoss_config(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=512,
            num_hidden_layers=6,
            head_dim=64,
            sliding_window=64,
        ),
        _both(_vary, _vary_sinks, _fix_biased_router),
        _GPTOSS_EXTRA,
    ),
    "fp8_qwen3": Quantized(_QWEN3, "fp8"),
    "fp8_tensor_qwen3": Quantized(_QWEN3, "fp8_tensor"),
    "ct_fp8_qwen3": Quantized(_QWEN3, "ct_fp8"),
    "ct_int8_qwen3": Quantized(_QWEN3, "ct_int8"),
    "ct_int4_qwen3": Quantized(_QWEN3, "ct_int4"),
    "awq_qwen3": Quantized(_QWEN3, "awq"),
    "fp8_qwen3moe": Quantized(_QWEN3_MOE, "fp8"),
    "fp8_dsv3": Quantized(_DSV3, "fp8"),
}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder()
    for each in BUILDERS:
        print(build(each, target))
