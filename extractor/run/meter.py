"""What a writer's loop measures of itself: its waits, its memory, and its progress over time."""

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
LOOK_SECONDS = 0.25  # the least time between two measurements of memory


class Timeline:
    """The progress of a replica over time, for run.json and the plot in the report.

    It keeps at most `most` points, evenly spread: when there are as many, every other one is removed,
    and from then on points are taken half as often. The last point is always kept."""

    FIELDS = ("seconds", "tokens", "bytes", "data", "disk", "model")

    def __init__(self, most: int = 200) -> None:
        self._most, self._every = most, 0.0
        self._points: list[tuple[float, ...]] = []
        self._last: tuple[float, ...] | None = None

    def note(self, seconds: float, tokens: int, nbytes: int, *waits: float) -> None:
        """Add a point. All values count from the start.

        seconds: the time. tokens, nbytes: what is written. waits: seconds of waiting for data, for the
        disk and for the model, in this order."""
        self._last = (round(seconds, 3), tokens, nbytes, *(round(wait, 3) for wait in waits))
        if self._points and seconds - self._points[-1][0] < self._every:
            return
        self._points.append(self._last)
        # Halving keeps the points evenly spread over the whole time without knowing its length.
        if len(self._points) >= self._most:
            self._points = self._points[::2]
            self._every = max(2 * self._every, 2 * seconds / self._most)

    @property
    def points(self) -> list[list[float]]:
        """Points in order of time, each with the values that FIELDS names."""
        tail = [self._last] if self._last and self._last not in self._points[-1:] else []
        return [list(point) for point in [*self._points, *tail]]


@dataclass(slots=True)
class Waits:
    """Seconds of the loop, by what it waited for.

    Attributes:
        data: the next batch.
        disk: a free host buffer, while a batch that had landed was not yet written.
        model: the launch of passes, and a free host buffer while there was nothing to write.
        launching: the part of `model` in which this thread launched passes, or was blocked in a launch
            because the device's queue was full.
    """

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
    """Resident memory of a process in bytes, from /proc/PID/statm (proc(5)).

    Shared pages, such as those of mapped files, do not count. Raises OSError when there is no such
    process."""
    _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


@dataclass(slots=True)
class HostMemory:
    """A writer's resident memory in bytes.

    Attributes:
        bound: by how much `most` may exceed `before` (Budget.host_bytes); on a CPU the memory of the
            model comes on top.
        before: of the process without its buffers: libraries, and what loading the model leaves.
        most: the largest value that was measured, with buffers and worker processes.
    """

    bound: int
    before: int
    most: int = 0

    def look(self, ring: HostRing, writer: Writer) -> None:
        """Measure, and keep the largest value in `most`."""
        nbytes = resident_bytes() + ring.shared_bytes
        for pid in writer.pids:
            with contextlib.suppress(OSError):  # the process has ended
                nbytes += resident_bytes(pid)
        self.most = max(self.most, nbytes)


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


class Meter:
    """Measures what a writer's loop spends its time on, for run.json and for the progress line.

    Args:
        writer, ring: what the loop uses.
        memory: measured at steps that are at least LOOK_SECONDS apart.
        line: updated at every step.
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
        """Count the time within as a wait for data."""
        mark = time.perf_counter()
        yield
        self._waits.data += time.perf_counter() - mark

    @contextlib.contextmanager
    def waiting_for_a_buffer(self) -> Generator[None]:
        """Count the time within as a wait for the disk while there is something to write, and otherwise
        as a wait for the model to fill a buffer."""
        mark, before = time.perf_counter(), self._writer.busy_seconds()
        yield
        waited, busy = time.perf_counter() - mark, self._writer.busy_seconds() - before
        self._waits.disk += min(waited, busy)
        self._waits.model += max(waited - busy, 0.0)

    @contextlib.contextmanager
    def launching(self) -> Generator[None]:
        """Count the time within as the launch of a pass."""
        mark = time.perf_counter()
        yield
        launched = time.perf_counter() - mark
        self._waits.model += launched
        self._waits.launching += launched

    def step(self) -> None:
        """Add a point to the timeline and update the progress line. It is called after each batch, and
        again when the last one is written."""
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
        """End the measured time; it is called when all is written."""
        self._seconds = self._since_begin()

    def close(self) -> None:
        self._line.close()

    def report(self) -> dict[str, Any]:
        """The loop's record for run.json. stop() must come before it."""
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
