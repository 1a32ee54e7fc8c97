"""How this program writes to a terminal, a pipe or a log.

What it writes may hold ids, paths and texts of other people. Control characters in them are escaped
here, in the one place that everything goes through. A stream that takes no more text ends no run.
"""

import contextlib
import logging
import os
import select
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

from extractor.printable import printable

CONTINUED = "  "


def readable(text: str) -> str:
    """A message as it is shown: every character printable, every line but the first indented.

    This program's own messages may have several lines, such as a table. The indent keeps a line break
    that came with a value from passing for a message of its own."""
    first, *rest = map(printable, text.split("\n"))
    return "\n".join(
        [first, *(line if line.startswith(CONTINUED) else CONTINUED + line for line in rest)]
    )


def complain(text: str) -> None:
    """What went wrong, on stderr, under this program's name."""
    with ignoring_lost_stream():
        print(f"extractor: {readable(text)}", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def ignoring_lost_stream() -> Generator[None]:
    """Within, a stream that cannot be written to (its reader or its terminal is gone, its disk is
    full) is no error: what is told to a person is worth less than the run that tells it."""
    with contextlib.suppress(OSError, ValueError):
        yield


def prepare_streams() -> None:
    """Make stdout and stderr take any text, whatever their encoding is, and log in readable lines."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the program began
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  (open to the end)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore
    handler = logging.StreamHandler()
    handler.setFormatter(_Readable("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


class _Readable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return readable(super().format(record))


def reader_is_gone(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any more, as after `| head`."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False


def discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere, so that the interpreter does not fail on it at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
