"""The window of a config, and which of SGLang's classes apply one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extractor.engine import sglang as engine
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.run.lead import _check_window

CONFIG: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=32,
    max_position_embeddings=32768,
)


def spec_of(folder: Path, architecture: str, kind: str, **more: Any) -> ModelSpec:
    config = CONFIG | {"architectures": [architecture], "model_type": kind} | more
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.read(str(folder))


@pytest.mark.parametrize(
    ("architecture", "kind", "more", "window"),
    [
        ("MistralForCausalLM", "mistral", {"sliding_window": 4096}, 4096),
        ("MistralForCausalLM", "mistral", {"sliding_window": None}, None),
        ("Qwen2ForCausalLM", "qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        (
            "Qwen2ForCausalLM",
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
        ),
        ("GptOssForCausalLM", "gpt_oss", {"sliding_window": 128}, 128),
        ("OwnForCausalLM", "own_code", {"sliding_window": 4096}, 4096),
        ("LlamaForCausalLM", "llama", {}, None),
    ],
)
def test_window_and_context(
    tmp_path: Path, architecture: str, kind: str, more: dict[str, Any], window: int | None
) -> None:
    spec = spec_of(tmp_path, architecture, kind, **more)
    assert spec.window == window
    assert spec.context_length >= 32768


@pytest.mark.parametrize(
    ("architecture", "applied"),
    [
        ("MistralForCausalLM", False),
        ("Qwen2ForCausalLM", False),
        ("Phi3ForCausalLM", False),
        ("NoSuchModel", False),
        ("Gemma3ForCausalLM", True),
        ("GptOssForCausalLM", True),
    ],
)
def test_sglang_s_own_classes_say_whether_they_apply_one(
    tmp_path: Path, architecture: str, applied: bool
) -> None:
    engine.platform.request()
    spec = spec_of(tmp_path, architecture, "mistral", sliding_window=64)
    assert engine.applies_window(spec) == applied


@pytest.mark.parametrize("lengths", [[1, 64], [], [64]])
def test_samples_within_the_window_run(tmp_path: Path, lengths: list[int]) -> None:
    spec = spec_of(tmp_path, "MistralForCausalLM", "mistral", sliding_window=64)
    deaf: Any = SimpleNamespace(applies_window=lambda spec: False)
    _check_window(deaf, spec, np.array(lengths, dtype=np.int64))


def test_longer_ones_are_refused_by_number(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "MistralForCausalLM", "mistral", sliding_window=64)
    deaf: Any = SimpleNamespace(applies_window=lambda spec: False)
    with pytest.raises(UsageError, match=r"2 samples .* 64 tokens.*--max-length 64"):
        _check_window(deaf, spec, np.array([1, 65, 200]))
    heard: Any = SimpleNamespace(applies_window=lambda spec: True)
    _check_window(heard, spec, np.array([1, 65, 200]))
