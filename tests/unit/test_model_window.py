"""Windows that SGLang ignores bound what is run, since beyond them the states are another model's."""

import json
from pathlib import Path
from typing import Any

import pytest

from extractor.model import ModelSpec

CONFIG: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=32,
    max_position_embeddings=32768,
)


@pytest.mark.parametrize(
    ("architecture", "more", "length"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, 32768),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, 32768),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("GptOssForCausalLM", {"sliding_window": 128}, 32768),
        ("LlamaForCausalLM", {}, 32768),
    ],
)
def test_context_length(
    tmp_path: Path, architecture: str, more: dict[str, Any], length: int
) -> None:
    config = CONFIG | {"architectures": [architecture]} | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSpec.read(str(tmp_path)).context_length == length
