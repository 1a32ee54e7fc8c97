"""Writer threads: from batches in host memory to files, journal lines and rejects.

One thread takes batches in the order they were staged and waits for each to land; the others write
its samples. The first error of any of them is kept, raised at the next submit and at the end, and
stops the rest.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from extractor.errors import RunError
from extractor.journal import Journal
from extractor.layout import Plane
from extractor.layouts import Layout
from extractor.records import Reject, Sample
from extractor.store import Written, write_whole
from extractor.transfer import HostRing, StagedBatch

logger = logging.getLogger(__name__)

NON_FINITE = "non_finite"

# Writes one file: (path, parts, sync) -> what was written. Tests put faulty ones here.
WriteFile = Callable[[Path, list[bytes | memoryview], bool], Written]


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
        threads: how many files are written at a time.
        sync: force each file to disk before its name appears.
    """

    def __init__(
        self,
        output: Path,
        journal: Journal,
        ring: HostRing,
        *,
        layout: Layout,
        threads: int,
        sync: bool = False,
        write_file: WriteFile = write_whole,
    ) -> None:
        self._output, self._journal, self._ring = output, journal, ring
        self._layout, self._sync = layout, sync
        self._write_file = write_file
        self.progress = Progress()
        self.rejects: list[Reject] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[StagedBatch | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._arrivals = threading.Thread(target=self._receive, name="arrivals", daemon=True)
        self._arrivals.start()

    def check(self) -> None:
        """Raises RunError with path and errno, once a thread has failed."""
        error = self._error
        if error is None:
            return
        if isinstance(error, OSError):
            raise RunError(
                f"cannot write {error.filename}: {error.strerror} (errno {error.errno}); "
                "everything finished so far is whole; make room and run the same command again"
            ) from error
        raise RunError(f"a writer thread failed: {error!r}") from error

    def submit(self, staged: StagedBatch) -> None:
        """Take over a batch and its buffer. Raises what check() raises."""
        self.check()
        self._batches.put(staged)

    def close(self) -> None:
        """Wait until all is written, then raise what check() raises."""
        self._batches.put(None)
        self._arrivals.join()
        self._pool.shutdown(wait=True)
        self.check()

    def _receive(self) -> None:
        while (staged := self._batches.get()) is not None:
            try:
                begun = time.perf_counter()
                staged.wait()
                self.progress.wait_seconds += time.perf_counter() - begun
                self._scatter(staged)
            except BaseException as error:
                self._fail(error)
                self._ring.release(staged.buffer)

    def _scatter(self, staged: StagedBatch) -> None:
        left = len(staged.batch.samples)
        lock = threading.Lock()

        def write(sequence: int) -> None:
            nonlocal left
            try:
                if self._error is None:
                    self._write(staged, sequence)
            except BaseException as error:
                self._fail(error)
            finally:
                with lock:
                    left -= 1
                    last = left == 0
                if last:
                    self._ring.release(staged.buffer)

        for sequence in range(len(staged.batch.samples)):
            self._pool.submit(write, sequence)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    def _write(self, staged: StagedBatch, sequence: int) -> None:
        sample = staged.batch.samples[sequence]
        bad = staged.first_bad_token(sequence)
        if bad is not None:
            self._reject(staged, sequence, *bad)
            return
        begun = time.perf_counter()
        tensors = {plane.key: staged.blob(plane, sequence) for plane in staged.planes}
        parts = self._layout.parts(sample, tensors)
        path = self._output / self._layout.path(sample.row, sample.turn)
        written = self._write_file(path, parts, self._sync)
        self._journal.finished(sample, written)
        self._count(sample, written, time.perf_counter() - begun)

    def _count(self, sample: Sample, written: Written, seconds: float) -> None:
        with self._lock:
            self.progress.samples += 1
            self.progress.tokens += len(sample)
            self.progress.bytes += written.size
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
