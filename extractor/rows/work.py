"""Converts chunks of rows in worker processes.

Chat templates are programs of unknown origin, so they run in worker processes only, where the CPU
time and the memory of a row are bounded (bounds.py).

A worker is a plain Python program (worker.py) with two pipes. multiprocessing is not used: its
spawned children import the main script again, and with it torch and all of transformers, which takes
longer than the conversion of most inputs. Forking a process that has threads or CUDA can hang.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from extractor.errors import RunError, UsageError
from extractor.prepared.pieces import Refusal
from extractor.rows.converter import Converter, Outcome, Rules, identified
from extractor.rows.records import BadRow, RawRow

CHUNK_ROWS = 64
CHUNK_BYTES = 1 << 20
# Up to this many rows use one worker: starting more takes as long as converting the rows.
FEW_ROWS = 2000
# Chunks that are submitted per worker: enough that no worker waits, and a bound on memory.
CHUNKS_AHEAD = 4
STOP_SECONDS = 5.0
PACKAGES = Path(__file__).parents[2]
# A program that converts many inputs, such as the tests, sets KEEP_SPARE. Idle workers then stay in
# SPARE for the next input.
KEEP_SPARE = False
SPARE: list["_Worker"] = []


def outcomes(rows: Iterator[RawRow], rules: Rules, workers: int) -> Iterator[Outcome]:
    """The Outcome of each chunk, in the order of the rows.

    Chat templates run in worker processes only. When there are few rows, chunks that hold only ids
    are converted in this process, so that no worker has to start.

    Raises:
        UsageError: a template is not valid Jinja.
        RunError: a worker process died, and no row is the cause.
    """
    first = list(islice(rows, FEW_ROWS + 1))
    few = len(first) <= FEW_ROWS
    crew = _Crew(rules, 1 if few else workers)
    here = Converter(rules)
    pending: deque[Future[Outcome]] = deque()
    try:
        for chunk in _chunks(chain(first, rows)):
            if few and not here.renders(chunk):
                pending.append(Future())
                pending[-1].set_result(here.convert(chunk))
            else:
                pending.append(crew.submit(chunk))
            if len(pending) >= crew.size * CHUNKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        crew.close()


class _Crew:
    """Worker processes, and one thread per worker that waits for its answers.

    A worker starts when a chunk is submitted and fewer than `size` workers run.
    """

    def __init__(self, rules: Rules, size: int) -> None:
        self.size = size
        self._rules = rules
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._started: list[_Worker] = []
        self._threads = ThreadPoolExecutor(size, "tokenize")

    def submit(self, chunk: list[RawRow]) -> "Future[Outcome]":
        if len(self._started) < self.size:
            self._idle.put(self._worker())
        return self._threads.submit(self._convert, chunk)

    def _worker(self) -> "_Worker":
        worker = SPARE.pop() if SPARE else _Worker()
        self._started.append(worker)
        worker.rules = self._rules
        return worker

    def _convert(self, chunk: list[RawRow]) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.convert(chunk)
        except _DiedError as died:
            if died.at_rules:
                raise RunError(f"a process that tokenizes died: {died}") from None
            worker = self._replaced(worker)
            if len(chunk) == 1:
                return _refused(chunk[0], died)
        finally:
            self._idle.put(worker)
        # One row of the chunk ended the process. Converting them one by one tells which.
        return _together(self._convert([row]) for row in chunk)

    def _replaced(self, worker: "_Worker") -> "_Worker":
        worker.close()
        self._started.remove(worker)
        return self._worker()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._started:
            if KEEP_SPARE and worker.answers:
                SPARE.append(worker)
            else:
                worker.close()
        self._threads.shutdown(wait=True)


def _refused(row: RawRow, died: "_DiedError") -> Outcome:
    bad = BadRow("process_died", f"the process that rendered it died of it: {died}")
    place = (row.number, 0, identified(row), row.file, row.line)
    return Outcome(1, [], [Refusal(*place, bad.reason, bad.detail)])


def _together(parts: Iterable[Outcome]) -> Outcome:
    whole = Outcome(0, [], [])
    for part in parts:
        whole = Outcome(
            whole.rows + part.rows,
            whole.pieces + part.pieces,
            whole.refusals + part.refusals,
            whole.unread + part.unread,
            whole.remarks + part.remarks,
        )
    return whole


class _DiedError(Exception):
    """A worker process ended by itself. at_rules: it ended while it read the rules, before any row."""

    def __init__(self, text: str, at_rules: bool) -> None:
        super().__init__(text)
        self.at_rules = at_rules


class _Worker:
    """A process that converts one chunk after another. Pickles travel over its pipes only.

    Attributes:
        rules: rules to send before the next chunk, or None when the process has them already.
        answers: every request is answered, so the process can be used again with other rules.
    """

    def __init__(self) -> None:
        search = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "extractor.rows.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.rules: Rules | None = None
        self.answers = True

    def convert(self, chunk: list[RawRow]) -> Outcome:
        """Raises UsageError for rules that cannot be used, and _DiedError when the process ended."""
        # The rules are sent here, in the worker's own thread: a pipe's buffer is smaller than they
        # are, so the write waits for the process.
        if self.rules is not None:
            refusal = self._asked(self.rules, at_rules=True)
            if refusal is not None:
                raise UsageError(refusal)
            self.rules = None
        return self._asked(chunk, at_rules=False)

    def _asked(self, what: Any, at_rules: bool) -> Any:
        to, back = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self.answers = False
        try:
            pickle.dump(what, to, pickle.HIGHEST_PROTOCOL)
            to.flush()
            answer = pickle.load(back)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            raise _DiedError(self._end(), at_rules) from None
        self.answers = True
        return answer

    def _end(self) -> str:
        """How the process ended, in words.

        Raises:
            RunError: SIGKILL or SIGTERM ended it, which no template does.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(STOP_SECONDS)
            if code in (-signal.SIGKILL, -signal.SIGTERM):
                raise RunError(
                    f"a process that tokenizes was killed by signal {-code} (out of memory, "
                    "perhaps: --workers takes fewer)"
                )
            if code == -signal.SIGVTALRM:
                return "it took too long in one step"
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        return "it answers no more"

    def close(self) -> None:
        """Kill the process, also in the middle of a chunk: it holds nothing but memory."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(STOP_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast(IO[bytes], pipe).close()


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.data) if isinstance(row.data, bytes) else row.size
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
