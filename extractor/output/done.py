"""Which samples an output folder holds already: its journals compared with its files."""

import os
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.layouts.base import sample_path
from extractor.output.journal import read_entries
from extractor.records import Reject

STAT_THREADS, STATS_AT_A_TIME = 16, 1000
LOCAL_STAT_SECONDS = 50e-6  # a filesystem that takes longer to answer is asked by several threads


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

    def left_of(self, selected: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of these samples, by index, those that are neither finished nor rejected."""
        ended = self.finished.copy()
        ended[list(self.rejected)] = True
        return selected[~ended[selected]]


def find_done(
    output: Path,
    rows: npt.NDArray[np.int64],
    turns: npt.NDArray[np.int16],
    path: Callable[[int, int], str] = sample_path,
) -> Done:
    """Compare the journals with the files that are there: one stat a journalled sample, several at a
    time where the filesystem answers late.

    rows, turns: [N] of the prepared store, in its (row, turn) order.
    path: where a (row, turn) lies below output; the layout says."""
    keys = _keys(rows, turns)
    at_rows, at_turns, sizes = array("q"), array("h"), array("q")
    rejects: list[tuple[int, Reject]] = []  # with how many finished samples came before
    for entry in read_entries(output):
        if entry.reject is not None:
            rejects.append((len(sizes), entry.reject))
            continue
        at_rows.append(entry.row)
        at_turns.append(entry.turn)
        sizes.append(entry.size)
    at = _find(keys, _keys(np.array(at_rows, np.int64), np.array(at_turns, np.int16)))
    known = (at >= 0).nonzero()[0]  # lines that speak of a sample of this store
    at, said = at[known], np.array(sizes, np.int64)[known]
    last_line = np.full(len(rows), -1, np.int64)
    last_line[at] = known  # of several, numpy keeps the last
    seen = last_line >= 0
    journalled = seen.nonzero()[0]
    on_disk = np.full(len(rows), -1, np.int64)
    on_disk[journalled] = _sizes(output, rows[journalled], turns[journalled], path)
    finished = np.zeros(len(rows), np.bool_)
    finished[at[on_disk[at] == said]] = True
    rejected: dict[int, Reject] = {}
    for before, reject in rejects:
        index = int(_find(keys, _keys(np.array([reject.row]), np.array([reject.turn])))[0])
        if index >= 0 and last_line[index] < before:
            rejected[index] = reject
    return Done(finished, rejected, int((seen & ~finished).sum()))


def _keys(rows: npt.NDArray[np.int64], turns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """One number a (row, turn), in the same order."""
    return (rows.astype(np.int64) << 16) + turns


def _find(keys: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each wanted key is in the sorted keys, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def _sizes(
    output: Path,
    rows: npt.NDArray[np.int64],
    turns: npt.NDArray[np.int16],
    path: Callable[[int, int], str],
) -> list[int]:
    """Bytes of each sample's file, -1 for one that is not there."""
    top = f"{output}/"

    def some(begin: int) -> list[int]:
        part = slice(begin, begin + STATS_AT_A_TIME)
        pairs = zip(rows[part].tolist(), turns[part].tolist(), strict=True)
        return [_size(top + path(row, turn)) for row, turn in pairs]

    starts = range(0, len(rows), STATS_AT_A_TIME)
    begun = time.perf_counter()
    first = [size for start in starts[:1] for size in some(start)]
    if time.perf_counter() - begun < len(first) * LOCAL_STAT_SECONDS:
        # Threads would only take the interpreter from each other.
        return first + [size for start in starts[1:] for size in some(start)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        return first + [size for part in pool.map(some, starts[1:]) for size in part]


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1
