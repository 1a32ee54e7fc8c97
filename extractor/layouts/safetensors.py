"""safetensors files, written directly from a batch's pinned buffer and read back as mapped tensors.

A safetensors file (https://github.com/huggingface/safetensors, "Format") holds the length of the
header in eight bytes, a JSON header that is padded to a multiple of eight, and the tensors without
gaps. This module writes it without the library, because the library copies what it saves, and the
states are in pinned memory already.

It also reads the file without the library. A mapping costs nothing until a tensor is used, so that a
reader of one state in six reads a sixth of the file. The library's reader maps the file as well. This
one also checks the file's size against the journal, and a write to its tensors does not change the
file.
"""

import math
import mmap
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec
import torch
import xxhash

from extractor.errors import RunError
from extractor.files import compact_json
from extractor.layouts.base import Damaged, Layout, Parts
from extractor.layouts.planes import FP8, FP8_MAX, Blob, Plane
from extractor.printable import printable
from extractor.records import Entry, Sample
from extractor.regular import map_regular, open_regular, reading
from extractor.strict import decode

DTYPE_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SCALE = ".scale"


@dataclass(frozen=True, kw_only=True)
class Framed(Layout):
    """A layout of safetensors files: header and ids, then the rows of each plane, then the mask.

    The rows are the bytes of the batch's buffer without a change. So a process that maps this buffer
    needs only their place in it and the frame: the bytes before and after them.
    """

    ids: ClassVar[str]
    """The ids' name in the file."""

    @abstractmethod
    def metadata(self, sample: Sample) -> dict[str, str]: ...

    def shape(self, plane: Plane, tokens: int) -> tuple[int, ...]:
        """The shape of a plane's tensor in the file."""
        return plane.shape(tokens)

    def frame(self, sample: Sample) -> tuple[bytes, bytes]:
        """(the bytes before the rows of a sample, the bytes after them)."""
        header = header_of(self.metadata(sample), self._entries(len(sample)))
        return header + sample.input_ids.numpy().tobytes(), sample.loss_mask.numpy().tobytes()

    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        before, after = self.frame(sample)
        return [before, *(tensors[plane.key].data for plane in self.planes), after]

    @cached_property
    def _entries(self) -> Callable[[int], bytes]:
        """A cached function from a number of tokens to the header's entries.

        They are the same for all samples of the same length.
        """

        @lru_cache(maxsize=4096)
        def entries(tokens: int) -> bytes:
            states = [(p.key, p.dtype, self.shape(p, tokens)) for p in self.planes]
            ids, mask = (self.ids, torch.int64, (tokens,)), ("loss_mask", torch.uint8, (tokens,))
            # The mask has one byte per token. It comes last, so that the other tensors stay aligned.
            return header_entries([ids, *states, mask])

        return entries


