"""States of the real program's engine against transformers', every family and TP size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import torchrun
from tests.support.models import build_weights, cache_folder
from tests.support.parity_ledger import complaints, parse, record

# In order of what differs: plain, bias, its own class, QK norms, scaled embeddings and four norms a
# layer, sinks and windows, mixtures of experts, latent attention, and that inside a multimodal wrapper.
FAMILIES = [
    "tiny_llama",
    "tiny_qwen2",
    "tiny_mistral",
    "tiny_qwen3",
    "tiny_gemma3",
    "tiny_gptoss",
    "tiny_qwen3moe",
    "tiny_glm4moe",
    "tiny_dsv3",
    "tiny_kimi",
]
ALL_30 = ",".join(map(str, range(30))) + ",embed"


# The default run has real weights and one family over two ranks; -m slow has them all.
QUICK = {("tiny_qwen3", 2)}


def judged(model: Path, ranks: int, specs: list[str], device: str = "cpu", *sglang: str) -> Any:
    """Per choice of layers, the judgements of every state of every sample; raises what is not good."""
    result = torchrun(
        ranks, "-m", "tests.support.parity_worker", str(model), device, json.dumps(specs), *sglang
    )
    found = parse(result.lines)
    assert [entry["layers"] for entry in found] == specs, result.text[-3000:]
    record(model.name.removesuffix(".weights"), ranks, device, found)
    assert not (wrong := complaints(found)), wrong
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_smollm2_every_state(build_model: Callable[[str], Path], ranks: int) -> None:
    found = judged(build_model("smollm2"), ranks, [ALL_30])
    states = {item["name"] for item in found[0]["results"]}
    assert len(states) == 32  # 30 layers, embed, final
    assert {item["tokens"] for item in found[0]["results"]} == {1, 2, 21, 65, 391}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in QUICK else pytest.mark.slow)
        for name in FAMILIES
        for ranks in (1, 2)
    ],
)
def test_families(build_model: Callable[[str], Path], name: str, ranks: int) -> None:
    last = 9 if name in ("tiny_dsv3", "tiny_kimi") else 5
    found = judged(build_model(name), ranks, ["0,2,4", f"{last},3,embed,1"])
    # Every state's norm was in sight, so that the self-check saw what reads it.
    assert [entry["self_check"]["read"] for entry in found] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide_llama", "wide_qwen3", "wide_dsv3"])
def test_wide(name: str) -> None:
    """What GPU kernels need, as far as a CPU can run it: the models and their reference are right."""
    judged(build_weights(name, cache_folder()), 1, ["0,2,4", "5,3,embed,1"])


@pytest.mark.slow
def test_deepseek_choices_that_its_own_setter_gets_wrong(
    build_model: Callable[[str], Path],
) -> None:
    judged(build_model("tiny_dsv3"), 1, ["2,3,4", "1,2,4,9"])


@pytest.mark.slow
def test_deepseek_shape_on_eight_ranks(build_model: Callable[[str], Path]) -> None:
    judged(build_model("tiny_dsv3"), 8, ["0,2,4", "9,2,3,embed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_qwen3moe", "tiny_dsv3"])
def test_expert_parallel(build_model: Callable[[str], Path], name: str) -> None:
    judged(build_model(name), 2, ["0,2,4,embed"], "cpu", "ep_size=2")
