"""The planes of a sample's file: which states each tensor holds, and how a state becomes bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a sample's file, with one row per token.

    Attributes:
        key: its name in the file.
        states: the states it holds, side by side in the last dimension. A plane of top-k
            log-probabilities or ids has its own key here.
        dtype: the stored dtype.
        width: values per token; 0 for a scale, which is one number per token, stored as [T].
        scale_of: for a scale, the key of the float8 plane that it belongs to.
    """

    key: str
    states: tuple[str, ...]
    dtype: torch.dtype
    width: int
    scale_of: str | None = None

    @property
    def row_bytes(self) -> int:
        return max(self.width, 1) * self.dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens, self.width) if self.width else (tokens,)


def encode(planes: Sequence[Plane], states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensor of each plane by key, on the device of the states.

    With float8, the scale of a token is its largest magnitude divided by 448, so that
    value = stored * scale. A token of zeros has scale 1. This is the convention of per-token dynamic
    quantization in vLLM and SGLang.
    """
    encoded: dict[str, torch.Tensor] = {}
    for plane in planes:
        if plane.scale_of is not None:
            continue
        parts = [states[name] for name in plane.states]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if plane.dtype != FP8:
            encoded[plane.key] = value.to(plane.dtype).contiguous()
            continue
        wide = value.float()
        scale = wide.abs().amax(dim=-1) / FP8_MAX
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        # Rounding of the division may exceed the largest float8 value, so the result is clamped.
        encoded[plane.key] = (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        for other in planes:
            if other.scale_of == plane.key:
                encoded[other.key] = scale
    return {plane.key: encoded[plane.key] for plane in planes}


def finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: whether all values of a token's row are finite."""
    if tensor.dtype == FP8:
        # e4m3fn has no infinity, and its NaN is 0x7F with either sign. torch.isfinite does not
        # support this dtype everywhere.
        return (tensor.view(torch.uint8) & 0x7F != 0x7F).all(dim=-1)
    finite = torch.isfinite(tensor)
    return finite.all(dim=-1) if finite.dim() > 1 else finite


def surely_finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: True where a token's row is certainly finite; finite_rows decides the others.

    It takes one pass over the tensor. A sum is finite only if all its terms are, but a sum of finite
    terms may overflow.
    """
    if tensor.dtype == FP8:
        return finite_rows(tensor)
    return torch.isfinite(tensor.sum(dim=-1, dtype=torch.float32) if tensor.dim() > 1 else tensor)


# A tuple is cheap to make. A writer makes one for every tensor of a sample, while the thread that
# launches kernels waits for the interpreter.
class Blob(NamedTuple):
    """The bytes of a tensor that is written to a file.

    Attributes:
        dtype, shape: what the file's header gives.
        data: its bytes, C-contiguous.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Blob":
        """A view of the tensor's bytes. The tensor must be contiguous and on the CPU."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu", tensor.shape
        plain = tensor.view(torch.uint8) if tensor.dtype in NOT_IN_NUMPY else tensor
        data = plain.numpy().data.cast("B") if tensor.numel() else memoryview(b"")
        return cls(tensor.dtype, tuple(tensor.shape), data)
