"""From batches in host memory to files, journal lines and rejects.

One thread takes batches in the order they were staged and waits for each to land. Its samples are
written by a crew of processes (pool.py) where there is one and the format lets it, by threads
elsewhere. The first error of any of them is kept, raised at the next submit and at the end, and stops
the rest.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from extractor.errors import RunError, disk_error
from extractor.files import Durability, Pending, Written, sync_path, write_files
from extractor.layouts import Layout
from extractor.layouts.planes import Plane
from extractor.layouts.safetensors import Framed
from extractor.output.journal import Journal
from extractor.records import Reject, Sample
from extractor.write.buffers import HostRing, SharedSlot
from extractor.write.child import File
from extractor.write.pool import Crew
from extractor.write.process import Order, Outcome
from extractor.write.staging import StagedBatch

logger = logging.getLogger(__name__)
NON_FINITE = "non_finite"

# What a thread or a process writes before it asks for more: small samples together, with one request,
# one lock and one write of the journal, and little enough that none is last for long.
TASK_BYTES, TASK_SAMPLES = 8 << 20, 16

# Each thread that is not needed takes the interpreter from the one that launches kernels, so that there
# are few until they fall behind; processes take memory and time to start.
FIRST_THREADS, FIRST_PROCESSES = 4, 8


class Landing(Protocol):
    """A scope around the wait for a batch's copy to the host (see Watch.step)."""

    def __call__(
        self, kind: str, what: str, tokens: int, /
    ) -> contextlib.AbstractContextManager[None]: ...


