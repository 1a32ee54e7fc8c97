"""Public model shapes for dummy weights, and the law of lengths that all benchmarks share."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "max_window_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "llama-3-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 28672,
        "max_position_embeddings": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}


def model_folder(text: str) -> Path:
    """For argparse: a folder with a model."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no config.json")
    return Path(text)


def write_shape(name: str, folder: Path) -> Path:
    """A folder with the shape's config.json, for load_format=dummy."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return path


def lengths(count: int, longest: int = 2048, seed: int = 0) -> list[int]:
    """lognormal(6.6, 0.7) clipped to [32, longest]: mean about 900 tokens."""
    drawn = np.random.default_rng(seed).lognormal(6.6, 0.7, count)
    return np.clip(drawn.astype(int), 32, longest).tolist()


def write_rows(path: Path, counts: list[int], vocab: int, seed: int = 0) -> Path:
    """Pre-tokenized rows of random ids."""
    rng = np.random.default_rng(seed)
    with path.open("w") as out:
        for number, count in enumerate(counts):
            ids = rng.integers(0, vocab, count).tolist()
            row = {"id": f"b{number}", "input_ids": ids, "loss_mask": [1] * count}
            out.write(json.dumps(row) + "\n")
    return path
