"""The prepared store: samples on disk as flat arrays, which are memory-mapped.

A store is a folder. It holds N samples in (row, turn) order, with T tokens in total:

| file | holds |
| --- | --- |
| ids.i32, mask.u8 | [T] tokens of all samples, one after another |
| ends.i64, rows.i64, turns.i16 | [N] where each sample's tokens end, its row, its turn |
| names.utf8, name_ends.i64 | ids as text, one after another, and [N] where each ends |
| files.i32, lines.i64 | [N] the source of each row: an index into `files` of store.json, and a line |
| rejects.jsonl | one line per rejected row or turn |
| store.json | counts, digest and its parts, the input files |

It is written under a temporary name and renamed when it is complete.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, overload

import msgspec
import numpy as np
import torch

from extractor.errors import RunError
from extractor.prepared.pieces import Piece, Refusal
from extractor.printable import printable
from extractor.records import Reject, Sample
from extractor.regular import open_regular, read_regular, reading
from extractor.strict import decode

SCHEMA = 1
INFO = "store.json"
REJECTS = "rejects.jsonl"
ARRAYS: dict[str, str] = {
    "ids.i32": "<i4",
    "mask.u8": "|u1",
    "ends.i64": "<i8",
    "rows.i64": "<i8",
    "turns.i16": "<i2",
    "names.utf8": "|u1",
    "name_ends.i64": "<i8",
    "files.i32": "<i4",
    "lines.i64": "<i8",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a store is made from.

    Attributes:
        digest, parts: as in PreparedStore.
        model: the model folder that has the tokenizer; not part of the digest.
        inputs: facts of the input files (digest.py), by which a file that has not changed is
            recognized without being read again.
    """

    digest: str
    parts: dict[str, str]
    model: str
    inputs: list[dict[str, Any]]


