"""Chunks of rows through a Converter: in this process for few, in processes of their own for many.

The processes are plain Python programs (worker.py) on two pipes, and not multiprocessing's: its
spawned children import the main script again, and with it torch and all of transformers, which
takes them longer than most inputs take to convert; and forking a process with threads or CUDA
can hang.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from extractor.data.rows import RawRow
from extractor.data.sample import Converter, Outcome, Rules
from extractor.errors import RunError

CHUNK_ROWS = 64
CHUNK_BYTES = 1 << 20
IN_PROCESS_ROWS = 2000  # starting processes costs seconds: as long as so many rows take
CHUNKS_AHEAD = 4  # per worker: enough that none waits, few enough that memory stays flat
STOP_SECONDS = 5.0
PACKAGES = Path(__file__).parents[2]


def outcomes(rows: Iterator[RawRow], converter: Converter, workers: int) -> Iterator[Outcome]:
    """What becomes of each chunk, in the order of the rows.

    Raises:
        RunError: a worker process died.
    """
    first = list(islice(rows, IN_PROCESS_ROWS + 1))
    chunks = _chunks(chain(first, rows))
    if len(first) <= IN_PROCESS_ROWS or workers < 2:
        yield from map(converter.convert, chunks)
    else:
        yield from _in_processes(chunks, converter.rules, workers)


def _in_processes(chunks: Iterator[list[RawRow]], rules: Rules, workers: int) -> Iterator[Outcome]:
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    processes: list[_Worker] = []
    threads = ThreadPoolExecutor(workers, "tokenize")  # each waits for one process at a time
    pending: deque[Future[Outcome]] = deque()

    def convert(chunk: list[RawRow]) -> Outcome:
        worker = idle.get()
        try:
            return worker.convert(chunk)
        finally:
            idle.put(worker)

    try:
        for _ in range(workers):
            processes.append(_Worker(rules))
            idle.put(processes[-1])
        for chunk in chunks:
            pending.append(threads.submit(convert, chunk))
            if len(pending) >= workers * CHUNKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for process in processes:
            process.close()
        threads.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """A process that converts chunks, one after another. Pickles go over its pipes only."""

    def __init__(self, rules: Rules) -> None:
        search = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "extractor.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._rules: Rules | None = rules

    def convert(self, chunk: list[RawRow]) -> Outcome:
        """Raises RunError when the process is gone."""
        to, back = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        try:
            if self._rules is not None:  # sent from a thread: a pipe takes less than they hold
                self._send(self._rules, to)
                self._rules = None
            self._send(chunk, to)
            return pickle.load(back)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise RunError(
                "a process that tokenizes died (out of memory, perhaps: --workers takes fewer)"
            ) from error

    @staticmethod
    def _send(what: Any, to: IO[bytes]) -> None:
        pickle.dump(what, to, pickle.HIGHEST_PROTOCOL)
        to.flush()

    def close(self) -> None:
        """Ends the process, at once if it is in the middle of a chunk."""
        if self._process.poll() is None:
            self._process.kill()  # it holds nothing but memory
        self._process.wait(STOP_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast(IO[bytes], pipe).close()


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.data) if isinstance(row.data, bytes) else 1 << 12
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
