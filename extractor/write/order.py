"""What a writer hands to those who write its files, and what it hears from them."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from extractor.files import Pending, Written, sync_path
from extractor.output.journal import Journal
from extractor.records import Sample
from extractor.write.staging import StagedBatch


class Outcome(NamedTuple):
    """What came of an order: as far as it got, the error of the next file, and how long it took."""

    done: list[Pending]
    error: Exception | None = None
    seconds: float = 0.0


class Order(NamedTuple):
    """Some samples of one batch, to be written together, by a thread or by a worker process.

    Attributes:
        staged: the batch, whose buffer holds their states.
        group: of the batch's orders.
        stands_for: how many samples: those to be written, and those that were rejected.
        files: of those to be written: number in the batch, sample, path of its file.
    """

    staged: StagedBatch
    group: "Group"
    stands_for: int
    files: list[tuple[int, Sample, str]]


class Group:
    """A batch's files between being written and counting as done."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._pending: list[tuple[Sample, Pending]] = []
        self._lock = threading.Lock()

    def add(self, count: int, pending: Sequence[tuple[Sample, Pending]]) -> bool:
        """That many samples are dealt with, but for those pending. True for the last."""
        with self._lock:
            self._pending += pending
            self._left -= count
            return self._left == 0

    def commit(
        self, journal: Journal, count: Callable[[Sequence[tuple[Sample, Written]]], None]
    ) -> None:
        """Files to disk, then their names, then their lines: a line never outlives its file."""
        for _, pending in self._pending:
            pending.sync()
        done = [(sample, pending.commit()) for sample, pending in self._pending]
        for folder in {pending.folder for _, pending in self._pending}:
            sync_path(folder)
        self._pending.clear()
        journal.finished_together(done)
        count(done)

    def discard(self) -> None:
        for _, pending in self._pending:
            pending.discard()
