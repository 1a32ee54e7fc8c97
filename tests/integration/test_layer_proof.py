"""The start-up proof on real engines: it passes what is right, and names what is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import torchrun

Build = Callable[[str], Path]


def proof_of(model: Path, longest: int, *without: str, ranks: int = 1) -> dict[str, Any]:
    worker = ("-m", "tests.support.proof_worker", str(model), str(longest), *without)
    result = torchrun(ranks, *worker)
    found = [line for line in result.lines if line.startswith("PROOF ")]
    assert len(found) == 1, result.text[-3000:]
    return json.loads(found[0].removeprefix("PROOF "))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("odd_longrope", 1),
        pytest.param("tiny_gemma3", 2, marks=pytest.mark.slow),
        pytest.param("tiny_dsv3", 2, marks=pytest.mark.slow),
        pytest.param("tiny_kimi", 1, marks=pytest.mark.slow),
        pytest.param("tiny_gptoss", 1, marks=pytest.mark.slow),
    ],
)
def test_right_models_pass(build_model: Build, name: str, ranks: int) -> None:
    proof = proof_of(build_model(name), 300, ranks=ranks)
    assert not proof["skipped"] and proof["worst"] < 1, proof
    assert proof["tokens"] == 256 and proof["layers"]


@pytest.mark.parametrize(
    ("name", "without", "said"),
    [
        # A short sample takes the long factors of its neighbour.
        ("odd_longrope", ["without-rope"], "of a sample of 7 tokens, in a batch with shorter ones"),
        pytest.param("odd_bias", ["without-audit"], "layer 0", marks=pytest.mark.slow),
        pytest.param("odd_yarn", [], "layer 0", marks=pytest.mark.slow),
        # Beyond the window alone: the blocks before it are right.
        ("odd_window", [], "tokens 64 to 95 of a sample of 256 tokens"),
    ],
)
def test_it_finds_by_itself_what_sglang_does_otherwise(
    build_model: Build, name: str, without: list[str], said: str
) -> None:
    error = proof_of(build_model(name), 300, *without)["error"]
    assert error.startswith("layer proof: ") and said in error, error


@pytest.mark.slow
def test_what_is_not_read_is_refused_before_it(build_model: Build) -> None:
    assert "read by nothing" in proof_of(build_model("odd_bias"), 300)["error"]
