"""Capture: hooks on the backbone that read the residual stream and leave the model as it was.

The backbone is the module that owns the decoder layers and the final norm (`model.model` in most
wrappers). SGLang's own marks make it hand out the stream at the input of marked layers, with every
partial sum reduced; a hook on the backbone takes these away again, so that whatever reads its return
value sees a plain tensor, and the wrapper's `capture_aux_hidden_states` stays False. Two states have
no mark: the stream before layer 0 is read at that layer's door, and the last layer's own state is the
residual that the final norm returns beside its output. Backbones whose marks are wrong (UNSUMMED) are
read that second way throughout.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from extractor.errors import UsageError
from extractor.states import EMBED, FINAL, States

# Their marks hand out what a layer adds to the stream, not the stream: the residual, which lives beside
# it, is not added (SGLang 0.5.17 to 0.5.23). The norm at the next layer's door adds it and returns it.
UNSUMMED = frozenset({"Gemma3TextModel"})


class CaptureError(RuntimeError):
    """The model did not hand out the states it was marked for: never written, always fatal."""


class Capture:
    """Marks a backbone and collects its states, one forward pass at a time.

    Args:
        backbone: module with `layers`, `norm` and `layers_to_capture`.
        states: what to keep.

    Raises:
        UsageError: when the backbone has no marks.
    """

    def __init__(self, backbone: nn.Module, states: States) -> None:
        if not supports_capture(backbone):
            raise UsageError(f"{type(backbone).__name__} has no capture marks")
        self.states, self._backbone = states, backbone
        layers: Sequence[nn.Module] = backbone.layers  # pyright: ignore[reportAssignmentType]
        self._layers = layers
        last = states.num_layers - 1
        assert len(layers) == states.num_layers, (len(layers), states.num_layers)
        inner = sorted(k for k in states.layers if k != last)
        unsummed = type(backbone).__name__ in UNSUMMED
        self._marked = [] if unsummed else inner
        self._mark(self._marked)
        self._seen: dict[str, torch.Tensor] = {}
        self._handles = [backbone.register_forward_hook(self._on_backbone)]
        for k in inner if unsummed else ():
            norm: nn.Module = layers[k + 1].input_layernorm  # pyright: ignore[reportAssignmentType]
            self._handles.append(norm.register_forward_hook(partial(self._on_norm, k)))
        if EMBED in states.names:
            hook = layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True)
            self._first_forward = inspect.signature(layers[0].forward)
            self._handles.append(hook)
        if last in states.layers:
            norm = backbone.norm  # pyright: ignore[reportAssignmentType]
            self._handles.append(norm.register_forward_hook(partial(self._on_norm, last)))

    def take(self) -> dict[str, torch.Tensor]:
        """The states of the pass that just ended, in the order asked: [tokens, hidden] each.

        Raises CaptureError when one is missing, which says that the model took a path around the
        hooks."""
        seen, self._seen = self._seen, {}
        missing = [name for name in self.states.names if name not in seen]
        if missing:
            raise CaptureError(
                f"asked for states {self.states}; the model did not hand out {', '.join(missing)}"
            )
        return {name: seen[name] for name in self.states.names}

    def forget(self) -> None:
        """Let go of what a pass left that did not end."""
        self._seen = {}

    def remove(self) -> None:
        """Take hooks and marks away: the backbone is as it was."""
        for handle in self._handles:
            handle.remove()
        self._mark([])

    def _mark(self, layers: list[int]) -> None:
        # Mark i is the stream at the input of layer i: the output of layer i-1.
        self._backbone.layers_to_capture = [k + 1 for k in layers]  # pyright: ignore
        for index, layer in enumerate(self._layers):
            # Qwen's MoE kin read the mark on the layer instead of the list.
            layer._is_layer_to_capture = index - 1 in layers  # pyright: ignore

    def _on_first_layer(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._first_forward.bind(*args, **kwargs).arguments
        # Later layers add to this very storage in place.
        self._seen[EMBED] = given["hidden_states"].clone()

    def _on_norm(self, k: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # norm(x, residual) returns (normed, x + residual); norm(x) alone normed the stream itself.
        stream = output[1] if isinstance(output, tuple) else args[0]
        # What comes after the norm of an inner layer adds to this very storage in place.
        self._seen[str(k)] = stream if k == self.states.num_layers - 1 else stream.clone()

    def _on_backbone(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor:
        hidden, aux = output if isinstance(output, tuple) else (output, ())
        if isinstance(aux, torch.Tensor):  # packed [tokens, K * hidden]
            width = hidden.shape[-1]
            if aux.shape[-1] != width * len(self._marked):
                raise CaptureError(
                    f"{len(self._marked)} layers are marked; the model packed "
                    f"{aux.shape[-1]} columns of states {width} wide"
                )
            aux = aux.split(width, dim=-1)
        if len(aux) != len(self._marked):
            raise CaptureError(f"{len(self._marked)} layers are marked; {len(aux)} states came")
        self._seen.update(zip(map(str, self._marked), aux, strict=True))
        if FINAL in self.states.names:
            self._seen[FINAL] = hidden
        return hidden


def supports_capture(backbone: nn.Module) -> bool:
    return all(hasattr(backbone, name) for name in ("layers", "norm", "layers_to_capture"))


def find_backbone(model: nn.Module) -> nn.Module | None:
    """The marked language-model backbone inside a wrapper; multimodal ones nest it deeper."""
    for path in ("model", "language_model.model", "model.language_model", "language_model"):
        module: Any = model
        for part in path.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.Module) and supports_capture(module):
            return module
    return None
