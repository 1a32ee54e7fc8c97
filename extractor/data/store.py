"""Prepared samples on disk: flat arrays that are mapped, never loaded.

A store is a folder. N samples, in (row, turn) order, with T tokens in all:

| file | holds |
| --- | --- |
| ids.i32, mask.u8 | [T] tokens of all samples, one after another |
| ends.i64, rows.i64, turns.i16 | [N] where each sample's tokens end, its row, its turn |
| names.utf8, name_ends.i64 | [N] ids as text, one after another, and where each ends |
| files.i32, lines.i64 | [N] where each row came from: a number into `files` of store.json, a line |
| rejects.jsonl | a line a rejected row or turn |
| store.json | counts, digest and its parts, the input's files |

It is written under a temporary name and renamed when it is whole.
"""

import json
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import torch

from extractor.data.rows import Piece, Refusal
from extractor.errors import RunError
from extractor.records import Reject, Sample

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
    """What a store was made from.

    Attributes:
        digest, parts: as in PreparedStore.
        model: the model's folder, for its tokenizer; not part of the digest.
        inputs: the input files as they were (digest.py), so that unchanged ones need not be read
            again to know them.
    """

    digest: str
    parts: dict[str, str]
    model: str
    inputs: list[dict[str, Any]]


class StoreWriter:
    """Appends prepared samples to a folder that is not yet a store; `close` makes it one.

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
        """Append one sample. Samples come in (row, turn) order."""
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
        """Write what makes the folder a store."""
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


class PreparedStore:
    """Samples that wait for the model. Opening maps files and reads one small JSON.

    Attributes:
        path: the folder.
        num_rows: rows read.
        lengths: int32 [N], tokens of each sample, in (row, turn) order.
        rows: int64 [N].
        turns: int16 [N].
        digest: identity of everything that decides ids and masks.
        parts: what the digest is made of, by name, so that a refusal can say what changed.
        rejects: rows and turns that became no sample.
    """

    def __init__(self, path: Path, info: Mapping[str, Any]) -> None:
        self.path = path
        self.num_rows = int(info["rows"])
        self.digest = str(info["digest"])
        self.parts: Mapping[str, str] = dict(info["parts"])
        self._info = info
        self._arrays = {name: _mapped(path / name, dtype) for name, dtype in ARRAYS.items()}
        ends = self._arrays["ends.i64"]
        lengths = {name: len(array) for name, array in self._arrays.items()}
        names = int(self._arrays["name_ends.i64"][-1]) if len(ends) else 0
        whole = {"ids.i32": info["tokens"], "mask.u8": info["tokens"], "names.utf8": names}
        if lengths != dict.fromkeys(ARRAYS, info["samples"]) | whole:
            raise RunError(f"{path}: the prepared store is damaged; remove it and prepare again")
        self.lengths = np.diff(ends, prepend=0).astype(np.int32)
        self.rows = self._arrays["rows.i64"]
        self.turns = self._arrays["turns.i16"]
        self.rejects: Sequence[Reject] = _Rejects(path / REJECTS, sum(info["reasons"].values()))

    @classmethod
    def open(cls, path: Path) -> "PreparedStore":
        """Raises RunError for a folder that is no whole store of this version."""
        try:
            info = json.loads((path / INFO).read_text())
            if info["schema"] != SCHEMA:
                raise RunError(f"{path}: a prepared store of another version; prepare again")
            return cls(path, info)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise RunError(f"{path}: not a prepared store: {error}") from error

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"PreparedStore({self.path}: {len(self)} samples, {self._info['tokens']} tokens)"

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The input files as they were when this was prepared."""
        return self._info["inputs"]

    @property
    def model(self) -> str:
        """The folder of the model that this was prepared for."""
        return self._info["model"]

    def sample(self, index: int) -> Sample:
        """Sample `index` of N."""
        begin, end = self._range("ends.i64", index)
        name_begin, name_end = self._range("name_ends.i64", index)
        file = self._info["files"][self._arrays["files.i32"][index]]
        return Sample(
            row=int(self.rows[index]),
            turn=int(self.turns[index]),
            id=self._arrays["names.utf8"][name_begin:name_end].tobytes().decode(),
            source=f"{file}:{int(self._arrays['lines.i64'][index])}",
            input_ids=torch.from_numpy(self._arrays["ids.i32"][begin:end].astype(np.int64)),
            loss_mask=torch.from_numpy(self._arrays["mask.u8"][begin:end].copy()),
        )

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T], mask uint8 [T]) of all samples, one after another; mapped."""
        return self._arrays["ids.i32"], self._arrays["mask.u8"]

    def find(self, row: int) -> range:
        """Indexes of a row's samples."""
        begin, end = np.searchsorted(self.rows, [row, row + 1])
        return range(int(begin), int(end))

    def summary(self) -> dict[str, int]:
        """Counts. rows = rows_sampled + rows_rejected; rejected counts lines of rejects (with
        --turns each a row can have several), and "rejected.REASON" those of each reason."""
        keys = ("rows", "samples", "rows_sampled", "tokens", "supervised", "truncated")
        counts = {key: int(self._info[key]) for key in keys}
        counts["rows_rejected"] = counts["rows"] - counts["rows_sampled"]
        counts["rejected"] = len(self.rejects)
        reasons: dict[str, int] = self._info["reasons"]
        counts.update({f"rejected.{reason}": n for reason, n in sorted(reasons.items())})
        return counts

    def _range(self, ends: str, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        array = self._arrays[ends]
        return (int(array[index - 1]) if index else 0), int(array[index])


class _Rejects(Sequence[Reject]):
    """Lines of rejects.jsonl, read when they are asked for."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Reject]:
        with self._path.open(encoding="utf-8") as lines:
            for line in lines:
                yield as_reject(Refusal(**json.loads(line)))

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
    """The file as an array that stays on disk (an empty file cannot be mapped). Raises RunError."""
    with path.open("rb") as handle:
        if path.stat().st_size == 0:
            return np.empty(0, dtype)
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(data, dtype)
