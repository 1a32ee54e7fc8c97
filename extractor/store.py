"""One sample's file: its name, its bytes, and how it appears whole or not at all.

A native sample is a safetensors file (https://github.com/huggingface/safetensors, "Format"): eight
bytes of header length, a JSON header padded to a multiple of eight, then the tensors without gaps.
It is written here by hand because the library copies what it saves, and the states lie ready in
pinned memory.
"""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from extractor.errors import UsageError
from extractor.records import Sample

SCHEMA = "1"
SAMPLES = "samples"
VOCAB = "vocab"
FOLDERS = ("prepared", "journal", SAMPLES, VOCAB, "hidden_states")  # the last: speculators
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
ROWS_A_FOLDER = 1000
MOST_PARTS = 64  # of one writev; Linux takes 1024

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
NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)

# Jobs of an array write run.json's kin and rejects.jsonl from several machines, and processes come and
# go: names of temporary files must differ between all of them.
_PROCESS = secrets.token_hex(4)
_COUNTER = itertools.count()


def sample_path(row: int, turn: int, suffix: str = SUFFIX) -> str:
    """Relative to the output folder; from numbers only, never from a record's id."""
    stem = f"{row:09d}" if turn == 0 else f"{row:09d}-{turn:02d}"
    return f"{SAMPLES}/{row // ROWS_A_FOLDER:05d}/{stem}{suffix}"


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
        plain = tensor
        if tensor.dtype in NOT_IN_NUMPY:
            plain = tensor.reshape(-1).view(torch.uint8)
        data = plain.numpy().reshape(-1).view(np.uint8).data
        return cls(tensor.dtype, tuple(tensor.shape), data)


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
    text = compact_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def native_metadata(sample: Sample, model: str, states: str) -> dict[str, str]:
    return {
        "schema": SCHEMA,
        "row": str(sample.row),
        # Readers of safetensors refuse a header with half a surrogate pair in it.
        "id": sample.id.encode("utf-8", "backslashreplace").decode(),
        "turn": str(sample.turn),
        "model": model,
        "layers": states,
    }


class Written(NamedTuple):
    """What the journal says of a file: its size and the xxh3-64 of its bytes, in hex."""

    size: int
    xxh3: str


class Pending(NamedTuple):
    """A whole file that has no name yet: written under a temporary one."""

    temporary: str
    path: str
    written: Written

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    def sync(self) -> None:
        """Force its bytes to disk. Raises OSError with the file's name."""
        sync_path(self.temporary, named=self.path)

    def commit(self) -> Written:
        """Give it its name. Raises OSError with the file's name; the temporary file is gone then."""
        try:
            os.rename(self.temporary, self.path)
        except OSError as error:
            self.discard()
            raise _named(error, self.path) from None
        return self.written

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


def write_pending(
    path: str | Path, parts: Sequence[bytes | memoryview], sync: bool = False
) -> Pending:
    """Write parts, flat bytes each, one after the other to a temporary name beside path.

    Raises OSError with path's name; the temporary file is gone then."""
    path = os.fspath(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(
        folder, f".{name}.{_PROCESS}{os.getpid():x}-{next(_COUNTER):x}{TEMPORARY}"
    )
    digest = xxhash.xxh3_64()
    size = 0
    try:
        descriptor = _create(temporary)
        try:
            for part in parts:
                digest.update(part)
                size += len(part)
            _write_all(descriptor, parts, size)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _named(error, path) from None
    return Pending(temporary, path, Written(size, digest.hexdigest()))


def write_whole(path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> Written:
    """write_pending and commit in one: the final name never shows less than the whole file. With
    sync the bytes are on the disk before the rename.

    Raises OSError with the file's name; the temporary file is gone then.
    """
    return write_pending(path, parts, sync).commit()


def sync_path(path: str | Path, named: str | Path | None = None) -> None:
    """fsync a file, or a folder so that the names in it are on disk. Raises OSError with its name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _named(error, named or path) from None


def _named(error: OSError, path: str | Path) -> OSError:
    """The same error, saying which file of the user's it is about, not which temporary name."""
    error.filename, error.filename2 = str(path), None
    return error


def sweep_temporaries(folder: Path, names: Container[str]) -> int:
    """Remove what writers that were killed left of the files of these names in one folder; how many
    there were.

    Those of other files stay: another job of an array may be writing them."""
    count = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(".") and entry.name.endswith(TEMPORARY)):
                continue
            if entry.name[1:].removesuffix(TEMPORARY).rpartition(".")[0] in names:
                with contextlib.suppress(FileNotFoundError):
                    Path(entry.path).unlink()
                    count += 1
    return count


def sweep_temporaries_of(path: Path) -> None:
    """Remove what killed writers left of one file that nobody else writes now."""
    for temporary in path.parent.glob(f".{path.name}.*{TEMPORARY}"):
        temporary.unlink(missing_ok=True)


def refuse_links(output: Path) -> None:
    """Raises UsageError when a folder inside the output folder is a link: writing would follow it
    out of there. The output folder itself may be one."""
    inside = [output / name for name in FOLDERS]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        inside += [Path(entry.path) for entry in os.scandir(output / SAMPLES)]
    for path in inside:
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link to {path.readlink()}: nothing is written outside the output "
                "folder; put the whole folder there and link to it, or remove the link"
            )


def _create(path: str) -> int:
    # O_NOFOLLOW and O_EXCL: a planted link or leftover is never written through.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, flags, 0o644)


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview], size: int) -> None:
    written = os.writev(descriptor, parts[:MOST_PARTS])
    if written == size:
        return
    pending = [memoryview(part) for part in parts if len(part)]  # a disk that fills takes a part
    while True:
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if not pending:
            return
        pending[0] = pending[0][written:]
        written = os.writev(descriptor, pending[:MOST_PARTS])


def compact_json(value: object) -> bytes:
    """JSON without spaces, of text, whole numbers, lists and dicts; half a surrogate pair, which has no
    UTF-8, as its escape."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def json_line(value: object) -> bytes:
    """One line of JSON, readable, whatever text is in it: half a surrogate pair, which has no UTF-8,
    becomes its JSON escape."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: object) -> None:
    """A small JSON file that appears whole, on disk before it has its name."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, [text.encode()], sync=True)
