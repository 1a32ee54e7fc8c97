"""What has been written, on disk: one line per finished sample.

A journal belongs to one writer and only grows. A line is appended after its file has its final name,
so a line without a whole file means that somebody damaged the folder, and a file without a line is
written again. Several journals may name the same sample (a folder that was repaired): the last line
of any of them that matches the file on disk counts.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from extractor.errors import RunError
from extractor.files import Written, compact_json, json_line, write_whole
from extractor.printable import printable
from extractor.records import Entry, Reject, Sample
from extractor.regular import cannot_read, open_regular, reading
from extractor.strict import decode

JOURNAL = "journal"
REJECTS = "rejects.jsonl"

LAST_WRITER_SECONDS = 120.0  # longer than an NFS server keeps the locks of a client that is gone


class Journal:
    """One writer's journal, open for appending, and this process's alone while it is. Thread-safe.

    Args:
        path: of the file; made if missing, a cut last line dropped.
        sync: force lines to disk before the call that appends them returns.
    """

    def __init__(self, path: Path, sync: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._path, self._sync = path, sync
        self._descriptor = os.open(path, flags, 0o644)
        self._lock = threading.Lock()
        self._broken: OSError | None = None
        _wait_for_last_writer(self._descriptor, path)
        _drop_cut_line(self._descriptor)

    def finished(self, sample: Sample, written: Written) -> None:
        self.finished_together([(sample, written)])

    def finished_together(self, items: Sequence[tuple[Sample, Written]]) -> None:
        """A line each, in one write and one wait for the disk."""
        self._append(
            {
                "row": sample.row,
                "turn": sample.turn,
                "id": sample.id,
                "tokens": len(sample),
                "bytes": written.size,
                "xxh3": written.xxh3,
            }
            for sample, written in items
        )

    def rejected(self, reject: Reject) -> None:
        self._append([{"row": reject.row, "turn": reject.turn, "reject": reject_line(reject)}])

    def _append(self, lines: Iterable[dict[str, Any]]) -> None:
        data = b"".join(compact_json(line) + b"\n" for line in lines)
        if not data:
            return
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                rest = memoryview(data)
                while rest:  # a disk that fills up takes a part of the line
                    rest = rest[os.write(self._descriptor, rest) :]
                if self._sync:
                    os.fsync(self._descriptor)
            except OSError as error:
                # No line may follow half a line: the two would read as one.
                error.filename = str(self._path)
                self._broken = error
                raise

    def close(self) -> None:
        """Force what was appended to disk. Raises OSError with the file's name."""
        with self._lock:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                error.filename = str(self._path)
                raise
            finally:
                os.close(self._descriptor)


def _wait_for_last_writer(descriptor: int, path: Path) -> None:
    """A run that was killed may have a writer left that lives for a moment longer than its rank 0:
    two must not append to one file. Raises RunError when it does not go."""
    end = time.monotonic() + LAST_WRITER_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a filesystem without locks, of which the folder's own lock has warned
        if time.monotonic() > end:
            raise RunError(f"{path}: a writer of an earlier run still holds it")
        time.sleep(0.2)


def _drop_cut_line(descriptor: int) -> None:
    """A line without its newline was being written when the power went: its sample is not done."""
    size = os.fstat(descriptor).st_size
    end, block = size, 1 << 16
    while end > 0:
        begin = max(end - block, 0)
        at = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if at >= 0:
            end = begin + at + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)