def _unwatched(*_: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(slots=True)
class Progress:
    """Running totals of a writer; read by the progress line and by run.json."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    rejected: int = 0
    write_seconds: float = 0.0
    wait_seconds: float = 0.0


class Work(NamedTuple):
    """Some samples of a batch, to write together."""

    staged: StagedBatch
    group: "Group"
    sequences: range


Chosen = tuple[int, Sample, str]  # number in the batch, sample, path of its file


class Writer:
    """Writes staged batches to an output folder.

    Args:
        output: the folder.
        journal: this writer's own.
        ring: where the batches' buffers go back to.
        layout: where a sample's file lies and what is in it.
        threads: how many files are written at a time, at most; there are few until the disk is behind.
        at_once: start all of them now.
        processes: write by processes, as many, where the system gives some and the layout is a Framed
            one; the ring is a shared one.
        durability: what is forced to disk before a sample counts as done. "none": nothing; a killed
            program loses nothing, a power cut may. "file": each file, its folder's entry and its
            journal line, one after the other. "group": a batch's files, then their folders, then
            its journal lines.
        landing: how a copy is watched.
    """

    def __init__(
        self,
        output: Path,
        journal: Journal,
        ring: HostRing,
        *,
        layout: Layout,
        threads: int,
        at_once: bool = False,
        processes: bool = False,
        durability: Durability = "none",
        landing: Landing = _unwatched,
    ) -> None:
        self._top, self._journal, self._ring = f"{output}/", journal, ring
        self._layout, self._landing = layout, landing
        self._durability: Durability = durability
        self._most_threads = threads
        self.progress = Progress()
        self.rejects: list[Reject] = []
        self._unwritten, self._busy, self._busy_since = 0, 0.0, 0.0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[StagedBatch | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._crew = self._start_crew(at_once) if processes else None
        for _ in range(threads if at_once and not self._crew else min(threads, FIRST_THREADS)):
            self._start_thread()
        self._arrivals = threading.Thread(target=self._receive, name="arrivals", daemon=True)
        self._arrivals.start()

    def check(self) -> None:
        """Raises RunError, with path and errno where there are some, once something has failed."""
        error = self._error
        if error is None:
            return
        if isinstance(error, OSError):
            raise disk_error(error) from error
        if isinstance(error, RunError):
            raise error
        raise RunError(f"the writer failed: {error!r}") from error

    def wait_until_ready(self) -> None:
        """Until the processes started so far can write: for a benchmark's clock."""
        if self._crew is not None:
            self._crew.wait_until_ready()

    def submit(self, staged: StagedBatch) -> None:
        """Take over a batch and its buffer. Raises what check() raises."""
        self.check()
        self._batches.put(staged)

    def drain(self) -> None:
        """Wait until all is written, then raise what check() raises. Nothing may be submitted after it,
        and end_processes() is still to be called."""
        self._batches.put(None)
        while self._arrivals.is_alive():
            self._help()
            self._arrivals.join(timeout=0.01)
        if self._crew is not None:
            self._crew.drain()
        while self._help():  # no model to take the interpreter from any more
            pass
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self.check()

    def end_processes(self) -> None:
        """Wait until they have ended: they map whole buffers, and take a while."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def close(self) -> None:
        """drain() and end_processes()."""
        try:
            self.drain()
        finally:
            self.end_processes()

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [] if self._crew is None else self._crew.pids

    def busy_seconds(self) -> float:
        """Seconds so far in which a batch that has arrived was not yet written."""
        with self._lock:
            now = time.perf_counter() if self._unwritten else self._busy_since
            return self._busy + now - self._busy_since

    def _arrived(self, change: int) -> None:
        """One batch more that has arrived, or one fewer."""
        with self._lock:
            now = time.perf_counter()
            if self._unwritten:
                self._busy += now - self._busy_since
            self._unwritten += change
            self._busy_since = now

    def _start_crew(self, at_once: bool) -> Crew | None:
        """None for a layout that needs threads, and where the system gives no crew."""
        if not isinstance(self._layout, Framed):
            return None
        most = self._most_threads
        first = most if at_once else min(most, FIRST_PROCESSES)
        try:
            return Crew(first, most, self._goes_on, self._fail)
        except (OSError, RuntimeError) as error:
            logger.warning("no writer processes (%s): threads write instead", error)
            return None

    def _help(self) -> bool:
        """One thread more, if samples wait for one and there may be more; whether there is."""
        with self._lock:
            if self._tasks.empty() or len(self._threads) >= self._most_threads:
                return False
            try:
                self._start_thread()
            except RuntimeError:  # the system gives no more; those that are there go on
                self._most_threads = len(self._threads)
                return False
        return True

    def _start_thread(self) -> None:
        name = f"writer-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # or nobody would hear that a batch was never ended
                self._fail(error)

    def _receive(self) -> None:
        while (staged := self._batches.get()) is not None:
            try:
                begun = time.perf_counter()
                with self._landing("copy", f"the copy of {staged.batch}", staged.batch.num_tokens):
                    staged.wait()
                self.progress.wait_seconds += time.perf_counter() - begun
                self._scatter(staged)
            except BaseException as error:
                self._fail(error)
                self._ring.release(staged.let_go())

    def _scatter(self, staged: StagedBatch) -> None:
        self._help()
        crew = self._crew
        # What lies in no slot, a sample longer than a batch, is for a thread.
        slot = staged.buffer.slot if crew is not None and crew.size else None
        if crew is None or slot is None:
            self._arrived(1)
            for work in self._divided(staged, len(self._threads)):
                self._tasks.put(partial(self._write, work))
            return
        if crew.is_behind:
            crew.grow()
        orders = [self._order(work, slot) for work in self._divided(staged, crew.size)]
        self._arrived(1)
        crew.put(orders)

    def _divided(self, staged: StagedBatch, among: int) -> list[Work]:
        count = len(staged.batch.samples)
        group = Group(count)
        bytes_each = self._layout.row_bytes * staged.batch.num_tokens // count
        most = min(TASK_BYTES // max(bytes_each, 1), TASK_SAMPLES)
        if self._durability == "file":  # no sample waits for another's disk
            most = 1
        size = max(min(-(-count // max(among, 1)), most), 1)
        return [
            Work(staged, group, range(begin, min(begin + size, count)))
            for begin in range(0, count, size)
        ]

    def _write(self, work: Work, chosen: list[Chosen] | None = None) -> None:
        """By this thread."""
        samples, outcome = [], Outcome([])
        try:
            if chosen is None:
                chosen = list(self._chosen(work))
            samples = [sample for _, sample, _ in chosen]
            outcome = self._written(work.staged, chosen)
        except BaseException as error:
            self._fail(error)
        self._settle(work, samples, outcome)

    def _written(self, staged: StagedBatch, chosen: list[Chosen]) -> Outcome:
        begun = time.perf_counter()
        files = [
            (path, self._layout.parts(sample, staged.blobs(sequence)))
            for sequence, sample, path in chosen
        ]
        done, error = write_files(files, self._durability, self._goes_on)
        return Outcome(done, error, time.perf_counter() - begun)

    def _order(self, work: Work, slot: SharedSlot) -> Order:
        """For a process."""
        assert isinstance(self._layout, Framed)
        chosen = list(self._chosen(work))
        files: list[File] = []
        for sequence, sample, path in chosen:
            before, after = self._layout.frame(sample)
            files.append((os.fsencode(path), before, work.staged.places(sequence), after))
        # What waits for the disk is for a thread, for the crew must not.
        settle = self._settle if self._durability == "none" else self._settle_later
        return Order(
            slot,
            self._ring.oldest_slot,
            files,
            self._durability,
            settle=partial(settle, work, [sample for _, sample, _ in chosen]),
            decline=partial(self._tasks.put, partial(self._write, work, chosen)),
        )

    def _settle_later(self, work: Work, samples: list[Sample], outcome: Outcome) -> None:
        self._tasks.put(partial(self._settle, work, samples, outcome))

    def _chosen(self, work: Work) -> Iterator[Chosen]:
        """The samples that are to have a file; the others are rejected."""
        for sequence in work.sequences:
            if self._error is not None:
                break
            bad = work.staged.first_bad_token(sequence)
            if bad is not None:
                self._reject(work.staged, sequence, *bad)
                continue
            sample = work.staged.batch.samples[sequence]
            yield sequence, sample, self._top + self._layout.path(sample.row, sample.turn)

    def _settle(self, work: Work, samples: list[Sample], outcome: Outcome) -> None:
        """Lines of what is written, but in mode "group"; whoever is the last of a batch ends it."""
        written = list(zip(samples, outcome.done, strict=False))
        try:
            if self._durability != "group":
                lines = [(sample, file.written) for sample, file in written]
                self._journal.finished_together(lines)
                self._count(lines, outcome.seconds)
                written = []
            if outcome.error is not None:
                raise outcome.error
        except BaseException as error:
            self._fail(error)
        if work.group.add(len(work.sequences), written):
            self._ring.release(work.staged.let_go())
            self._arrived(-1)
            self._finish(work.group)

    def _goes_on(self) -> bool:
        return self._error is None

    def _finish(self, group: "Group") -> None:
        """What a batch written in group mode still needs, or on an error all that is left of it."""
        try:
            if self._error is None:
                group.commit(self._journal, self._count)
        except BaseException as error:
            self._fail(error)
        finally:
            group.discard()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    def _count(self, items: Sequence[tuple[Sample, Written]], seconds: float = 0.0) -> None:
        with self._lock:
            self.progress.samples += len(items)
            self.progress.tokens += sum(len(sample) for sample, _ in items)
            self.progress.bytes += sum(written.size for _, written in items)
            self.progress.write_seconds += seconds

    def _reject(self, staged: StagedBatch, sequence: int, plane: Plane, token: int) -> None:
        sample = staged.batch.samples[sequence]
        value = staged.tensor(plane, sequence)[token]
        column = 0
        if plane.width and plane.dtype.itemsize > 1:
            column = int((~torch.isfinite(value)).nonzero()[0, 0])
        state = plane.states[column * len(plane.states) // max(plane.width, 1)]
        reject = Reject(
            row=sample.row,
            turn=sample.turn,
            id=sample.id,
            source=sample.source,
            reason=NON_FINITE,
            detail=f"state {state} is not finite at token {token} of {len(sample)} "
            f"(id {int(sample.input_ids[token])}); stored as {plane.dtype}",
        )
        self._journal.rejected(reject)
        logger.warning("rejected row %d (%s): %s", sample.row, sample.id, reject.detail)
        with self._lock:
            self.rejects.append(reject)
            self.progress.rejected += 1


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
