"""Read back what `store` wrote: a sample's file as mapped tensors.

A mapping costs nothing until a tensor is touched, so a reader that wants one state of six reads a
sixth of the file. safetensors' own reader does the same; this one also checks the file against what
is known of it, and hands out tensors that may be written to without the file changing.
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from extractor.errors import RunError
from extractor.layout import FP8, FP8_MAX
from extractor.store import DTYPE_NAMES

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SCALE = ".scale"


@dataclass(frozen=True, slots=True)
class MappedSample:
    """One safetensors file.

    Attributes:
        path: where it is.
        metadata: its text metadata.
        tensors: by name, views of the mapping: private, so that writing to one stays in memory.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return f"MappedSample({self.path.name}: {shapes})"


def map_sample(path: Path, size: int | None = None) -> MappedSample:
    """Map a file. With size, the one that the journal gives, a cut or changed file is noticed here.

    Raises RunError, with the path and what to do, for a file that is missing or not whole."""
    try:
        with path.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if size is not None and len(mapped) != size:
        raise _damaged(path, f"{len(mapped):,} bytes, and the journal says {size:,}")
    try:
        length = int.from_bytes(mapped[:8], "little")
        entries: dict[str, Any] = json.loads(mapped[8 : 8 + length])
        metadata: dict[str, str] = entries.pop("__metadata__", {})
        tensors = {name: _view(mapped, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"not a safetensors file: {error}") from error
    return MappedSample(path, metadata, tensors)


def _view(mapped: mmap.mmap, base: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if base + end > len(mapped):
        raise ValueError(f"a tensor ends at byte {base + end:,} of {len(mapped):,}")
    count = (end - begin) // dtype.itemsize
    if count == 0:
        return torch.zeros(entry["shape"], dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=base + begin)
    return flat.view(entry["shape"])


def _damaged(path: Path, what: str) -> RunError:
    return RunError(
        f"{path}: {what}; run the same extract command again, which writes it anew "
        "(docs/reliability.md)"
    )


def state_of(sample: MappedSample, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stored state [T, W], unscaled when it is float8, in dtype (default: as stored; float8 becomes
    bfloat16). A view of the mapping when nothing has to be computed."""
    value = sample.tensors[key]
    if value.dtype == FP8:
        return unscale(value, sample.tensors[key + SCALE], dtype or torch.bfloat16)
    return value if dtype is None else value.to(dtype)


def unscale(value: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8 [T, W] times its scale f32 [T] (or [T, 1, 1]), computed in float32."""
    assert value.dtype == FP8 and FP8_MAX == 448.0, value.dtype
    return (value.float() * scale.view(-1, *[1] * (value.dim() - 1))).to(dtype)
