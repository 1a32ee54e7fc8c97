"""One sample's file: its name and its bytes.

A native sample is a safetensors file (https://github.com/huggingface/safetensors, "Format"): eight
bytes of header length, a JSON header padded to a multiple of eight, then the tensors without gaps.
It is written here by hand because the library copies what it saves, and the states lie ready in
pinned memory.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from extractor.errors import UsageError
from extractor.files import write_whole
from extractor.printable import printable
from extractor.records import Sample

SCHEMA = "1"
PREPARED = "prepared"
SAMPLES = "samples"
VOCAB = "vocab"
FOLDERS = (PREPARED, "journal", SAMPLES, VOCAB, "hidden_states")  # the last: speculators
SUFFIX = ".safetensors"
ROWS_A_FOLDER = 1000

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
        plain = tensor.view(torch.uint8) if tensor.dtype in NOT_IN_NUMPY else tensor
        data = plain.numpy().data.cast("B") if tensor.numel() else memoryview(b"")
        return cls(tensor.dtype, tuple(tensor.shape), data)


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


def refuse_links(output: Path) -> None:
    """Raises UsageError when a folder inside the output folder is a link: writing and removing would
    follow it out of there, and reading would take another folder's files for this one's. The output
    folder itself may be one."""
    inside = [output / name for name in FOLDERS]
    for name in (SAMPLES, PREPARED):
        with contextlib.suppress(OSError), os.scandir(output / name) as entries:
            inside += [Path(entry.path) for entry in entries if entry.is_symlink()]
    for path in inside:
        if path.is_symlink():
            raise UsageError(
                f"{printable(str(path))} is a link to {printable(str(path.readlink()))}: nothing is "
                "read or written outside the output folder; put the whole folder there and link to "
                "it, or remove the link"
            )


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
    # Half a surrogate pair, as in the name of a file that is not UTF-8, becomes its JSON escape.
    write_whole(path, [text.encode("utf-8", "backslashreplace")], sync=True)
