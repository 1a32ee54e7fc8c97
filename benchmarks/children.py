"""Programs that a benchmark starts: each ends in time, with all that it started."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

# The variable by which a child's processes are known.
MARK = "EXTRACTOR_BENCHMARK_CHILD"
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL

# What torchrun logs of itself.
NOISE = re.compile(r"[IWE]\d{4} |\[rank\d+\]:\[W|=+$|-+$|\*+$")


class Failed(Exception):
    """What a child did wrong, in one line; its log has the rest."""


class Deadline:
    """When something must be over; one clock for all that it starts. Thread-safe."""

    def __init__(self, end: float) -> None:
        self.end = end

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def cut(self) -> None:
        """It is over now: whoever waits by it gives up, and ends what it started."""
        self.end = min(self.end, time.monotonic())


class Deadlines:
    """Gives deadlines, and cuts all of them when this process is asked to end (SIGTERM, SIGINT): then
    whoever waits by one ends its children, and results so far can be printed. A second signal ends it
    at once. Make one, in the main thread."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._given: list[Deadline] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def after(self, seconds: float) -> Deadline:
        deadline = Deadline.after(seconds)
        self._given.append(deadline)
        if self.asked:
            deadline.cut()
        return deadline

    def _on_signal(self, number: int, _: object) -> None:
        self.asked = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        for deadline in self._given:
            deadline.cut()


def extract(
    model: Path, rows: Path, output: Path, *flags: str, sglang: Sequence[str] = ()
) -> list[str]:
    """This program's command line, for one process."""
    return [
        *(sys.executable, "launch/extract.py", "--model", str(model), "--data", str(rows)),
        *("--output", str(output), *flags, *sglang_flags(sglang)),
    ]


class Child:
    """A program under way, its output in a file, and all that it starts.

    Its processes are those below it and those with its mark, a variable of the environment that every
    one inherits: torchrun's ranks are sessions of their own, and are nobody's children once torchrun
    was killed.

    Args:
        environment: the child's; None for this process's own with this repository's modules. Variables
            that keep NVLink multicast off on a shared machine must reach every rank.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.begun = time.monotonic()
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env={
                    **(own_environment() if environment is None else environment),
                    MARK: self._mark.partition("=")[2],
                },
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the benchmark, which ends its children
            )

    @property
    def pids(self) -> dict[int, str]:
        """All its processes, by id, with what tells each from a later one of the same id."""
        return descendants(self._process.pid) | marked(self._mark)

    @property
    def pid(self) -> int:
        return self._process.pid

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
        """Its exit code; what it left behind is ended then. Raises Failed when it takes too long, and
        ends all of it."""
        try:
            while (code := self.code) is None and deadline.left:
                time.sleep(POLL_SECONDS)
        finally:
            self.end()
        if code is None:
            seconds = time.monotonic() - self.begun
            raise Failed(f"did not end within {seconds:.0f} s: {last_words(self.text)}")
        return code

    def end(self) -> None:
        """End what there is of it, with time to tidy up after itself."""
        processes = self.pids
        _signal(alive(processes), signal.SIGTERM)
        until = Deadline.after(GRACE_SECONDS)
        while alive(processes) and until.left:
            time.sleep(POLL_SECONDS)
        # Some may have started others meanwhile.
        until = Deadline.after(GRACE_SECONDS)
        while (left := alive(self.pids | processes)) and until.left:
            _signal(left, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._process.wait()


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def own_environment() -> dict[str, str]:
    """This process's, with this repository's modules, and as many threads as torchrun would give a rank
    (which says so in a banner)."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def sglang_flags(values: Sequence[str]) -> list[str]:
    """KEY=VALUE pairs as the program and the benchmarks take them."""
    return [part for value in values for part in ("--sglang", value)]


def torchrun(ranks: int, *command: str) -> list[str]:
    return [*TORCHRUN, str(ranks), *command]


def run(command: Sequence[str], log: Path, deadline: Deadline, codes: Sequence[int] = (0,)) -> str:
    """Its output. Raises Failed for an exit code that is not among codes."""
    if not deadline.left:
        raise Failed("no time was left for it")
    child = Child(command, log)
    code = child.wait(deadline)
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


def marked(mark: str) -> dict[int, str]:
    """Processes that inherited a variable, NAME=VALUE: id to start time."""
    wanted, found = mark.encode(), {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # gone, or not ours to look at
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                pid = int(entry.name)
                if stat := _stat(pid):
                    found[pid] = stat[2]
    return found


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
