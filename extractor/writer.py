"""Writer threads: from batches in host memory to files, journal lines and rejects.

One thread takes batches in the order they were staged and waits for each to land; the others write
its samples, each by itself or through a process of its own. The first error of any of them is kept,
raised at the next submit and at the end, and stops the rest.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from extractor.errors import RunError, disk_error
from extractor.files import Durability, Pending, Written, sync_path, write_files
from extractor.journal import Journal
from extractor.layout import Plane
from extractor.layouts import Layout
from extractor.layouts.base import Parts
from extractor.records import Reject, Sample
from extractor.transfer import HostRing, StagedBatch
from extractor.writer_process import WriterProcess

logger = logging.getLogger(__name__)

NON_FINITE = "non_finite"

# What a thread writes before it asks for more: small samples together, with one request, one lock and
# one write of the journal, and little enough that no thread is last for long.
TASK_BYTES, TASK_SAMPLES = 8 << 20, 16

# Each thread that is not needed takes the interpreter from the one that launches kernels, so that there
# are few until they fall behind; with processes less so.
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


class Writer:
    """Writes staged batches to an output folder.

    Args:
        output: the folder.
        journal: this writer's own.
        ring: where the batches' buffers go back to.
        layout: where a sample's file lies and what is in it.
        threads: how many files are written at a time, at most; there are few until the disk is behind.
        at_once: start all threads now.
        processes: each thread has a process that writes for it, where the system gives one; the ring is
            a shared one.
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
        self._most_threads, self._processes = threads, processes
        self.progress = Progress()
        self.rejects: list[Reject] = []
        self._unwritten, self._busy, self._busy_since = 0, 0.0, 0.0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[StagedBatch | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Callable[[WriterProcess | None], None] | None]
        self._tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ready = threading.Semaphore(0)
        first = FIRST_PROCESSES if processes else FIRST_THREADS
        for _ in range(threads if at_once else min(threads, first)):
            self._start_thread(processes)
        self._arrivals = threading.Thread(target=self._receive, name="arrivals", daemon=True)
        self._arrivals.start()

    def check(self) -> None:
        """Raises RunError with path and errno, once a thread has failed."""
        error = self._error
        if error is None:
            return
        if isinstance(error, OSError):
            raise disk_error(error) from error
        if isinstance(error, RunError):
            raise error
        raise RunError(f"a writer thread failed: {error!r}") from error

    def wait_until_ready(self) -> None:
        """Until the threads started so far can write: for a benchmark's clock."""
        for _ in self._threads:
            self._ready.acquire()

    def submit(self, staged: StagedBatch) -> None:
        """Take over a batch and its buffer. Raises what check() raises."""
        self.check()
        self._batches.put(staged)

    def close(self) -> None:
        """Wait until all is written, then raise what check() raises."""
        self._batches.put(None)
        while self._arrivals.is_alive():  # no model to take the interpreter from any more
            self._help(by_process=False)
            self._arrivals.join(timeout=0.01)
        while self._help(by_process=False):
            pass
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self.check()

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

    def _help(self, by_process: bool) -> bool:
        """One thread more, if samples wait for one and there may be more; whether there is."""
        with self._lock:
            if self._tasks.empty() or len(self._threads) >= self._most_threads:
                return False
            try:
                self._start_thread(by_process)
            except RuntimeError:  # the system gives no more; those that are there go on
                self._most_threads = len(self._threads)
                return False
        return True

    def _start_thread(self, by_process: bool) -> None:
        name = f"writer-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(by_process,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self, by_process: bool) -> None:
        process = None
        try:
            try:
                process = start_process() if by_process else None
            finally:
                self._ready.release()
            while (task := self._tasks.get()) is not None:
                task(process)
        except BaseException as error:  # or nobody would hear that there is a thread fewer
            self._fail(error)
        finally:
            if process is not None:
                process.close()

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
        self._help(self._processes)
        count = len(staged.batch.samples)
        group = Group(count)
        self._arrived(1)
        bytes_each = self._layout.row_bytes * staged.batch.num_tokens // count
        most = min(TASK_BYTES // max(bytes_each, 1), TASK_SAMPLES)
        if self._durability == "file":  # no sample waits for another's disk
            most = 1
        size = max(min(-(-count // len(self._threads)), most), 1)
        for begin in range(0, count, size):
            some = range(begin, min(begin + size, count))
            self._tasks.put(partial(self._task, staged, group, some))

    def _task(
        self,
        staged: StagedBatch,
        group: "Group",
        sequences: range,
        process: WriterProcess | None,
    ) -> None:
        """Write some samples of a batch; whoever is the last of its batch ends it."""
        pending: list[tuple[Sample, Pending]] = []
        try:
            done, error = self._write(staged, sequences, process)
            if self._durability == "group":
                pending = done
            if error is not None:
                raise error
        except BaseException as error:
            self._fail(error)
        if group.add(len(sequences), pending):
            self._ring.release(staged.let_go())
            self._arrived(-1)
            self._finish(group)

    def _write(
        self, staged: StagedBatch, sequences: range, process: WriterProcess | None
    ) -> tuple[list[tuple[Sample, Pending]], OSError | None]:
        """Those written, which have their lines but in mode "group", and the error of the next one."""
        begun = time.perf_counter()
        samples, files = self._files(staged, sequences)
        written, error = self._put(staged, files, process)
        done = list(zip(samples, written, strict=False))
        if self._durability != "group":
            lines = [(sample, file.written) for sample, file in done]
            self._journal.finished_together(lines)
            self._count(lines, time.perf_counter() - begun)
        return done, error

    def _files(
        self, staged: StagedBatch, sequences: range
    ) -> tuple[list[Sample], list[tuple[str, Parts]]]:
        """The samples that are to have a file, and each one's path and content."""
        samples: list[Sample] = []
        files: list[tuple[str, Parts]] = []
        for sequence in sequences:
            if self._error is not None:
                break
            bad = staged.first_bad_token(sequence)
            if bad is not None:
                self._reject(staged, sequence, *bad)
                continue
            sample = staged.batch.samples[sequence]
            path = self._top + self._layout.path(sample.row, sample.turn)
            samples.append(sample)
            files.append((path, self._layout.parts(sample, staged.blobs(sequence))))
        return samples, files

    def _put(
        self, staged: StagedBatch, files: list[tuple[str, Parts]], process: WriterProcess | None
    ) -> tuple[list[Pending], OSError | None]:
        """write_files, by the process where there is one and the files are of a slot that it can map."""
        slot = self._ring.slot_of(staged.buffer)
        if files and process is not None and slot is not None:
            there = process.write(slot, self._ring.oldest_slot, files, self._durability)
            if there is not None:
                return there
        return write_files(files, self._durability, lambda: self._error is None)

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


def start_process() -> WriterProcess | None:
    """One that is ready, or None where the system gives none: then a thread writes by itself."""
    try:
        process = WriterProcess()
    except Exception as error:
        logger.warning("no writer process (%s): a thread writes instead", error)
        return None
    if process.is_ready():
        return process
    process.close()
    logger.warning("a writer process did not start: a thread writes instead")
    return None


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
