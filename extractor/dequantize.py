"""Plain weights of a quantized checkpoint, tensor by tensor: what its numbers and scales stand for.

A quantized matrix is stored beside its scales, under names that say which format it is:

    X.weight (fp8 or int8)  with X.weight_scale_inv   a scale for each block of rows and columns
    X.weight (fp8 or int8)  with X.weight_scale       one scale, or one for each row
    X.weight_packed (int32) with X.weight_scale       four or eight bits, a scale per group of columns

The first is DeepSeek's format, the others are compressed-tensors'. Formats that are not listed here
have no plain weights here, and who needs them is told so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32

SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
BLOCK_SCALE, SCALE, PACKED = ".weight_scale_inv", ".weight_scale", ".weight_packed"

# Beside a matrix, and not needed for its values: its shape, and scales of a layer's inputs.
BESIDE = (".weight_shape", ".input_scale", ".k_scale", ".v_scale", ".input_global_scale")


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a checkpoint, not read yet.

    Attributes:
        name: in the checkpoint.
        open: gives a tensor, or a slice of safetensors that reads when it is indexed.
    """

    name: str
    open: Callable[[], Any]


class NotPlain(Exception):
    """A format of quantized weights that is not known here; the text names it."""


def plain(sources: Sequence[Source], block: tuple[int, int], bits: int) -> list[Source]:
    """The same checkpoint with every quantized matrix as float32 [out, in], read when it is opened.

    Args:
        sources: all tensors of the checkpoint.
        block: rows and columns that share a block's scale.
        bits: of a packed number.
    """
    named = {source.name: source for source in sources}
    found: list[Source] = []
    for source in sources:
        if source.name.endswith((BLOCK_SCALE, SCALE, *BESIDE)):
            continue
        found.append(_plain(source, named, block, bits))
    return found


def _plain(
    source: Source, named: Mapping[str, Source], block: tuple[int, int], bits: int
) -> Source:
    stem = source.name.removesuffix(".weight").removesuffix(PACKED)
    scale, blocks = named.get(stem + SCALE), named.get(stem + BLOCK_SCALE)
    if source.name.endswith(PACKED):
        if scale is None or stem + ".weight_zero_point" in named:
            raise NotPlain("packed numbers with zero points")
        return Source(f"{stem}.weight", lambda: _unpacked(source, scale, bits))
    if not source.name.endswith(".weight"):
        return source
    if blocks is not None:
        return Source(source.name, lambda: _by_blocks(_read(source), _read(blocks), block))
    if scale is not None:
        return Source(source.name, lambda: _by_rows(_read(source), _read(scale)))
    return source


def _read(source: Source) -> torch.Tensor:
    opened = source.open()
    return opened if isinstance(opened, torch.Tensor) else opened[...]


def _by_blocks(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """numbers [out, in], scales [out / rows, in / columns], both rounded up."""
    rows = scales.float().repeat_interleave(block[0], 0)[: numbers.shape[0]]
    return numbers.float() * rows.repeat_interleave(block[1], 1)[:, : numbers.shape[1]]


def _by_rows(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """numbers [out, in]; scales of one element, [out], [out, 1], or [out, groups]."""
    if numbers.dtype not in SMALL:  # a plain matrix in a checkpoint that quantizes others
        return numbers
    wide = scales.float()
    if wide.numel() > 1:
        wide = wide.reshape(len(numbers), -1)
        wide = wide.repeat_interleave(numbers.shape[1] // wide.shape[1], 1)
    return numbers.float() * wide


def _unpacked(source: Source, scale: Source, bits: int) -> torch.Tensor:
    packed, scales = _read(source), _read(scale)
    shape = torch.Size((len(packed), packed.shape[1] * (32 // bits)))
    return _by_rows(unpack_from_int32(packed, bits, shape), scales)