def safetensors_header(tensors: Mapping[str, Blob], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data. The data must follow in the order of `tensors`."""
    entries = header_entries((name, blob.dtype, blob.shape) for name, blob in tensors.items())
    return header_of(metadata, entries)


def header_of(metadata: Mapping[str, str], entries: bytes) -> bytes:
    """The header with its length, from metadata and the result of header_entries."""
    text = b'{"__metadata__":' + compact_json(metadata) + entries + b"}"
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_entries(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The JSON entries of a header for tensors (name, dtype, shape) that follow one another.

    A comma stands before each entry, because the metadata comes first in the header.
    """
    text, offset = b"", 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        entry = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        text += b"," + compact_json(name) + b":" + compact_json(entry)
        offset = end
    return text


class _Entry(msgspec.Struct, frozen=True):
    """The entry of a tensor in a header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)], ...]
    data_offsets: tuple[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)],
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)],
    ]


@dataclass(frozen=True, slots=True)
class MappedSample:
    """One mapped safetensors file.

    Attributes:
        path: the path of the file.
        metadata: its text metadata.
        tensors: views of the mapping, by name. The mapping is private: a write to a tensor changes
            memory only, not the file.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor of this name. Raises RunError when the file has none."""
        if key not in self.tensors:
            raise Damaged(self.path, f"has no tensor {key}")
        return self.tensors[key]

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return f"MappedSample({self.path.name}: {shapes})"


def map_sample(path: Path, size: int | None = None, *, follow: bool = False) -> MappedSample:
    """Map a file.

    Args:
        size: the file's size in bytes that the journal gives, by which a file that is cut off is
            noticed; None skips that check.
        follow: whether the path may be a symbolic link.

    Raises:
        RunError: the file is missing or damaged. The message has the path and what to do.
    """
    try:
        mapped = map_regular(path, mmap.ACCESS_COPY, follow=follow)
    except FileNotFoundError as error:
        raise Damaged(path, "is not there") from error
    if size is not None and len(mapped) != size:
        raise Damaged(path, f"has {len(mapped):,} bytes, and the journal says {size:,}")
    try:
        metadata, entries, base = read_header(mapped)
        tensors = {name: _view(mapped, base, entry) for name, entry in entries.items()}
    except ValueError as error:
        raise Damaged(path, f"is not a safetensors file: {error}") from error
    return MappedSample(path, metadata, tensors)


def read_header(mapped: mmap.mmap | memoryview) -> tuple[dict[str, str], dict[str, _Entry], int]:
    """(metadata, the entry of each tensor, the offset in bytes at which the data begins).

    Raises:
        ValueError: a tensor lies outside the file, or its length does not fit its shape and dtype.
    """
    length = int.from_bytes(mapped[:8], "little")
    if length > len(mapped) - 8:
        raise ValueError(f"a header of {length:,} bytes in a file of {len(mapped):,}")
    text = bytes(mapped[8 : 8 + length])
    raw = decode(text, dict[str, Any])
    metadata = msgspec.convert(raw.pop("__metadata__", {}), dict[str, str])
    entries = msgspec.convert(raw, dict[str, _Entry])
    base = 8 + length
    for name, entry in entries.items():
        _check_entry(name, entry, len(mapped) - base)
    return metadata, entries, base


def _check_entry(name: str, entry: _Entry, room: int) -> None:
    """Raises ValueError when an entry does not fit `room`, the number of bytes of data in the file."""
    begin, end = entry.data_offsets
    if entry.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {entry.dtype!r}")
    if not begin <= end <= room:
        raise ValueError(f"{name} lies at bytes {begin:,} to {end:,} of {room:,}")
    itemsize = DTYPES[entry.dtype].itemsize
    if math.prod(entry.shape) * itemsize != end - begin:
        raise ValueError(f"{name} has {end - begin:,} bytes for {list(entry.shape)} {entry.dtype}")


def _view(mapped: mmap.mmap, base: int, entry: _Entry) -> torch.Tensor:
    dtype, (begin, end) = DTYPES[entry.dtype], entry.data_offsets
    count = (end - begin) // dtype.itemsize
    if count == 0:
        return torch.zeros(entry.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=base + begin)
    return flat.view(entry.shape)


def check_bytes(path: Path, lines: Sequence[Entry], *, follow: bool = False) -> None:
    """Read a whole file, and compare its size and checksum with its journal entries.

    Args:
        lines: the entries of the journal for this file. The file has to match one of them.
        follow: whether the path may be a symbolic link.

    Raises:
        RunError: the file is missing, or matches none of them.
    """
    try:
        with open_regular(path, follow=follow) as handle, reading(path):
            size = os.fstat(handle.fileno()).st_size
            alike = [line for line in lines if line.size == size]
            if not alike:
                raise Damaged(path, f"has {size:,} bytes, and the journal says {lines[0].size:,}")
            digest = hashed(handle)
    except FileNotFoundError as error:
        raise Damaged(path, "is not there") from error
    if all(line.xxh3 != digest for line in alike):
        raise RunError(
            f"{printable(str(path))}: its checksum is not the one in its journal line; run extractor "
            "check --deep --repair, and then the same extract command again (docs/reliability.md)"
        )


def hashed(handle: BinaryIO) -> str:
    """xxh3-64, in hex, of the bytes from the handle's position to the end of the file."""
    digest = xxhash.xxh3_64()
    while block := handle.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def state_of(sample: MappedSample, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stored state [T, W]; float8 is multiplied by its scale.

    Args:
        dtype: the dtype of the result. None keeps the stored dtype, or bfloat16 for float8.

    Returns:
        A view of the mapping when nothing has to be computed.
    """
    value = sample.tensor(key)
    if value.dtype == FP8:
        return unscale(value, sample.tensor(key + SCALE), dtype or torch.bfloat16)
    return value if dtype is None else value.to(dtype)


def unscale(value: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8 values times their scales, computed in float32 and returned in dtype.

    Args:
        value: float8 [T, W], or [T, K, W].
        scale: float32 [T], or [T, 1, 1].
    """
    assert value.dtype == FP8 and FP8_MAX == 448.0, value.dtype
    return (value.float() * scale.view(-1, *[1] * (value.dim() - 1))).to(dtype)
