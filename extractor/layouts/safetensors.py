"""safetensors files: written straight from a batch's buffer, and read back as mapped tensors.

A safetensors file (https://github.com/huggingface/safetensors, "Format") is eight bytes of header
length, a JSON header padded to a multiple of eight, then the tensors without gaps. It is written here
by hand because the library copies what it saves, and the states lie ready in pinned memory.

It is read here by hand too: a mapping costs nothing until a tensor is touched, so that a reader of one
state in six reads a sixth of the file. The library's reader does the same; this one also checks the
file against what is known of it, and its tensors may be written to without the file changing.
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
    """A safetensors file: header and ids, the planes' rows in the planes' order, the mask.

    The rows are the buffer's own bytes, so that whoever maps the buffer needs only to be told where
    they are, and what comes before and after them."""

    ids: ClassVar[str]
    """The ids' name in the file."""

    @abstractmethod
    def metadata(self, sample: Sample) -> dict[str, str]: ...

    def shape(self, plane: Plane, tokens: int) -> tuple[int, ...]:
        """Of a plane's tensor in the file."""
        return plane.shape(tokens)

    def frame(self, sample: Sample) -> tuple[bytes, bytes]:
        """The bytes before a sample's rows, and those after them."""
        header = header_of(self.metadata(sample), self._entries(len(sample)))
        return header + sample.input_ids.numpy().tobytes(), sample.loss_mask.numpy().tobytes()

    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        before, after = self.frame(sample)
        return [before, *(tensors[plane.key].data for plane in self.planes), after]

    @cached_property
    def _entries(self) -> Callable[[int], bytes]:
        """The header's entries, which are the same for all samples of a length."""

        @lru_cache(maxsize=4096)
        def entries(tokens: int) -> bytes:
            states = [(p.key, p.dtype, self.shape(p, tokens)) for p in self.planes]
            ids, mask = (self.ids, torch.int64, (tokens,)), ("loss_mask", torch.uint8, (tokens,))
            return header_entries([ids, *states, mask])  # bytes last: the rest stays aligned

        return entries


def safetensors_header(tensors: Mapping[str, Blob], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data, which must follow in the order of tensors. Metadata is text only."""
    entries = header_entries((name, blob.dtype, blob.shape) for name, blob in tensors.items())
    return header_of(metadata, entries)


def header_of(metadata: Mapping[str, str], entries: bytes) -> bytes:
    """A header of metadata and of what header_entries said."""
    text = b'{"__metadata__":' + compact_json(metadata) + entries + b"}"
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_entries(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What a header says of (name, dtype, shape) tensors that follow one another: each entry after a
    comma."""
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
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)], ...]
    data_offsets: tuple[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)],
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)],
    ]


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

    def tensor(self, key: str) -> torch.Tensor:
        """Raises RunError when the file has none of this name."""
        if key not in self.tensors:
            raise Damaged(self.path, f"has no tensor {key}")
        return self.tensors[key]

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return f"MappedSample({self.path.name}: {shapes})"


def map_sample(path: Path, size: int | None = None, *, follow: bool = False) -> MappedSample:
    """Map a file. With size, the one that the journal gives, a cut or changed file is noticed here.
    follow: let it be a link.

    Raises RunError, with the path and what to do, for a file that is missing or not whole."""
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
    """The metadata, what is said of each tensor, and where the data begins.

    Every tensor lies inside the file and is as long as its shape says. Raises ValueError otherwise."""
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
    """Raises ValueError."""
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
    """Read a whole file and compare size and checksum with its journal lines, one of which is enough.

    Raises RunError when none of them is true of it."""
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
    """xxh3-64 of what follows in the file, in hex."""
    digest = xxhash.xxh3_64()
    while block := handle.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def state_of(sample: MappedSample, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stored state [T, W], unscaled when it is float8, in dtype (default: as stored; float8 becomes
    bfloat16). A view of the mapping when nothing has to be computed."""
    value = sample.tensor(key)
    if value.dtype == FP8:
        return unscale(value, sample.tensor(key + SCALE), dtype or torch.bfloat16)
    return value if dtype is None else value.to(dtype)


def unscale(value: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8 [T, W] times its scale f32 [T] (or [T, 1, 1]), computed in float32."""
    assert value.dtype == FP8 and FP8_MAX == 448.0, value.dtype
    return (value.float() * scale.view(-1, *[1] * (value.dim() - 1))).to(dtype)
