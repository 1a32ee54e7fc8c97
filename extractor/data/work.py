"""Chunks of rows through a Converter: in this process for few, in a pool of processes for many."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from extractor.data.rows import RawRow
from extractor.data.sample import Converter, Outcome, Rules
from extractor.errors import RunError

CHUNK_ROWS = 64
CHUNK_BYTES = 1 << 20
IN_PROCESS_ROWS = 2000  # starting processes costs seconds: as long as so many rows take
CHUNKS_AHEAD = 4  # per worker: enough that none waits, few enough that memory stays flat


def outcomes(rows: Iterator[RawRow], converter: Converter, workers: int) -> Iterator[Outcome]:
    """What becomes of each chunk, in the order of the rows.

    Raises:
        RunError: a worker process died.
    """
    first = list(islice(rows, IN_PROCESS_ROWS + 1))
    if len(first) <= IN_PROCESS_ROWS or workers < 2:
        yield from map(converter.convert, _chunks(chain(first, rows)))
    else:
        yield from _in_pool(_chunks(chain(first, rows)), converter.rules, workers)


def _in_pool(chunks: Iterator[list[RawRow]], rules: Rules, workers: int) -> Iterator[Outcome]:
    # Spawned, not forked: this process may have threads and CUDA, and a fork of either can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (rules,))
    pending: deque[Future[Outcome]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_convert, chunk))
            if len(pending) >= workers * CHUNKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process that tokenizes died (out of memory, perhaps: --workers takes fewer)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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


# ---- in a worker process

_converter: Converter | None = None


def _start(rules: Rules) -> None:
    global _converter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _converter = Converter(rules)


def _convert(chunk: list[RawRow]) -> Outcome:
    assert _converter is not None
    return _converter.convert(chunk)
