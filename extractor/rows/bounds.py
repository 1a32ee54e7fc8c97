"""Limits on the CPU time and the memory of one row. A row that exceeds them is rejected by name.

The bytes of a record are bounded where rows are read. Rendering runs in worker processes (work.py),
because a chat template is a program: it may loop for ever, or double a text until memory runs out.
A worker gives each row a number of CPU seconds, and limits its own address space. Python cannot
interrupt some operations (a power of huge numbers, for example). The kernel then ends the worker,
and work.py finds out which row caused it.
"""

import resource
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from extractor.rows.records import BadRow

# Bytes of a record as it is read: ids and mask of a million tokens are about 10 MB.
ROW_BYTES = 16 << 20
# Bytes of UTF-8 of a rendered row; BYTES_PER_TOKEN raises it for a model with a long context.
TEXT_BYTES = 4 << 20
BYTES_PER_TOKEN = 8
# CPU seconds of one row; the longest rows take about five.
ROW_SECONDS = 15.0
# CPU seconds of each short conversation from which a template is learned.
PROBE_SECONDS = 5.0
# Bytes of address space per byte of rendered text, beyond what the worker has when the limit is set.
# The rows with the most tokens take about 250.
WORKER_BYTES_PER_BYTE = 384
# A context manager that limits the CPU seconds of what runs inside it.
Guard = Callable[[float], AbstractContextManager[None]]


class _Late(BaseException):
    """The CPU seconds of a row are used up.

    It is a BaseException, so that neither a template nor an `except Exception` catches it.
    """


@contextmanager
def unbounded(_: float) -> Generator[None]:
    """A Guard without a time limit. Raises BadRow ("too_large") when memory runs out."""
    try:
        yield
    except MemoryError:
        raise too_much_memory() from None


@contextmanager
def cpu_bounded(seconds: float) -> Generator[None]:
    """Allow at most this many CPU seconds inside the context. Call it from the main thread only.

    SIGPROF raises an exception when the seconds are used up. Code that cannot be interrupted goes
    on, and after three times as many seconds SIGVTALRM ends the process.

    Raises:
        BadRow: "too_slow", or "too_large" when memory runs out.
    """
    signal.signal(signal.SIGPROF, _raise_late)
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * seconds)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Late:
        raise BadRow(
            "too_slow", f"not rendered in {seconds:g} seconds: the chat template may not end on it"
        ) from None
    except MemoryError:
        raise too_much_memory() from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _raise_late(_number: int, _frame: FrameType | None) -> None:
    raise _Late


def too_much_memory() -> BadRow:
    return BadRow(
        "too_large",
        "rendering it takes more memory than any row may: the chat template may print it many "
        "times, or grow a text without end",
    )


def too_many_bytes(what: str) -> BadRow:
    return BadRow("too_large", f"a {what} of more than {ROW_BYTES >> 20} MiB")


def check_length(text: str, most: int) -> None:
    """Raises BadRow for a text of more than `most` bytes of UTF-8."""
    length = (
        len(text)
        if text.isascii() or len(text) > most
        else len(text.encode("utf-8", "surrogatepass"))
    )
    if length > most:
        raise BadRow("too_large", f"{length:,} bytes when it is rendered: the most are {most:,}")


def most_text(context_length: int) -> int:
    """How many bytes of UTF-8 a rendered row may have; context_length is in tokens."""
    return max(TEXT_BYTES, BYTES_PER_TOKEN * context_length)


def bound_memory(text_bytes: int) -> None:
    """Limit this process to its present address space and what the longest row may need.

    Args:
        text_bytes: bytes of the longest rendered row.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + WORKER_BYTES_PER_BYTE * text_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
