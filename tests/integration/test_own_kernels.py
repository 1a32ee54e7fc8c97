"""Our kernels in SGLang's own models: states stay what they were, and who does not fit is left alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import torchrun


def run(model: Path) -> dict[str, Any]:
    worker = ("-m", "tests.support.kernels_worker", str(model))
    result = torchrun(1, *worker, TRITON_INTERPRET="1")
    lines = [line for line in result.lines if line.startswith("KERNELS ")]
    assert lines, result.text[-3000:]
    return json.loads(lines[0].removeprefix("KERNELS "))


@pytest.mark.parametrize(
    "name", ["tiny_qwen3", pytest.param("tiny_qwen3moe", marks=pytest.mark.slow)]
)
def test_states_stay_what_they_were(build_model: Callable[[str], Path], name: str) -> None:
    found = run(build_model(name))
    assert found["layers"] == 6
    # Not the same bits, or it did not run; float32's rounding, or it did something else.
    assert all(0 < apart < 3e-6 for apart in found["apart"]), found


@pytest.mark.slow
def test_a_model_without_such_norms_is_left_alone(build_model: Callable[[str], Path]) -> None:
    assert run(build_model("tiny_llama")) == {"layers": 0, "apart": [0.0, 0.0]}
