"""From batches in host memory to files, journal lines and rejects.

One thread takes batches in the order in which they were staged, waits until each has landed in host
memory, and splits it into orders of a few samples each. Worker processes (pool.py) write the orders when
there are some and the layout allows it; otherwise threads (threads.py) do. The first error of any of
them stops the others; it is kept, and raised at the next submit and at the end.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from extractor.errors import RunError, disk_error
from extractor.files import Durability, Pending, Written, write_files
from extractor.layouts import Layout
from extractor.layouts.planes import Plane
from extractor.layouts.safetensors import Framed
from extractor.output.journal import Journal
from extractor.records import Reject, Sample
from extractor.write.buffers import HostRing
from extractor.write.order import Group, Order, Outcome
from extractor.write.pool import Processes
from extractor.write.process import Command, command
from extractor.write.staging import StagedBatch
from extractor.write.threads import Threads

logger = logging.getLogger(__name__)

NON_FINITE = "non_finite"

# The most that one order holds. Small samples share an order, which needs one request, one lock and one
# write of the journal. Orders are small enough that the last one of a batch does not take long.
ORDER_BYTES, ORDER_SAMPLES = 8 << 20, 16

# How many threads and processes there are until orders wait. A thread that is not needed takes the
# interpreter lock from the thread that launches kernels; a process takes memory and time to start.
FIRST_THREADS, FIRST_PROCESSES = 4, 8


def after_a_gpu(device: torch.device) -> bool:
    """Whether worker processes write what this device computes: True for CUDA.

    On a CPU the model keeps the cores busy, and there is no thread that launches kernels and that
    writer threads could hold up."""
    return device.type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How a writer starts its threads and worker processes. Tests replace parts of it.

    Attributes:
        are_processes: whether worker processes write what this device computes.
        command: see process.py.
        start: starts a thread; raises RuntimeError when the system gives no more.
        write: see write_files.
    """

    are_processes: Callable[[torch.device], bool] = after_a_gpu
    command: Command = command
    start: Callable[[threading.Thread], None] = threading.Thread.start
    write: Callable[..., tuple[list[Pending], OSError | None]] = write_files


ORDINARY = Workers()


class Landing(Protocol):
    """A scope around the wait for a batch's copy to the host (see Watch.step)."""

    def __call__(
        self, kind: str, what: str, tokens: int, /
    ) -> contextlib.AbstractContextManager[None]: ...


