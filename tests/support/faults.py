"""Faults to put into a run: a disk that fails at the n-th byte or call, a slow one, a rank that
raises, hangs, stops or dies at the n-th batch, a clock.

A Fault is data, so that it travels to a rank on another process's command line; install() puts the
ones of a rank in place there.
"""

import contextlib
import ctypes
import errno as codes
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "raise",  # the pass raises
    "hang",  # the pass never ends
    "stop",  # the whole process stands still (SIGSTOP), threads too
    "kill",  # the process dies at once
    "slow_pass",  # each pass takes seconds
    "slow_load",  # loading takes seconds
    "slow_import",  # importing SGLang takes seconds, in each process once
    "load_in_c",  # loading never ends, in C code, where no signal handler of Python's runs
    "slow_prepare",  # tokenizing takes seconds
    "os_error",  # a system call on a path fails
    "os_kill",  # the process dies inside a system call, which did a part of its work
    "slow_os",  # a system call on a path takes seconds
    "stale",  # folders whose path contains `path` look empty, as to an old cache of NFS
    "processes",  # writer processes, as on a GPU; faults of files happen in them
    "nan",  # states of the token `at` are not a number
    "log_fsync",  # note what was forced to disk, for power_cut()
]
CALLS = ("write", "writev", "fsync", "open", "rename")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    Attributes:
        kind: what happens.
        rank: to whom; None for every rank.
        restart: in which life of the group (torchrun's restart count); None for all.
        at: before pass number `at` of this rank, or at system call number `at`, from 0.
        byte: for writes instead of `at`: the call that would pass this many bytes writes up to there
            and the next one fails, as a full disk does.
        call, path: which system calls, on paths that contain this.
        errno: what they fail with.
        seconds: of the slow ones.
    """

    kind: Kind
    rank: int | None = None
    restart: int | None = 0
    at: int = 0
    byte: int | None = None
    call: str = "writev"
    path: str = ""
    errno: int = codes.ENOSPC
    seconds: float = 0.0


# Every rank writes through processes, as with a GPU.
PROCESSES = Fault(kind="processes", restart=None)


def to_json(faults: Sequence[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


def from_json(text: str) -> list[Fault]:
    return [Fault(**value) for value in json.loads(text)]


class Faults:
    """A rank's faults, put in place.

    Args:
        log: for log_fsync.
        parent: of a writer process, the rank that dies with it.
    """

    def __init__(
        self, faults: Sequence[Fault], log: Path | None = None, parent: int | None = None
    ) -> None:
        self._dies = [pid for pid in (parent, os.getpid()) if pid is not None]
        rank = int(os.environ.get("RANK", "0"))
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._faults = [
            fault
            for fault in faults
            if fault.rank in (None, rank) and fault.restart in (None, restart)
        ]
        self._log = log
        self._counts: dict[Fault, int] = {}
        self._patch()

    def before_pass(self, number: int) -> None:
        for fault in self._faults:
            if fault.kind == "slow_pass":
                time.sleep(fault.seconds)
            if fault.at != number:
                continue
            if fault.kind == "raise":
                raise ValueError(f"injected at pass {number}")
            if fault.kind == "hang":
                while True:
                    time.sleep(0.1)
            if fault.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def poison(self) -> list[int]:
        """Tokens whose states are not a number."""
        return [fault.at for fault in self._faults if fault.kind == "nan"]

    def on_load(self) -> None:
        self._sleep("slow_load")
        if any(fault.kind == "load_in_c" for fault in self._faults):
            _wait_in_c()

    def on_import(self) -> None:
        self._sleep("slow_import")

    def on_prepare(self) -> None:
        self._sleep("slow_prepare")

    def _sleep(self, kind: Kind) -> None:
        for fault in self._faults:
            if fault.kind == kind:
                time.sleep(fault.seconds)

    # System calls -----------------------------------------------------------------------------

    def _patch(self) -> None:
        wanted = {f.call for f in self._faults if f.kind in ("os_error", "os_kill", "slow_os")}
        if any(fault.kind == "log_fsync" for fault in self._faults):
            wanted.add("fsync")
        for call in wanted:
            setattr(os, call, self._wrap(call, getattr(os, call)))
        self._hide([fault.path for fault in self._faults if fault.kind == "stale"])

    def _hide(self, paths: Sequence[str]) -> None:
        listdir, scandir = os.listdir, os.scandir

        def stale(target: Any) -> bool:
            return any(path in _path_of(target) for path in paths)

        if paths:
            os.listdir = lambda target=".": [] if stale(target) else listdir(target)
            os.scandir = lambda target=".": (
                contextlib.nullcontext(iter(())) if stale(target) else scandir(target)
            )

    def _wrap(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = _path_of(target)
            for fault in self._faults:
                if fault.call == call and fault.path in path:
                    short = self._act(fault, call, real, target, args, path)
                    if short is not None:
                        return short
            result = real(target, *args, **kwargs)
            if call == "fsync" and self._log is not None:
                size = os.fstat(target).st_size
                with self._log.open("a") as handle:
                    handle.write(json.dumps([os.fstat(target).st_ino, size]) + "\n")
            return result

        return faulty

    def _act(
        self,
        fault: Fault,
        call: str,
        real: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        path: str,
    ) -> int | None:
        if fault.kind == "slow_os":
            time.sleep(fault.seconds)
        if fault.kind not in ("os_error", "os_kill"):
            return None
        if fault.byte is not None:
            return self._until_byte(fault, real, target, args[0], path)
        count = self._counts.get(fault, 0)
        self._counts[fault] = count + 1
        if fault.kind == "os_kill":
            if count == fault.at:
                if call in ("write", "writev"):
                    half = _joined(args[0])[: len(_joined(args[0])) // 2]
                    real(target, [half] if call == "writev" else half)
                for pid in self._dies:
                    os.kill(pid, signal.SIGKILL)
        elif count >= fault.at:
            raise OSError(fault.errno, os.strerror(fault.errno))
        return None

    def _until_byte(
        self, fault: Fault, real: Callable[..., Any], target: Any, data: Any, path: str
    ) -> int | None:
        written = self._counts.get(fault, 0)
        whole = _joined(data)
        room = (fault.byte or 0) - written
        if room <= 0:
            raise OSError(fault.errno, os.strerror(fault.errno))
        part = whole[:room]
        self._counts[fault] = written + len(part)
        return real(target, [part] if isinstance(data, list) else part)


def _wait_in_c() -> None:
    """As a collective does whose other ranks have gone: a mutex that is locked twice."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _joined(data: Any) -> bytes:
    return b"".join(bytes(part) for part in data) if isinstance(data, list) else bytes(data)


def _path_of(target: Any) -> str:
    if isinstance(target, int):
        try:
            return str(Path(f"/proc/self/fd/{target}").readlink())
        except OSError:
            return ""
    return os.fspath(target)


def power_cut(output: Path, log: Path, choose: Callable[[], float]) -> int:
    """What a power cut leaves of a folder: each file keeps what fsync saw of it for sure, and of the
    rest nothing, zeros or all, as choose() (0 to 1) has it. Returns how many files changed."""
    synced: dict[int, int] = {}
    if log.exists():
        for line in log.read_text().splitlines():
            inode, size = json.loads(line)
            synced[inode] = max(synced.get(inode, 0), size)
    changed = 0
    for path in sorted(output.rglob("*")):
        if path.is_dir() or path.name == ".lock":
            continue
        size, safe = path.stat().st_size, synced.get(path.stat().st_ino, 0)
        fate = choose()
        if safe >= size or fate < 0.3:
            continue
        changed += 1
        with path.open("rb+") as handle:
            if fate < 0.6:
                handle.truncate(safe)
            else:
                handle.seek(safe)
                handle.write(b"\0" * (size - safe))
    return changed


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
