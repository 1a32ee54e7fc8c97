"""The tensors of a sample's file: which states each holds, and how a state becomes bytes."""

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
    """One tensor of a sample's file, one row a token.

    Attributes:
        key: its name in the file.
        states: the states it holds, side by side in the last dimension; of top-k logits, its key.
        dtype: as stored.
        width: values a token; 0 for one number a token (a scale), stored as [T].
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
    """Each plane's tensor, contiguous, on the states' own device.

    float8: a token's scale is its largest magnitude over 448, so that value = stored * scale; a token
    of zeros has scale 1 (the convention of per-token dynamic quantization in vLLM and SGLang).
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
        encoded[plane.key] = (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        for other in planes:
            if other.scale_of == plane.key:
                encoded[other.key] = scale
    return {plane.key: encoded[plane.key] for plane in planes}


def finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: whether every value of a token's row is finite."""
    if tensor.dtype == FP8:
        # e4m3fn has one NaN pattern and no infinity; isfinite is not defined for it everywhere.
        return (tensor.view(torch.uint8) & 0x7F != 0x7F).all(dim=-1)
    finite = torch.isfinite(tensor)
    return finite.all(dim=-1) if finite.dim() > 1 else finite


def surely_finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: True where a token's row is finite; False asks for a closer look.

    One pass over the tensor: a sum is finite only if all its terms are, but a sum of finite terms may
    overflow."""
    if tensor.dtype == FP8:
        return finite_rows(tensor)
    return torch.isfinite(tensor.sum(dim=-1, dtype=torch.float32) if tensor.dim() > 1 else tensor)


# Tuples, and paths as text: a writer makes these for every sample while another thread launches kernels,
# which waits for each microsecond of the interpreter that they take.
class Blob(NamedTuple):
    """A tensor on its way into a file.

    Attributes:
        dtype, shape: as the file will say.
        data: its bytes, C-contiguous.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Blob":
        """A view, not a copy; the tensor must be contiguous and on the CPU."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu", tensor.shape
        plain = tensor.view(torch.uint8) if tensor.dtype in NOT_IN_NUMPY else tensor
        data = plain.numpy().data.cast("B") if tensor.numel() else memoryview(b"")
        return cls(tensor.dtype, tuple(tensor.shape), data)
