"""transformers as the reference for a quantized checkpoint.

Such a checkpoint defines its states by its dequantized weights and, where it says so, by quantized
inputs of its layers: with inputs as they are it is another model, some percent away. So the reference
runs the dequantized weights and quantizes the same inputs in the same groups, in float32 for the states
and in bfloat16 for the noise, and the rules of extractor/verbs/reference.py hold as they are. A bfloat16
rounding that tips an input over to the next of its few values makes a step of 6 %. It happens in either
program, elsewhere; so the noise is larger than without quantized inputs (a tenth of what a layer adds),
and near in size to what the quantization of inputs itself changes. A wrong layer, scale, row or dtype is
beyond it; whether a program quantizes inputs at all is not what these rules tell. Formats that quantize
weights alone have no such noise, and no other reference than their dequantized weights.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.quantized import FLOAT8_TOP, INPUTS, INT8_TOP, Inputs, Tensors, is_quantized
from tests.support.reference import Reference


def reference_of(model: Path, device: str) -> Reference:
    """The reference of a model's folder. What transformers cannot read as it is, a wrapper that it does
    not know or a quantized checkpoint, has its plain language model in reference/."""
    plain = model / "reference"
    path = plain if plain.is_dir() else model
    return (
        QuantizedReference(path, device) if (path / INPUTS).is_file() else Reference(path, device)
    )


def quantized(values: torch.Tensor, inputs: Inputs, scale: float | None = None) -> torch.Tensor:
    """Values [..., features] as their numbers and scales stand for them; the scale of a group is its
    largest value over the largest number unless one is given."""
    is_float = inputs.kind == "e4m3"
    top = FLOAT8_TOP if is_float else INT8_TOP
    groups = values.float().unflatten(-1, (-1, inputs.group or values.shape[-1]))
    if scale is None:
        steps = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / top
    else:
        steps = torch.full_like(groups[..., :1], scale)
    numbers = (groups / steps).clamp(-top, top)
    numbers = numbers.to(torch.float8_e4m3fn).float() if is_float else numbers.round()
    return (numbers * steps).flatten(-2).to(values.dtype)


class QuantizedReference(Reference):
    """Reference for a folder with INPUTS in it."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        super().__init__(path, device)
        self._inputs = Inputs(**json.loads((path / INPUTS).read_text()))

    def states(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
        with _QuantizedInputs(self._model(dtype), self._inputs) as mode:
            states = super().states(ids, dtype)
        assert not (left := mode.left()), f"these were multiplied in another way: {left}"
        return states

    def _model(self, dtype: torch.dtype) -> Any:
        model = super()._model(dtype)
        if hasattr(model, "set_experts_implementation"):  # one that multiplies expert by expert
            model.set_experts_implementation("eager")
        return model


class _QuantizedInputs(TorchFunctionMode):
    """Within it, quantized layers get quantized inputs."""

    def __init__(self, model: Any, inputs: Inputs) -> None:
        super().__init__()
        self._inputs = inputs
        # By storage, since an expert's matrix is a part of its layer's parameter.
        named = [(_place(p), n) for n, p in model.named_parameters() if is_quantized(n)]
        self._names = dict(named)
        assert len(self._names) == len(named) > 0
        self._seen: set[str] = set()

    def left(self) -> list[str]:
        """Weights that were multiplied with nothing."""
        return sorted(set(self._names.values()) - self._seen)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        values, weight, *rest = args
        name = self._names.get(_place(weight))
        if name is None:
            return func(*args, **kwargs)
        self._seen.add(name)
        scale = self._inputs.scales.get(name)
        return func(quantized(values, self._inputs, scale), weight, *rest, **kwargs)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
