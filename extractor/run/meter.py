"""What a writer's loop measures of itself: waits, memory, and how far it was at which time."""

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extractor.progress import ProgressLine
from extractor.write.buffers import HostRing
from extractor.write.writer import Writer

PAGE = os.sysconf("SC_PAGE_SIZE")
LOOK_SECONDS = 0.25  # between looks at memory


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


class Meter:
    """What a writer's loop spends its time on, for run.json and for the progress line.

    Args:
        memory: told at some of many short steps to look.
        line: moved on at every step.
    """

    def __init__(
        self, writer: Writer, ring: HostRing, memory: HostMemory, line: ProgressLine
    ) -> None:
        self._writer, self._ring, self._memory, self._line = writer, ring, memory, line
        self._waits, self._timeline = Waits(), Timeline()
        self._looked = -LOOK_SECONDS
        self._began, self._begun = time.time(), time.perf_counter()
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Generator[None]:
        mark = time.perf_counter()
        yield
        self._waits.data += time.perf_counter() - mark

    @contextlib.contextmanager
    def waiting_for_a_buffer(self) -> Generator[None]:
        """For the disk, while there was something to write; else for the model to fill one."""
        mark, before = time.perf_counter(), self._writer.busy_seconds()
        yield
        waited, busy = time.perf_counter() - mark, self._writer.busy_seconds() - before
        self._waits.disk += min(waited, busy)
        self._waits.model += max(waited - busy, 0.0)

    @contextlib.contextmanager
    def launching(self) -> Generator[None]:
        mark = time.perf_counter()
        yield
        launched = time.perf_counter() - mark
        self._waits.model += launched
        self._waits.launching += launched

    def step(self) -> None:
        """After each batch, and after the last of them is written."""
        at, done, waits = self._since_begin(), self._writer.progress, self._waits
        if at - self._looked > LOOK_SECONDS:
            self._looked = at
            self._memory.look(self._ring, self._writer)
        self._timeline.note(at, done.tokens, done.bytes, waits.data, waits.disk, waits.model)
        self._line.set(
            done.tokens,
            lambda: f"{done.bytes / at / 1e9:.2f} GB/s, waits for {waits.most()}",
        )

    def stop(self) -> None:
        """All is written."""
        self._seconds = self._since_begin()

    def close(self) -> None:
        self._line.close()

    def report(self) -> dict[str, Any]:
        """What run.json says of the loop, once it has stopped."""
        progress, waits = self._writer.progress, self._waits
        return {
            "began": round(self._began, 3),
            "seconds": round(self._seconds, 3),
            "samples": progress.samples,
            "rejected": progress.rejected,
            "tokens": progress.tokens,
            "bytes": progress.bytes,
            "tokens_per_second": round(progress.tokens / self._seconds, 1),
            "waits": {name: round(value, 3) for name, value in waits.by_kind.items()},
            "launching": round(waits.launching, 3),
            "landing": round(progress.wait_seconds, 3),
            "writing": round(progress.write_seconds, 3),
            "host_memory": asdict(self._memory),
            "timeline": self._timeline.points,
        }

    def _since_begin(self) -> float:
        return time.perf_counter() - self._begun
