"""The self-check passes on the right states and names each wrong one that was put in their place."""

from collections.abc import Callable, Mapping

import pytest
import torch

from extractor.engine.capture import Capture
from extractor.engine.selfcheck import SelfCheck, self_check
from extractor.errors import RunError
from extractor.states import States
from tests.support.fake_backbone import LAYERS, VOCABULARY, Backbone, Gemma3TextModel

IDS = torch.arange(16) * 7 % VOCABULARY
EVERY = tuple(map(str, range(LAYERS)))
NAMES = ("embed", *EVERY, "final")
Tensors = dict[str, torch.Tensor]
Injury = Callable[[Tensors], Tensors]


def checked(
    *names: str,
    backbone: Backbone | None = None,
    injury: Injury = dict,
    across: Callable[[torch.Tensor], float] = lambda _: 0.0,
) -> SelfCheck:
    """The self-check of names, over captures whose states pass through injury first."""
    backbone = backbone or Backbone()
    every = States(NAMES, LAYERS)
    capture = Capture(backbone, every)

    def run() -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            backbone(IDS)
        found = injury(capture.take())
        return {name: found[name] for name in names}

    before = {name: value.clone() for name, value in backbone.named_parameters()}
    try:
        return self_check(run, backbone, States(names, LAYERS), across)
    finally:
        capture.remove()
        after = dict(backbone.named_parameters())
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["list", "layers"])
def test_right_states_pass(kind: str) -> None:
    proof = checked(*NAMES, backbone=Backbone(kind))
    assert proof.kept == 0.0
    assert proof.moved > 0.01
    assert proof.read == LAYERS + 1  # every layer's own and embed: final is read by lm_head alone


@pytest.mark.parametrize("name", NAMES)
def test_each_state_alone_passes(name: str) -> None:
    checked(name)


def test_unsummed_marks_pass_by_the_other_way() -> None:
    checked(*NAMES, backbone=Gemma3TextModel())


def shifted(by: int) -> Injury:
    def injure(found: Tensors) -> Tensors:
        wrong = {str(k): found[str(k + by)] for k in range(LAYERS) if str(k + by) in found}
        return found | wrong

    return injure


@pytest.mark.parametrize("name", EVERY[1:])
def test_an_earlier_layers_state_is_caught(name: str) -> None:
    with pytest.raises(RunError, match=f"state {name} does not change when its own layer is moved"):
        checked(name, injury=shifted(-1))


@pytest.mark.parametrize("name", EVERY[:-1])
def test_a_later_layers_state_is_caught(name: str) -> None:
    with pytest.raises(RunError, match=f"state {name} changes by .* when the next layer is moved"):
        checked(name, injury=shifted(1))


@pytest.mark.parametrize("pair", [("0", "1"), ("1", "3"), ("embed", "0"), ("2", "4")])
def test_two_swapped_states_are_caught(pair: tuple[str, str]) -> None:
    one, other = pair
    with pytest.raises(RunError, match=f"state ({one}|{other}) "):
        checked(one, other, injury=lambda x: x | {one: x[other], other: x[one]})


def test_a_dropped_last_layer_is_caught() -> None:
    with pytest.raises(RunError, match="state 4 does not change"):
        checked("1", "4", "final", injury=lambda x: x | {"4": x["3"]})


def test_a_stream_before_the_norm_given_as_final_is_caught() -> None:
    with pytest.raises(RunError, match="state final does not change"):
        checked("1", "final", injury=lambda x: x | {"final": x["4"]})


def test_a_normed_stream_given_as_a_layers_own_is_caught() -> None:
    with pytest.raises(RunError, match="state 4 "):
        checked("4", "final", injury=lambda x: x | {"4": x["final"]})


def test_a_partial_sum_on_a_rank_is_caught() -> None:
    """The second of two ranks, whose layers' outputs were not summed with the first's."""
    backbone = Backbone()
    first = backbone.truth(IDS)

    def across(state: torch.Tensor) -> float:
        return min(float((state - own).norm() / own.norm()) for own in first.values())

    proof = checked("1", "3", backbone=backbone, across=across)
    assert proof.ranks < 1e-5

    def injury(found: Tensors) -> Tensors:
        return found | {"3": found["2"] + (found["3"] - found["2"]) / 2}

    with pytest.raises(RunError, match="state 3 differs between tensor-parallel ranks"):
        checked("1", "3", backbone=backbone, injury=injury, across=across)


@pytest.mark.parametrize("name", ["0", "2", "3"])
def test_what_a_layer_adds_given_as_the_stream_is_caught(name: str) -> None:
    earlier = "embed" if name == "0" else str(int(name) - 1)
    with pytest.raises(RunError, match=f"state {name} is not the stream that was read after it"):
        checked(name, injury=lambda x: x | {name: x[name] - x[earlier]})


def test_half_a_stream_is_caught_where_scale_matters() -> None:
    with pytest.raises(RunError, match="state 4 is not the stream"):
        checked("4", "final", injury=lambda x: x | {"final": x["final"] / 2})


def test_values_that_are_not_finite_do_not_pass() -> None:
    with pytest.raises(RunError, match="state 2 "):
        checked("2", injury=lambda x: x | {"2": x["2"] * float("nan")})
