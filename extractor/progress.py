"""What a person sees: one line that moves on a terminal, plain lines now and then elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from extractor.printable import printable
from extractor.terminal import ignoring_lost_stream, readable

PLAIN_SECONDS = 20.0


def say(text: str) -> None:
    """A line for the person who started the run, on stderr, beside any progress line. Control
    characters in it are escaped; of several lines all but the first are indented."""
    with ignoring_lost_stream():
        tqdm.write(readable(text), file=sys.stderr)
        sys.stderr.flush()


class ProgressLine:
    """Counts up to total; `describe` gives the words that follow the numbers."""

    def __init__(self, what: str, total: int | None, unit: str, quiet: bool = False) -> None:
        self._terminal = sys.stderr.isatty()
        self._what, self._total, self._unit = printable(what), total, unit
        self._count, self._begun, self._last = 0, time.monotonic(), time.monotonic()
        self._bar: Any = tqdm(
            total=total,
            desc=self._what,
            unit=unit,
            unit_scale=True,
            disable=quiet or not self._terminal,
            dynamic_ncols=True,
            file=sys.stderr,
        )
        self._quiet = quiet

    def set(self, count: int, describe: Callable[[], str] | None = None) -> None:
        delta, self._count = count - self._count, count
        if self._quiet:
            return
        if self._terminal:
            words = printable(describe()) if describe else None
            with ignoring_lost_stream():
                if words is not None:
                    self._bar.set_postfix_str(words, refresh=False)
                self._bar.update(delta)
        elif time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            self._plain(describe() if describe else "")

    def _plain(self, words: str) -> None:
        elapsed = max(time.monotonic() - self._begun, 1e-9)
        rate = self._count / elapsed
        text = f"{self._what}: {self._count:,}"
        if self._total:
            text += f" of {self._total:,} {self._unit}s ({self._count / self._total:.0%})"
            if rate:
                text += f", {(self._total - self._count) / rate:,.0f} s left"
        say(f"{text}, {rate:,.0f} {self._unit}s/s{', ' if words else ''}{words}")

    def close(self) -> None:
        with ignoring_lost_stream():
            self._bar.close()


def size(count: float) -> str:
    """Bytes as people say them: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    hours, rest = divmod(math.ceil(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
