"""What a writer's loop measures of itself: waits, memory, and how far it was at which time."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from extractor.write.buffers import HostRing
from extractor.write.writer import Writer

PAGE = os.sysconf("SC_PAGE_SIZE")


class Timeline:
    """How far a replica was at which time, for run.json and the report's picture: a light list.

    It keeps at most `most` points, evenly spread: when there are more, every other one goes, and from
    then on only half as many are taken. The last one is always kept."""

    FIELDS = ("seconds", "tokens", "bytes", "data", "disk", "model")

    def __init__(self, most: int = 200) -> None:
        self._most, self._every = most, 0.0
        self._points: list[tuple[float, ...]] = []
        self._last: tuple[float, ...] | None = None

    def note(self, seconds: float, tokens: int, nbytes: int, *waits: float) -> None:
        """All counts since the start; waits for data, disk and the model, in seconds."""
        self._last = (round(seconds, 3), tokens, nbytes, *(round(wait, 3) for wait in waits))
        if self._points and seconds - self._points[-1][0] < self._every:
            return
        self._points.append(self._last)
        if len(self._points) >= self._most:
            self._points = self._points[::2]
            self._every = max(2 * self._every, 2 * seconds / self._most)

    @property
    def points(self) -> list[list[float]]:
        """Points in order, each with FIELDS."""
        tail = [self._last] if self._last and self._last not in self._points[-1:] else []
        return [list(point) for point in [*self._points, *tail]]


@dataclass(slots=True)
class Waits:
    """Seconds of the loop, by what it waited for: the next batch, a host buffer that is being written
    to disk, or the model: launching it, and a buffer that it has yet to fill.

    launching: the part of `model` in which this thread launched passes, or stood in that because the
    device's queue was full."""

    data: float = 0.0
    disk: float = 0.0
    model: float = 0.0
    launching: float = 0.0

    @property
    def by_kind(self) -> dict[str, float]:
        return {"data": self.data, "disk": self.disk, "model": self.model}

    def most(self) -> str:
        return max(
            ("data", self.data), ("disk", self.disk), ("the model", self.model), key=_second
        )[0]


def resident_bytes(process: int | str = "self") -> int:
    """Of a process, without what it shares, such as prepared samples that it maps. OSError when it is
    gone."""
    _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


@dataclass(slots=True)
class HostMemory:
    """A writer's resident memory in bytes.

    Attributes:
        bound: the most that `most` may be over `before` (Budget.host_bytes); on a CPU the model's own
            comes on top.
        before: of the process without its buffers: libraries, and what the model left there.
        most: of the process, with its buffers and writer processes, at any batch since.
    """

    bound: int
    before: int
    most: int = 0

    def look(self, ring: HostRing, writer: Writer) -> None:
        nbytes = resident_bytes() + ring.shared_bytes
        for pid in writer.pids:
            with contextlib.suppress(OSError):  # it is gone
                nbytes += resident_bytes(pid)
        self.most = max(self.most, nbytes)


def _second(pair: tuple[str, float]) -> float:
    return pair[1]
