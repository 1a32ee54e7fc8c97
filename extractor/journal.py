"""What has been done, on disk: a line a finished sample, and run.json beside it.

A journal belongs to one writer and only grows. A line is appended after its file has its final name,
so a line without a whole file means that somebody damaged the folder, and a file without a line is
written again. Several journals may name the same sample (a folder that was repaired): the last line
of any of them that matches the file on disk counts.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.records import Reject, Sample
from extractor.store import Written, sample_path, write_json, write_whole

JOURNAL = "journal"
REJECTS = "rejects.jsonl"
RUN = "run.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A journal line: a finished sample, or (reject set) one that this run had to leave out."""

    row: int
    turn: int
    size: int
    xxh3: str
    reject: Reject | None = None
    tokens: int = 0
    id: str = ""


class Journal:
    """One writer's journal, open for appending. Thread-safe."""

    def __init__(self, path: Path, sync: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path, self._sync = path, sync
        self._descriptor = os.open(path, flags, 0o644)
        self._lock = threading.Lock()

    def finished(self, sample: Sample, written: Written) -> None:
        self._append(
            {
                "row": sample.row,
                "turn": sample.turn,
                "id": sample.id,
                "tokens": len(sample),
                "bytes": written.size,
                "xxh3": written.xxh3,
            }
        )

    def rejected(self, reject: Reject) -> None:
        self._append({"row": reject.row, "turn": reject.turn, "reject": reject_line(reject)})

    def _append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        with self._lock:
            try:
                written = os.write(self._descriptor, data)
                if written != len(data):  # a disk that fills up takes a part of the line
                    os.write(self._descriptor, data[written:])
            except OSError as error:
                error.filename = error.filename or str(self._path)
                raise
            if self._sync:
                os.fsync(self._descriptor)

    def close(self) -> None:
        with self._lock:
            os.fsync(self._descriptor)
            os.close(self._descriptor)


def _drop_cut_line(path: Path) -> None:
    """A line without its newline was being written when the power went: its sample is not done."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as handle:
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) == b"\n":
            return
        size = handle.seek(0, os.SEEK_END)
        keep, block = 0, 1 << 16
        for begin in range(size - size % block, -1, -block):
            handle.seek(begin)
            at = handle.read(min(block, size - begin)).rfind(b"\n")
            if at >= 0:
                keep = begin + at + 1
                break
        handle.truncate(keep)


def read_entries(output: Path, ends: dict[str, int] | None = None) -> Iterator[Entry]:
    """Every line of every journal, in order of file name and line; lines cut by a crash are passed
    over, since what they spoke of is not done.

    ends: how far each journal has been read; reading starts there and moves it on, so that whoever
    watches a growing folder sees each line once. A last line without its newline waits."""
    for path in sorted((output / JOURNAL).glob("*.jsonl")):
        with path.open("rb") as handle:
            if ends is not None:
                handle.seek(ends.get(path.name, 0))
            for line in handle:
                if ends is not None:
                    if not line.endswith(b"\n"):
                        break
                    ends[path.name] = ends.get(path.name, 0) + len(line)
                try:
                    value = json.loads(line)
                    reject = value.get("reject")
                    yield Entry(
                        value["row"],
                        value["turn"],
                        value.get("bytes", 0),
                        value.get("xxh3", ""),
                        None if reject is None else _read_reject(reject),
                        value.get("tokens", 0),
                        value.get("id", ""),
                    )
                except (ValueError, KeyError, TypeError):
                    continue


def _read_reject(value: dict[str, Any]) -> Reject:
    names = ("row", "turn", "id", "source", "reason", "detail")
    return Reject(**{name: value[name] for name in names})


def reject_line(reject: Reject) -> dict[str, Any]:
    return {
        "row": reject.row,
        "turn": reject.turn,
        "source": reject.source,
        "id": reject.id,
        "reason": reject.reason,
        "detail": reject.detail,
    }


@dataclass(frozen=True, slots=True)
class Done:
    """What an output folder holds already.

    Attributes:
        finished: bool [N], by index in the prepared store: a journal line and a file of that size.
        rejected: samples left out by an earlier run, by index.
        damaged: samples with a journal line whose file is missing or of another size.
    """

    finished: npt.NDArray[np.bool_]
    rejected: dict[int, Reject]
    damaged: int


def find_done(
    output: Path,
    rows: npt.NDArray[np.int64],
    turns: npt.NDArray[np.int16],
    path: Callable[[int, int], str] = sample_path,
) -> Done:
    """Compare the journals with the files that are there, one stat a journalled sample.

    path: where a (row, turn) lies below output; the layout says."""
    index = {key: i for i, key in enumerate(zip(rows.tolist(), turns.tolist(), strict=True))}
    finished = np.zeros(len(rows), np.bool_)
    rejected: dict[int, Reject] = {}
    seen = np.zeros(len(rows), np.bool_)
    for entry in read_entries(output):
        at = index.get((entry.row, entry.turn))
        if at is None:
            continue
        if entry.reject is not None:
            rejected[at] = entry.reject
            continue
        seen[at] = True
        if not finished[at]:
            finished[at] = _size(output / path(entry.row, entry.turn)) == entry.size
        rejected.pop(at, None)
    return Done(finished, rejected, int((seen & ~finished).sum()))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def write_rejects(output: Path, rejects: Iterable[Reject]) -> None:
    """rejects.jsonl as a whole: those of the preparation and those of the journals."""
    ordered = sorted(rejects, key=lambda reject: (reject.row, reject.turn))
    lines = [json.dumps(reject_line(item), ensure_ascii=False) for item in ordered]
    data = "".join(line + "\n" for line in lines).encode()
    write_whole(output / REJECTS, [data], sync=False)


def read_run(path: Path) -> dict[str, Any] | None:
    """A run.json, or None when there is none. Raises ValueError when it is not one."""
    try:
        value: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if not isinstance(value, dict) or "fingerprint" not in value:
        raise ValueError(f"{path} is not a run.json of this program")
    return value


def write_run(path: Path, run: dict[str, Any]) -> None:
    write_json(path, run)
