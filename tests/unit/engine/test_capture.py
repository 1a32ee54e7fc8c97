"""Capture on a small decoder: the right states in the order asked, and the model as it was."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.engine.capture import Capture, CaptureError, find_backbone, supports_capture
from extractor.errors import UsageError
from extractor.states import States
from tests.support.fake_backbone import LAYERS, VOCABULARY, Backbone, Gemma3TextModel

KINDS: dict[str, Callable[[], Backbone]] = {
    "list": Backbone,
    "flags on layers": lambda: Backbone("layers"),
    "packed": lambda: Backbone(packed=True),
    "unsummed": Gemma3TextModel,
}
NAMES = ("embed", *map(str, range(LAYERS)), "final")
IDS = torch.arange(11) * 7 % VOCABULARY


def states(*names: str) -> States:
    return States(names, LAYERS)


def captured(backbone: Backbone, wanted: States) -> dict[str, torch.Tensor]:
    capture = Capture(backbone, wanted)
    with torch.no_grad():
        backbone(IDS)
    found = capture.take()
    capture.remove()
    return found


def same(found: dict[str, torch.Tensor], backbone: Backbone) -> bool:
    truth = backbone.truth(IDS)
    return all(torch.allclose(value, truth[name], atol=1e-5) for name, value in found.items())


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_of_up_to_three(kind: str) -> None:
    for count in (1, 2, 3):
        for names in itertools.permutations(NAMES, count):
            backbone = KINDS[kind]()
            found = captured(backbone, states(*names))
            assert tuple(found) == names
            assert same(found, backbone), names


@given(st.permutations(NAMES), st.sampled_from(sorted(KINDS)))
@settings(max_examples=40, deadline=None)
def test_all_of_them_in_any_order(names: list[str], kind: str) -> None:
    backbone = KINDS[kind]()
    found = captured(backbone, states(*names))
    assert list(found) == names
    assert same(found, backbone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_returns_what_it_returned_before(kind: str) -> None:
    backbone = KINDS[kind]()
    plain = backbone(IDS)
    capture = Capture(backbone, states("0", "2", "embed", "4", "final"))
    marked = backbone(IDS)
    assert isinstance(marked, torch.Tensor)
    assert torch.equal(marked, plain)
    capture.remove()
    assert torch.equal(backbone(IDS), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_marks_are_gone_after_remove(kind: str) -> None:
    backbone = KINDS[kind]()
    Capture(backbone, states("embed", "1", "4", "final")).remove()
    assert backbone.layers_to_capture == []
    for module in backbone.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not getattr(module, "_is_layer_to_capture", False)


def test_one_pass_does_not_leak_into_the_next() -> None:
    backbone = Backbone()
    capture = Capture(backbone, states("1", "final"))
    backbone(IDS)
    capture.take()
    with pytest.raises(CaptureError, match="did not hand out 1, final"):
        capture.take()


def test_a_state_too_few_is_fatal() -> None:
    backbone = Backbone()
    capture = Capture(backbone, states("1", "3"))
    backbone.layers_to_capture = [2]
    with pytest.raises(CaptureError, match="2 layers are marked; 1 states came"):
        backbone(IDS)
    capture.remove()


def test_packed_states_of_another_width_are_fatal() -> None:
    backbone = Backbone(packed=True)
    Capture(backbone, states("1", "3"))
    backbone.layers_to_capture = [2]
    with pytest.raises(CaptureError, match="packed 16 columns of states 16 wide"):
        backbone(IDS)


def test_marks_that_a_model_ignores_are_fatal() -> None:
    backbone = Backbone("layers")
    Capture(backbone, states("1", "3"))
    for layer in backbone.layers:
        layer._is_layer_to_capture = False  # pyright: ignore
    with pytest.raises(CaptureError, match="2 layers are marked; 0 states came"):
        backbone(IDS)


def test_a_norm_that_is_bypassed_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone()
    capture = Capture(backbone, states("4"))
    norm = backbone.norm
    monkeypatch.setattr(
        type(norm), "__call__", lambda self, *args: type(norm).forward(self, *args), raising=False
    )
    backbone(IDS)
    with pytest.raises(CaptureError, match="did not hand out 4"):
        capture.take()


def test_a_model_without_marks_is_refused() -> None:
    backbone = Backbone()
    del backbone.layers_to_capture
    assert not supports_capture(backbone)
    with pytest.raises(UsageError, match="Backbone has no capture marks"):
        Capture(backbone, states("1"))


@pytest.mark.parametrize(
    "path", ["model", "language_model.model", "model.language_model", "language_model"]
)
def test_the_backbone_is_found_inside_its_wrapper(path: str) -> None:
    backbone = Backbone()
    model: torch.nn.Module = backbone
    for part in reversed(path.split(".")):
        outer = torch.nn.Module()
        outer.add_module(part, model)
        model = outer
    assert find_backbone(model) is backbone
    assert find_backbone(torch.nn.Linear(1, 1)) is None
