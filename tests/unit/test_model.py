"""Shapes and context of configs as they are published: few fields, old names, other names, parts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from extractor.errors import UsageError
from extractor.model import ModelSpec

CASES = Path(__file__).parents[1] / "data/cases"
LINEAR4 = {"type": "linear", "factor": 4.0}
YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(folder: Path, config: Any, overrides: str | None = None) -> ModelSpec:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return ModelSpec.read(str(folder), overrides)


def config_of(kind: str, architecture: str = "SomeForCausalLM", **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, **fields}


# Name, config.json, and (layers, width, heads, key-value heads, vocabulary, context, dtype, KV bytes).
PUBLISHED: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    (
        "llama 3.1",
        config_of(
            "llama",
            num_hidden_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            torch_dtype="bfloat16",
        ),
        (32, 4096, 32, 8, 128256, 131072, "bfloat16", 32 * 2 * 8 * 128 * 2),
    ),
    (
        "gpt2, by its own names",
        config_of("gpt2", n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257),
        (12, 768, 12, 12, 50257, 1024, "bfloat16", 12 * 2 * 12 * 64 * 2),
    ),
    (
        "gemma 3, a part of two fields",
        config_of("gemma3", text_config={"num_hidden_layers": 26, "hidden_size": 1152}),
        (26, 1152, 8, 4, 262208, 131072, "bfloat16", 26 * 2 * 4 * 256 * 2),
    ),
    (
        "qwen2.5-vl, flat with a rope of sections",
        config_of(
            "qwen2_5_vl",
            num_hidden_layers=36,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=2,
            vocab_size=151936,
            max_position_embeddings=128000,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            vision_config={"hidden_size": 1280},
            torch_dtype="float16",
        ),
        (36, 2048, 16, 2, 151936, 128000, "float16", 36 * 2 * 2 * 128 * 2),
    ),
    (
        "qwen2.5-omni, a part in a part",
        config_of(
            "qwen2_5_omni",
            thinker_config={"text_config": {"num_hidden_layers": 28, "hidden_size": 3584}},
        ),
        (28, 3584, 28, 4, 152064, 32768, "bfloat16", 28 * 2 * 4 * 128 * 2),
    ),
    (
        "llama 4",
        config_of("llama4", text_config={"num_hidden_layers": 48, "hidden_size": 5120}),
        (48, 5120, 40, 8, 202048, 131072, "bfloat16", 48 * 2 * 8 * 128 * 2),
    ),
    (
        "mistral 3, whose part is another family's",
        config_of(
            "mistral3",
            text_config={
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "head_dim": 128,
                "vocab_size": 131072,
            },
            dtype="float16",
        ),
        (40, 5120, 32, 8, 131072, 131072, "float16", 40 * 2 * 8 * 128 * 2),
    ),
    (
        "deepseek v3, latent attention",
        config_of(
            "deepseek_v3",
            max_position_embeddings=163840,
            rope_scaling={
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        ),
        (61, 7168, 128, 128, 129280, 163840, "bfloat16", 61 * (512 + 64) * 2),
    ),
    (
        "gpt-oss",
        config_of("gpt_oss", num_hidden_layers=24),
        (24, 2880, 64, 8, 201088, 131072, "bfloat16", 24 * 2 * 8 * 64 * 2),
    ),
    (
        "glm 4",
        config_of("glm4"),
        (40, 4096, 32, 2, 151552, 131072, "bfloat16", 40 * 2 * 2 * 128 * 2),
    ),
    (
        "phi 3, longrope",
        config_of(
            "phi3",
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        ),
        (32, 3072, 32, 32, 32064, 131072, "bfloat16", 32 * 2 * 32 * 96 * 2),
    ),
    (
        "qwen3-next, a quarter of whose layers keep keys",
        config_of("qwen3_next", num_hidden_layers=48, max_position_embeddings=262144),
        (48, 2048, 16, 2, 151936, 262144, "bfloat16", 12 * 2 * 2 * 256 * 2),
    ),
    (
        "kimi k2, a type that transformers does not know",
        config_of(
            "kimi_k2",
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            num_hidden_layers=61,
            hidden_size=7168,
            num_attention_heads=64,
            num_key_value_heads=64,
            vocab_size=163840,
            max_position_embeddings=131072,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            rope_scaling={"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            torch_dtype="bfloat16",
        ),
        (61, 7168, 64, 64, 163840, 131072, "bfloat16", 61 * (512 + 64) * 2),
    ),
    (
        "an unknown wrapper of a known family",
        config_of(
            "internvl_chat",
            llm_config={"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896},
            torch_dtype="float16",
        ),
        (24, 896, 32, 32, 151936, 32768, "float16", 24 * 2 * 32 * 28 * 2),
    ),
    (
        "an unknown wrapper of an unknown family, some of it outside",
        config_of(
            "kimi_k25_next",
            vocab_size=300,
            dtype="float16",
            text_config={
                "model_type": "kimi_k9",
                "num_hidden_layers": 3,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 512,
            },
        ),
        (3, 64, 4, 4, 300, 512, "float16", 3 * 2 * 4 * 16 * 2),
    ),
    (
        "chatglm, by its own names",
        config_of(
            "chatglm",
            num_layers=28,
            hidden_size=4096,
            num_attention_heads=32,
            multi_query_group_num=2,
            padded_vocab_size=65024,
            seq_length=32768,
        ),
        (28, 4096, 32, 2, 65024, 32768, "bfloat16", 28 * 2 * 2 * 128 * 2),
    ),
    (
        "heads that differ from layer to layer",
        config_of(
            "openelm",
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=[4, 8],
            num_key_value_heads=[1, 2],
            head_dim=16,
            vocab_size=300,
            max_position_embeddings=512,
        ),
        (2, 64, 4, 1, 300, 512, "bfloat16", 2 * 2 * 2 * 16 * 2),
    ),
]


@pytest.mark.parametrize(
    ("config", "wanted"), [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED]
)
def test_published_shapes(tmp_path: Path, config: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    spec = read(tmp_path, config)
    assert (
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.vocab_size,
        spec.context_length,
        spec.dtype,
        spec.kv_bytes_per_token,
    ) == wanted


def test_case_50(tmp_path: Path) -> None:
    """Five fields of a text config; its rope's factor is in the class's context already."""
    shutil.copy(CASES / "50_gemma3_text_config_defaults/config.json", tmp_path)
    spec = ModelSpec.read(str(tmp_path))
    assert (spec.num_heads, spec.num_kv_heads, spec.vocab_size) == (8, 4, 262208)
    assert (spec.num_layers, spec.hidden_size, spec.context_length) == (34, 2560, 131072)
    assert spec.kv_bytes_per_token == 34 * 2 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 4096, "rope_scaling": LINEAR4}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {**LINEAR4, "type": "dynamic"}}, 4096),
        # Vicuna 16K says it twice; SGLang would multiply the longer one.
        (
            {
                "max_position_embeddings": 4096,
                "max_sequence_length": 16384,
                "rope_scaling": LINEAR4,
            },
            16384,
        ),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN4}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN4}, 131072),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            16384,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {**LINEAR4, "rope_theta": 1e4}}, 16384),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "not_known"])
def test_context(tmp_path: Path, kind: str, fields: dict[str, Any], context: int) -> None:
    shape = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=300)
    assert read(tmp_path, config_of(kind, **shape, **fields)).context_length == context


def test_no_context_is_sglangs_own(tmp_path: Path) -> None:
    shape = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=300)
    assert read(tmp_path, config_of("not_known", **shape)).context_length == 2048


def test_overrides_replace_fields(tmp_path: Path) -> None:
    """As SGLang applies them: parts field by field, one rope under either name."""
    flat = config_of("qwen3", max_position_embeddings=40960, rope_parameters={"rope_theta": 1e6})
    assert read(tmp_path, flat, '{"num_hidden_layers": 3}').num_layers == 3
    assert read(tmp_path, flat, json.dumps({"rope_scaling": YARN4})).context_length == 131072
    nested = config_of("gemma3", text_config={"num_hidden_layers": 26, "hidden_size": 1152})
    changed = read(tmp_path, nested, '{"text_config": {"num_hidden_layers": 3}}')
    assert (changed.num_layers, changed.hidden_size) == (3, 1152)
    assert changed.digest == read(tmp_path, nested).digest
    for wrong in ("[1]", "{", "x", "null"):
        with pytest.raises(UsageError, match="wanted a JSON object"):
            read(tmp_path, flat, wrong)


def test_what_transformers_refuses_but_the_models_own_code_reads(tmp_path: Path) -> None:
    odd = config_of("phi3", hidden_size=3072, num_hidden_layers="32")
    with pytest.raises(UsageError, match=r"config\.json is no phi3 config"):
        read(tmp_path, odd)
    own = odd | {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "num_hidden_layers": 32.0,
        "num_attention_heads": 32,
        "vocab_size": 32064,
    }
    assert read(tmp_path, own).num_layers == 32


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "a"},
        {"hidden_size": None},
        {"hidden_size": [4096]},
        {"hidden_size": 255},
        {"num_hidden_layers": -3},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 1e30},
        {"num_hidden_layers": True},
        {"vocab_size": 1 << 80},
        {"num_attention_heads": {}},
        {"max_position_embeddings": float("inf")},
        {"max_position_embeddings": float("nan")},
        {"max_position_embeddings": -1},
        {"seq_length": "long"},
        {"rope_scaling": 5},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_scaling": {"rope_type": "linear", "factor": -2}},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": [],
            }
        },
        {"architectures": None},
        {"architectures": []},
        {"architectures": [7]},
        {"dtype": "banana"},
        {"model_type": "gemma3", "text_config": 5},
        {"model_type": ["llama"]},
        {"model_type": None},
    ],
    ids=str,
)
def test_a_wrong_config_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, config_of("llama") | change)
    text = str(caught.value)
    assert text.startswith(f"--model {tmp_path}: config.json ") and "\n" not in text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"a":' * 5000])
def test_a_damaged_config_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        UsageError, match=r"config\.json is (not readable|no JSON object)"
    ) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    import os

    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"model\.safetensors: is a link to nothing"):
        read(tmp_path, config_of("llama"))
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(UsageError, match=r"model\.safetensors: .* no regular file"):
        read(tmp_path, config_of("llama"))