def read_entries(
    output: Path,
    ends: dict[str, int] | None = None,
    *,
    follow: bool = False,
    unreadable: Callable[[Path, int], None] | None = None,
) -> Iterator[Entry]:
    """Every line of every journal, in order of file name and line; lines cut by a crash, if only of
    their newline, are passed over, since what they spoke of is not done.

    Args:
        ends: how far each journal has been read; reading starts there and moves it on, so that whoever
            watches a growing folder sees each line once.
        follow: let a journal be a link.
        unreadable: hears of each line that is none of a journal's: its file, and the byte where it
            begins. What such a line spoke of is not done either.

    Raises RunError for a journal that is no regular file or cannot be read."""
    for path in journals(output):
        try:
            handle = open_regular(path, follow=follow)
        except FileNotFoundError:
            continue
        with handle, reading(path):
            at = ends.get(path.name, 0) if ends is not None else 0
            handle.seek(at)
            for line in handle:
                # Not even when it reads as a whole one: the next writer of this journal drops it.
                if not line.endswith(b"\n"):
                    break
                entry = _read_line(line)
                if entry is None and unreadable is not None:
                    unreadable(path, at)
                at += len(line)
                if ends is not None:
                    ends[path.name] = at
                if entry is not None:
                    yield entry


def journals(output: Path) -> list[Path]:
    """The files of a folder's journals, in order of their names."""
    folder = output / JOURNAL
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise cannot_read(folder, error) from error


@dataclass(frozen=True, slots=True)
class Ledger:
    """What all journals say together.

    Attributes:
        finished: (row, turn) to its last line.
        others: earlier lines of the same sample that tell another size or checksum.
        rejected: samples that a run left out, and that no later line finishes.
        unreadable: lines that are none of a journal's: "journal/0000.jsonl, byte 120".
    """

    finished: dict[tuple[int, int], Entry]
    others: dict[tuple[int, int], list[Entry]]
    rejected: dict[tuple[int, int], Reject]
    unreadable: list[str]

    def lines_of(self, entry: Entry) -> list[Entry]:
        """All lines of its sample, any of which may be the true one; the last one first."""
        return [self.finished[entry.key], *self.others.get(entry.key, ())]


def read_ledger(output: Path) -> Ledger:
    """Raises what read_entries raises."""
    bad: list[str] = []

    def unreadable(path: Path, at: int) -> None:
        bad.append(f"{JOURNAL}/{printable(path.name)}, byte {at:,}")

    ledger = Ledger({}, {}, {}, bad)
    for entry in read_entries(output, unreadable=unreadable):
        if entry.reject is not None:
            ledger.rejected[entry.key] = entry.reject
            continue
        ledger.rejected.pop(entry.key, None)
        before = ledger.finished.get(entry.key)
        if before is not None and (before.size, before.xxh3) != (entry.size, entry.xxh3):
            ledger.others.setdefault(entry.key, []).append(before)
        ledger.finished[entry.key] = entry
    return ledger


_decode = msgspec.json.Decoder(Entry).decode


def _read_line(line: bytes) -> Entry | None:
    """None for a line that is none of ours."""
    try:
        return _decode(line)
    except (ValueError, RecursionError):
        pass
    try:  # half a surrogate pair in an id, which msgspec's own reader refuses
        return decode(line, Entry)
    except ValueError:
        return None


def reject_line(reject: Reject) -> dict[str, Any]:
    return {
        "row": reject.row,
        "turn": reject.turn,
        "source": reject.source,
        "id": reject.id,
        "reason": reject.reason,
        "detail": reject.detail,
    }


def write_rejects(output: Path, rejects: Iterable[Reject]) -> None:
    """rejects.jsonl as a whole: those of the preparation and those of the journals."""
    ordered = sorted(rejects, key=lambda reject: (reject.row, reject.turn))
    data = b"".join(json_line(reject_line(item)) for item in ordered)
    write_whole(output / REJECTS, [data], sync=False)


def read_rejects(output: Path) -> Iterator[Reject]:
    """The lines of rejects.jsonl; none where there is no such file. Raises RunError, with the line, for
    one that is none of ours."""
    path = output / REJECTS
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return
    with handle, reading(path):
        for number, line in enumerate(handle, 1):
            try:
                yield decode(line, Reject)
            except ValueError as error:
                text = f"{path}: line {number:,} is no reject: {error}"
                raise RunError(printable(text)) from error
