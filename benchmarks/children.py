"""Programs that a benchmark starts: each ends in time, with all that it started."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

# What torchrun logs of itself.
NOISE = re.compile(r"[IWE]\d{4} |\[rank\d+\]:\[W|=+$|-+$|\*+$")


class Failed(Exception):
    """What a child did wrong, in one line; its log has the rest."""


@dataclass(frozen=True)
class Deadline:
    """When a part must be over; one clock for all that it starts."""

    end: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.0)


class Child:
    """A program under way, its output in a file. The environment is inherited as it is: variables that
    keep NVLink multicast off on a shared machine must reach every rank."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self.begun = time.monotonic()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
                    ),
                    # torchrun would choose the same, with a banner.
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def pids(self) -> dict[int, str]:
        """All its processes, by id, with what tells each from a later one of the same id."""
        return descendants(self._process.pid)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, deadline: Deadline) -> int:
        """Its exit code. Raises Failed when it takes too long, and ends it and all that it started."""
        try:
            return self._process.wait(timeout=deadline.left)
        except subprocess.TimeoutExpired:
            self.end()
            raise Failed(
                f"did not end within {time.monotonic() - self.begun:.0f} s: {last_words(self.text)}"
            ) from None

    def end(self) -> None:
        """torchrun starts its ranks in sessions of their own, so each is ended by its id."""
        processes = self.pids
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until = Deadline.after(5)
        while alive(processes) and until.left:
            time.sleep(0.1)
        for pid in alive(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def torchrun(ranks: int, *command: str) -> list[str]:
    return [*TORCHRUN, str(ranks), *command]


def run(command: Sequence[str], log: Path, deadline: Deadline, codes: Sequence[int] = (0,)) -> str:
    """Its output. Raises Failed for an exit code that is not among codes."""
    child = Child(command, log)
    try:
        code = child.wait(deadline)
    except BaseException:
        child.end()
        raise
    if code not in codes:
        raise Failed(f"exit code {code}: {last_words(child.text)}")
    return child.text


def last_words(text: str) -> str:
    """The line of a log that most likely says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not NOISE.match(line)]
    for line in lines:
        if line.startswith("extractor: "):
            return line[:300]
    named = [line for line in lines if "Error" in line.split(" ", 3)[0] or "Error: " in line]
    named = [line for line in named if "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1][:300]


def last_json(
    text: str, wanted: Callable[[dict[str, Any]], bool] = lambda _: True
) -> dict[str, Any] | None:
    """The last line that is a JSON object and wanted, whatever libraries print after it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if wanted(found):
                return found
    return None


def _stat(pid: int) -> tuple[int, str, str] | None:
    """Parent, state and start time of a process, or None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[0], fields[19]


def descendants(pid: int) -> dict[int, str]:
    """A process and all below it: id to start time."""
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(stat[0], []).append(int(entry.name))
            started[int(entry.name)] = stat[2]
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        if each in started and each not in found:
            found[each] = started[each]
            waiting += children.get(each, [])
    return found


def alive(processes: dict[int, str]) -> list[int]:
    """Those that still run; a zombie does not, nor does another process with an old one's id."""
    running: list[int] = []
    for pid, started in processes.items():
        stat = _stat(pid)
        if stat and stat[2] == started and stat[1] not in "ZX":
            running.append(pid)
    return running


def rank_of(pid: int) -> int | None:
    """The rank that torchrun gave a process, or None for one that it did not start."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
    return ranks[0] if ranks else None
