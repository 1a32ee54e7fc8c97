"""Orders and outcomes: what a writer sends to its threads and worker processes, and what comes back."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from extractor.files import Pending, Written, sync_path
from extractor.output.journal import Journal
from extractor.records import Sample
from extractor.write.staging import StagedBatch


class Outcome(NamedTuple):
    """The result of an order.

    Attributes:
        done: the files that are written, in the order of Order.files.
        error: the error of the file after these, if any.
        seconds: how long the order took.
    """

    done: list[Pending]
    error: Exception | None = None
    seconds: float = 0.0


class Order(NamedTuple):
    """Some samples of one batch that a thread or a worker process writes together.

    Attributes:
        staged: the batch, whose buffer holds the states of the samples.
        group: shared by all orders of the batch.
        stands_for: how many samples the order covers: those to write and those that were rejected.
        files: for each sample to write: its number in the batch, the sample, the path of its file.
    """

    staged: StagedBatch
    group: "Group"
    stands_for: int
    files: list[tuple[int, Sample, str]]


class Group:
    """The samples of one batch that are not settled yet, and the files that are written but not
    committed.

    It is thread-safe. size: samples of the batch."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._pending: list[tuple[Sample, Pending]] = []
        self._lock = threading.Lock()

    def add(self, count: int, pending: Sequence[tuple[Sample, Pending]]) -> bool:
        """Count `count` samples as settled and keep their files that wait for commit().

        Returns True when these were the last samples of the batch."""
        with self._lock:
            self._pending += pending
            self._left -= count
            return self._left == 0

    def commit(
        self, journal: Journal, count: Callable[[Sequence[tuple[Sample, Written]]], None]
    ) -> None:
        """Sync the files, rename them, sync their folders, then write the journal lines.

        The order matters: after a power cut no journal line names a file that is lost."""
        for _, pending in self._pending:
            pending.sync()
        done = [(sample, pending.commit()) for sample, pending in self._pending]
        for folder in {pending.folder for _, pending in self._pending}:
            sync_path(folder)
        self._pending.clear()
        journal.finished_together(done)
        count(done)

    def discard(self) -> None:
        """Remove the temporary files that are not committed."""
        for _, pending in self._pending:
            pending.discard()
