"""What one row may cost. A row beyond it is rejected by name; memory and time stay flat.

Bytes are bounded where rows are read. Rendering runs in worker processes (work.py), for a chat
template is a program of its own: it may loop for ever, or double a text until memory is gone. A
worker gives each row seconds of CPU, and itself an address space. What Python cannot interrupt (a
power of huge numbers, say) the kernel ends, and with it the worker: work.py tells which row it was.
"""

import resource
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from extractor.rows.records import BadRow

ROW_BYTES = 16 << 20  # of a record as it is read: ids and mask of a million tokens are 10 MB
TEXT_BYTES = 4 << 20  # of a rendered row, or more where the model's context is longer
BYTES_PER_TOKEN = 8
ROW_SECONDS = 15.0  # of CPU; the longest rows take about five
PROBE_SECONDS = 5.0  # of CPU, for each short conversation that a template is learned from
WORKER_BYTES_PER_BYTE = 384  # of address space, beyond what the worker has when it begins; the

# longest rows take 250, of many tokens
Guard = Callable[[float], AbstractContextManager[None]]


class _Late(BaseException):
    """No template can catch it, and no `except Exception` of ours."""


@contextmanager
def unbounded(_: float) -> Generator[None]:
    """For a process that runs templates of its own. Raises BadRow ("too_large")."""
    try:
        yield
    except MemoryError:
        raise too_much_memory() from None


@contextmanager
def cpu_bounded(seconds: float) -> Generator[None]:
    """At most so many seconds of CPU in this process, whose main thread this is; after three times
    as many, in code that cannot be interrupted, the process dies of SIGVTALRM.

    Raises:
        BadRow: "too_slow", or "too_large" when memory ran out.
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
    """Raises BadRow for a text of more than so many bytes of UTF-8."""
    length = (
        len(text)
        if text.isascii() or len(text) > most
        else len(text.encode("utf-8", "surrogatepass"))
    )
    if length > most:
        raise BadRow("too_large", f"{length:,} bytes when it is rendered: the most are {most:,}")


def most_text(context_length: int) -> int:
    """Bytes of UTF-8 that a rendered row may have."""
    return max(TEXT_BYTES, BYTES_PER_TOKEN * context_length)


def bound_memory(text_bytes: int) -> None:
    """Give this process as much more as the longest row may need. text_bytes: of that row."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + WORKER_BYTES_PER_BYTE * text_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