class StoreWriter:
    """Appends prepared samples to a folder, which becomes a store with `close`.

    Memory does not grow with the number of samples. The caller renames or removes the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reasons: Counter[str] = Counter()
        self.samples = self.tokens = self.supervised = self.truncated = 0
        self._rows_sampled = self._names_end = 0
        self._last_row = -1
        self._files: dict[str, int] = {}
        self._handles: dict[str, BinaryIO] = {
            name: (folder / name).open("wb") for name in (*ARRAYS, REJECTS)
        }

    def add(self, piece: Piece) -> None:
        """Append one sample. The caller adds samples in (row, turn) order."""
        name = piece.id.encode("utf-8", "backslashreplace")
        self.samples += 1
        self.tokens += len(piece.ids)
        self.supervised += int(piece.mask.sum())
        self.truncated += piece.truncated
        self._rows_sampled += piece.row != self._last_row
        self._last_row = piece.row
        self._names_end += len(name)
        file = self._files.setdefault(piece.file, len(self._files))
        values: dict[str, Any] = {
            "ids.i32": piece.ids,
            "mask.u8": piece.mask,
            "ends.i64": self.tokens,
            "rows.i64": piece.row,
            "turns.i16": piece.turn,
            "name_ends.i64": self._names_end,
            "files.i32": file,
            "lines.i64": piece.line,
        }
        for key, value in values.items():
            self._handles[key].write(np.asarray(value, ARRAYS[key]).tobytes())
        self._handles["names.utf8"].write(name)

    def refuse(self, refusal: Refusal) -> None:
        self.reasons[refusal.reason] += 1
        self._handles[REJECTS].write(json.dumps(asdict(refusal)).encode() + b"\n")

    def close(self, rows: int, identity: "Identity") -> None:
        """Close all files and write store.json, which makes the folder a store.

        Args:
            rows: number of rows read.
        """
        for handle in self._handles.values():
            handle.close()
        info = {
            "schema": SCHEMA,
            **asdict(identity),
            "rows": rows,
            "samples": self.samples,
            "rows_sampled": self._rows_sampled,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "truncated": self.truncated,
            "reasons": dict(self.reasons),
            "files": list(self._files),
        }
        (self.folder / INFO).write_text(json.dumps(info, indent=1))

    def abandon(self) -> None:
        for handle in self._handles.values():
            handle.close()


Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class InputFile(msgspec.Struct, frozen=True):
    """Facts of an input file when it was prepared (digest.FileFacts)."""

    path: str
    size: int
    mtime: int
    ctime: int
    inode: int
    digest: str
    newlines: Number


class Info(msgspec.Struct, frozen=True):
    """The content of store.json."""

    schema: Literal[1]
    digest: str
    parts: dict[str, str]
    model: str
    inputs: list[InputFile]
    rows: Number
    samples: Number
    rows_sampled: Number
    tokens: Number
    supervised: Number
    truncated: Number
    reasons: dict[str, Number]
    files: list[str]


class PreparedStore:
    """Prepared samples. Opening a store maps its files and reads one small JSON file.

    Attributes:
        path: the folder.
        num_rows: number of rows read.
        lengths: int32 [N], number of tokens of each sample, in (row, turn) order.
        rows: int64 [N], row of each sample.
        turns: int16 [N], turn of each sample.
        digest: identity of everything that decides ids and masks.
        parts: what the digest is made of, by name, so that a message can say what changed.
        rejects: rows and turns that became no sample.
    """

    def __init__(self, path: Path, info: "Info") -> None:
        self.path = path
        self.num_rows = info.rows
        self.digest = info.digest
        self.parts: Mapping[str, str] = info.parts
        self._info = info
        self._arrays = {name: _mapped(path / name, dtype) for name, dtype in ARRAYS.items()}
        self.lengths = _lengths(path, self._arrays, info)
        self.rows = self._arrays["rows.i64"]
        self.turns = self._arrays["turns.i16"]
        self.rejects: Sequence[Reject] = _Rejects(path / REJECTS, sum(info.reasons.values()))

    @classmethod
    def open(cls, path: Path) -> "PreparedStore":
        """Open the store in a folder.

        Raises:
            RunError: the folder is not a complete store of this version. One line names the file
                that is missing or damaged.
        """
        try:
            return cls(path, decode(read_regular(path / INFO), Info))
        except FileNotFoundError as error:
            file = printable(str(error.filename or path))
            raise RunError(
                f"{file}: is not there: not a prepared store, or not a whole one"
            ) from error
        except ValueError as error:
            text = printable(f"{path / INFO}: not a prepared store: {error}")
            raise RunError(text) from error

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"PreparedStore({self.path}: {len(self)} samples, {self._info.tokens} tokens)"

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Facts of the input files (digest.FileFacts) when this store was prepared."""
        return [msgspec.to_builtins(file) for file in self._info.inputs]

    @property
    def model(self) -> str:
        """The folder of the model that this store was prepared for."""
        return self._info.model

    def sample(self, index: int) -> Sample:
        """Sample `index`: input_ids int64 [T], loss_mask uint8 [T].

        Raises:
            IndexError: index is not in [0, N).
            RunError: the sample holds values that no run writes.
        """
        begin, end = self._range("ends.i64", index)
        name_begin, name_end = self._range("name_ends.i64", index)
        file = self._info.files[self._arrays["files.i32"][index]]
        ids, mask = self._arrays["ids.i32"][begin:end], self._arrays["mask.u8"][begin:end]
        if ids.min() < 0 or mask.max() > 1:
            raise self._damaged("ids.i32" if ids.min() < 0 else "mask.u8", index)
        try:
            name = self._arrays["names.utf8"][name_begin:name_end].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self._damaged("names.utf8", index) from error
        return Sample(
            row=int(self.rows[index]),
            turn=int(self.turns[index]),
            id=name,
            source=f"{file}:{int(self._arrays['lines.i64'][index])}",
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            loss_mask=torch.from_numpy(mask.copy()),
        )

    def _damaged(self, file: str, index: int) -> RunError:
        return _damaged(self.path / file, f"sample {index:,} has values that no run writes")

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T], mask uint8 [T]) of all samples, one after another, as mapped arrays."""
        return self._arrays["ids.i32"], self._arrays["mask.u8"]

    def find(self, row: int) -> range:
        """The indices of a row's samples; empty when the row has none."""
        begin, end = np.searchsorted(self.rows, [row, row + 1])
        return range(int(begin), int(end))

    def summary(self) -> dict[str, int]:
        """Counts by name, with rows = rows_sampled + rows_rejected.

        "rejected" is the number of entries in `rejects`, of which a row may have several with --turns
        each. "rejected.REASON" is the number of those with that reason.
        """
        keys = ("rows", "samples", "rows_sampled", "tokens", "supervised", "truncated")
        counts = {key: int(getattr(self._info, key)) for key in keys}
        counts["rows_rejected"] = counts["rows"] - counts["rows_sampled"]
        counts["rejected"] = len(self.rejects)
        reasons = sorted(self._info.reasons.items())
        counts.update({f"rejected.{reason}": n for reason, n in reasons})
        return counts

    def _range(self, ends: str, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        array = self._arrays[ends]
        return (int(array[index - 1]) if index else 0), int(array[index])


class _Rejects(Sequence[Reject]):
    """The lines of rejects.jsonl, which are read only when they are used."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Reject]:
        """Raises RunError for a line that is not a Refusal, and when the file is missing."""
        try:
            lines = open_regular(self._path)
        except FileNotFoundError as error:
            raise _damaged(self._path, "is not there") from error
        with lines, reading(self._path):
            for number, line in enumerate(lines, 1):
                try:
                    yield as_reject(decode(line, Refusal))
                except ValueError as error:
                    raise _damaged(self._path, f"line {number:,}: {error}") from error

    @overload
    def __getitem__(self, key: int) -> Reject: ...
    @overload
    def __getitem__(self, key: slice) -> list[Reject]: ...
    def __getitem__(self, key: int | slice) -> Reject | list[Reject]:
        return list(self)[key]


def as_reject(refusal: Refusal) -> Reject:
    return Reject(
        row=refusal.row,
        turn=refusal.turn,
        id=refusal.id,
        source=f"{refusal.file}:{refusal.line}",
        reason=refusal.reason,
        detail=refusal.detail,
    )


def as_sample(piece: Piece) -> Sample:
    return Sample(
        row=piece.row,
        turn=piece.turn,
        id=piece.id,
        source=f"{piece.file}:{piece.line}",
        input_ids=torch.from_numpy(piece.ids.astype(np.int64)),
        loss_mask=torch.from_numpy(piece.mask),
    )


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """The file as a mapped array; an empty array for an empty file, which cannot be mapped.

    Raises:
        RunError: the size is not a whole number of values, or the file cannot be read.
        FileNotFoundError: there is no such file.
    """
    with open_regular(path) as handle, reading(path):
        size = os.fstat(handle.fileno()).st_size
        if size % np.dtype(dtype).itemsize:
            raise _damaged(path, f"has {size:,} bytes, which is no number of {dtype}")
        if size == 0:
            return np.empty(0, dtype)
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(data, dtype)


def _lengths(path: Path, arrays: Mapping[str, np.ndarray], info: Info) -> np.ndarray:
    """The number of tokens of each sample, int32 [N], after all arrays are checked.

    Raises:
        RunError: an array has another number of values than store.json gives, a sample is empty, the
            samples are not in (row, turn) order, or a value is outside its range.
    """
    ends, names = arrays["ends.i64"], arrays["name_ends.i64"]
    last_name = int(names[-1]) if len(names) else 0
    wanted = dict.fromkeys(ARRAYS, info.samples)
    wanted |= {"ids.i32": info.tokens, "mask.u8": info.tokens, "names.utf8": last_name}
    for name, array in arrays.items():
        if len(array) != wanted[name]:
            raise _damaged(
                path / name, f"has {len(array):,} values, and {INFO} calls for {wanted[name]:,}"
            )
    lengths = np.diff(ends, prepend=0)
    rows, turns, files = arrays["rows.i64"], arrays["turns.i16"], arrays["files.i32"]
    good = {
        "ends.i64": not len(ends) or (lengths.min() > 0 and lengths.max() < 1 << 31),
        "name_ends.i64": not len(names) or np.diff(names, prepend=0).min() >= 0,
        "rows.i64": not len(rows) or (rows[0] >= 0 and rows[-1] < 1 << 47),
        "turns.i16": not len(turns) or turns.min() >= 0,
        "files.i32": not len(files) or (files.min() >= 0 and files.max() < len(info.files)),
    }
    good["ends.i64"] &= not len(ends) or int(ends[-1]) == info.tokens
    good["rows.i64"] &= bool((np.diff(rows) >= 0).all())
    good["turns.i16"] &= bool(((np.diff(rows) > 0) | (np.diff(turns) > 0)).all())
    for name, fine in good.items():
        if not fine:
            raise _damaged(path / name, "has values that no run writes")
    return lengths.astype(np.int32)


def _damaged(file: Path, what: str) -> RunError:
    text = printable(f"{file}: {what}; remove the prepared store, and it is prepared again")
    return RunError(text)
