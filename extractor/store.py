"""One sample's file: its name, its bytes, and how it appears whole or not at all.

A native sample is a safetensors file (https://github.com/huggingface/safetensors, "Format"): eight
bytes of header length, a JSON header padded to a multiple of eight, then the tensors without gaps.
It is written here by hand because the library copies what it saves, and the states lie ready in
pinned memory.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from extractor.records import Sample

SCHEMA = "1"
SAMPLES = "samples"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
ROWS_A_FOLDER = 1000

DTYPE_NAMES = {
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


def sample_path(row: int, turn: int, suffix: str = SUFFIX) -> str:
    """Relative to the output folder; from numbers only, never from a record's id."""
    stem = f"{row:09d}" if turn == 0 else f"{row:09d}-{turn:02d}"
    return f"{SAMPLES}/{row // ROWS_A_FOLDER:05d}/{stem}{suffix}"


@dataclass(frozen=True, slots=True)
class Blob:
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
        flat = tensor.reshape(-1).view(torch.uint8)
        return cls(tensor.dtype, tuple(tensor.shape), memoryview(flat.numpy()))


def safetensors_header(tensors: Mapping[str, Blob], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data, which must follow in the order of tensors. Metadata is text only."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, blob in tensors.items():
        entries[name] = {
            "dtype": DTYPE_NAMES[blob.dtype],
            "shape": list(blob.shape),
            "data_offsets": [offset, offset + blob.data.nbytes],
        }
        offset += blob.data.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def native_metadata(sample: Sample, model: str, states: str) -> dict[str, str]:
    return {
        "schema": SCHEMA,
        "row": str(sample.row),
        "id": sample.id,
        "turn": str(sample.turn),
        "model": model,
        "layers": states,
    }


@dataclass(frozen=True, slots=True)
class Written:
    """What the journal says of a file: its size and the xxh3-64 of its bytes, in hex."""

    size: int
    xxh3: str


def write_whole(path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> Written:
    """Write parts one after the other to a temporary name, then rename: the final name never shows
    less than the whole file. With sync the bytes are on the disk before the rename.

    Raises OSError with the file's name; the temporary file is gone then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    digest = xxhash.xxh3_64()
    size = 0
    try:
        descriptor = _create(temporary)
        try:
            for part in parts:
                digest.update(part)
                size += len(part)
            _write_all(descriptor, parts)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.filename is None:
            error.filename = str(path)
        raise
    return Written(size, digest.hexdigest())


def _create(path: Path) -> int:
    # O_NOFOLLOW and O_EXCL: a planted link or leftover is never written through.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags, 0o644)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, flags, 0o644)


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    while pending:
        written = os.writev(descriptor, pending[:64])
        while pending and written >= len(pending[0]):
            written -= len(pending[0])
            pending.pop(0)
        if written:
            pending[0] = pending[0][written:]


def write_json(path: Path, value: object) -> None:
    """A small JSON file that appears whole, on disk before it has its name."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, [text.encode()], sync=True)