def _unwatched(*_: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(slots=True)
class Progress:
    """Running totals of a writer, for the progress line and for run.json.

    Attributes:
        samples, tokens, bytes: of what is written; bytes are file sizes.
        rejected: samples with a value that is not finite.
        write_seconds: sum over all orders of the time that each took.
        wait_seconds: time that the arrivals thread waited for batches to land.
    """

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    rejected: int = 0
    write_seconds: float = 0.0
    wait_seconds: float = 0.0


class Busy:
    """Measures the seconds in which at least one batch has landed and is not yet written.

    It is thread-safe."""

    def __init__(self) -> None:
        self._count, self._seconds, self._since = 0, 0.0, 0.0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """The total so far."""
        with self._lock:
            now = time.perf_counter() if self._count else self._since
            return self._seconds + now - self._since

    def change(self, by: int) -> None:
        """Count a batch that has landed (by=1) or one that is written (by=-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._count:
                self._seconds += now - self._since
            self._count += by
            self._since = now


class Writer:
    """Writes staged batches to an output folder.

    Args:
        output: the folder.
        journal: the journal of this writer; no other writer uses it.
        ring: gets the buffer of each batch back.
        layout: where a sample's file lies and what is in it.
        threads: how many files are written at a time, at most; it starts with few threads or processes.
        at_once: start all threads or processes at once.
        processes: use worker processes when the system gives some and the layout is a Framed one. The
            ring must then be a shared one.
        durability: what is forced to disk before a sample counts as done. "none": nothing; a killed
            program loses nothing, a power cut may. "file": each file, its folder's entry and its
            journal line, one after the other. "group": a batch's files, then their folders, then
            its journal lines.
        landing: watches the wait for a copy (see Landing).
        workers: how threads and processes are started.
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
        workers: Workers = ORDINARY,
    ) -> None:
        self._top, self._journal, self._ring = f"{output}/", journal, ring
        self._layout, self._landing = layout, landing
        self._durability: Durability = durability
        self.progress = Progress()
        self._busy = Busy()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[StagedBatch | None] = queue.SimpleQueue()
        self._processes = self._start_processes(threads, at_once, workers) if processes else None
        self._threads = Threads(
            layout,
            durability,
            threads if at_once and not self._processes else min(threads, FIRST_THREADS),
            threads,
            go_on=self._goes_on,
            settle=self._settle,
            fail=self._fail,
            start=workers.start,
            write=workers.write,
        )
        self._arrivals = threading.Thread(target=self._receive, name="arrivals", daemon=True)
        self._arrivals.start()

    def check(self) -> None:
        """Raises RunError once something has failed; it names path and errno for a disk error."""
        error = self._error
        if error is None:
            return
        if isinstance(error, OSError):
            raise disk_error(error) from error
        if isinstance(error, RunError):
            raise error
        raise RunError(f"the writer failed: {error!r}") from error

    def wait_until_ready(self) -> None:
        """Wait until the worker processes are ready to write. A benchmark then starts its clock."""
        if self._processes is not None:
            self._processes.wait_until_ready()

    def submit(self, staged: StagedBatch) -> None:
        """Take over a batch and its buffer. Raises what check() raises, and then takes nothing."""
        self.check()
        self._batches.put(staged)

    def drain(self) -> None:
        """Wait until all batches are written, then raise what check() raises.

        Nothing may be submitted after it. The caller still has to call end_processes()."""
        self._batches.put(None)
        while self._arrivals.is_alive():
            self._threads.grow()
            self._arrivals.join(timeout=0.01)
        if self._processes is not None:
            self._processes.drain()
        self._threads.drain()
        self.check()

    def end_processes(self) -> None:
        """Wait until the worker processes have ended. They map whole buffers, so this takes a while."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def close(self) -> None:
        """drain() and end_processes()."""
        try:
            self.drain()
        finally:
            self.end_processes()

    @property
    def pids(self) -> list[int]:
        """Process ids of the worker processes."""
        return [] if self._processes is None else self._processes.pids

    def busy_seconds(self) -> float:
        """Seconds so far in which at least one batch had landed and was not yet written."""
        return self._busy.seconds()

    # Threads and processes --------------------------------------------------------------------

    def _start_processes(self, most: int, at_once: bool, workers: Workers) -> Processes | None:
        """The pool; None for a layout that needs threads, or when the system gives no processes."""
        if not isinstance(self._layout, Framed):
            return None
        try:
            return Processes(
                self._layout,
                self._ring,
                self._durability,
                most if at_once else min(most, FIRST_PROCESSES),
                most,
                go_on=self._goes_on,
                # A settle that syncs to disk runs in a thread, so that the pool's thread never waits.
                settle=self._settle if self._durability == "none" else self._settle_later,
                decline=self._leave_to_threads,
                fail=self._fail,
                command=workers.command,
            )
        except (OSError, RuntimeError) as error:
            logger.warning("no writer processes (%s): threads write instead", error)
            return None

    def _leave_to_threads(self, order: Order) -> None:
        self._threads.put([order])

    def _settle_later(self, order: Order, outcome: Outcome) -> None:
        self._threads.do(partial(self._settle, order, outcome))

    def _goes_on(self) -> bool:
        return self._error is None

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    # From a batch to orders -------------------------------------------------------------------

    def _receive(self) -> None:
        while (staged := self._batches.get()) is not None:
            try:
                begun = time.perf_counter()
                with self._landing("copy", f"the copy of {staged.batch}", staged.batch.num_tokens):
                    staged.wait()
                self.progress.wait_seconds += time.perf_counter() - begun
                self._hand_out(staged)
            except BaseException as error:
                self._fail(error)
                self._ring.release(staged.let_go())

    def _hand_out(self, staged: StagedBatch) -> None:
        self._threads.grow()
        pool: Threads | Processes = self._threads
        # A batch larger than a slot has a private buffer, which only threads can read.
        if self._processes and self._processes.size and staged.buffer.slot is not None:
            pool = self._processes
            pool.grow()
        orders = self._orders(staged, pool.size)
        self._busy.change(1)
        pool.put(orders)

    def _orders(self, staged: StagedBatch, among: int) -> list[Order]:
        """Split a batch into orders for `among` threads or processes."""
        count = len(staged.batch.samples)
        group = Group(count)
        # An order is small enough for every thread or process to get one, and within ORDER_BYTES (by the
        # mean size of a sample) and ORDER_SAMPLES.
        bytes_each = self._layout.row_bytes * staged.batch.num_tokens // count
        most = min(ORDER_BYTES // max(bytes_each, 1), ORDER_SAMPLES)
        if self._durability == "file":  # so that no sample waits for the sync of another
            most = 1
        size = max(min(-(-count // max(among, 1)), most), 1)
        pieces = [range(begin, min(begin + size, count)) for begin in range(0, count, size)]
        return [Order(staged, group, len(p), list(self._files(staged, p))) for p in pieces]

    def _files(self, staged: StagedBatch, numbers: range) -> Iterator[tuple[int, Sample, str]]:
        """The files of those samples of an order that are finite (see Order.files). The other samples
        are rejected here."""
        for number in numbers:
            if self._error is not None:
                break
            bad = staged.first_bad_token(number)
            if bad is not None:
                self._reject(staged, number, *bad)
                continue
            sample = staged.batch.samples[number]
            yield number, sample, self._top + self._layout.path(sample.row, sample.turn)

    def _reject(self, staged: StagedBatch, sequence: int, plane: Plane, token: int) -> None:
        sample = staged.batch.samples[sequence]
        value = staged.tensor(plane, sequence)[token]
        # The column of the first value that is not finite tells which of the plane's states it is in.
        # A plane without columns, or of one-byte values, gets column 0.
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
            self.progress.rejected += 1

    # From what was written to journal lines ---------------------------------------------------

    def _settle(self, order: Order, outcome: Outcome) -> None:
        """Write the journal lines of an order, except in mode "group". After the last order of a batch,
        give its buffer back and finish its group."""
        samples = (sample for _, sample, _ in order.files)
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
        # When this was the last order of the batch, nobody reads its buffer any more.
        if order.group.add(order.stands_for, written):
            self._ring.release(order.staged.let_go())
            self._busy.change(-1)
            self._finish(order.group)

    def _finish(self, group: Group) -> None:
        """Commit the files of a batch written in mode "group". After an error, remove its temporary
        files instead."""
        try:
            if self._error is None:
                group.commit(self._journal, self._count)
        except BaseException as error:
            self._fail(error)
        finally:
            group.discard()

    def _count(self, items: Sequence[tuple[Sample, Written]], seconds: float = 0.0) -> None:
        with self._lock:
            self.progress.samples += len(items)
            self.progress.tokens += sum(len(sample) for sample, _ in items)
            self.progress.bytes += sum(written.size for _, written in items)
            self.progress.write_seconds += seconds
