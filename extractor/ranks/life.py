"""How one process finds out whether another one on the same machine has ended."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Life:
    """Identifies a process, so that a rank on the same machine can tell that it has ended.

    Attributes:
        note: JSON values: the host name with the PID namespace, the process id, and the start time in
            clock ticks. The start time tells a process from a later one with the same id.
    """

    note: list[Any]

    @classmethod
    def own(cls) -> "Life":
        """Of this process."""
        space = f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
        return cls([space, os.getpid(), _began(os.getpid())])

    def is_over(self, note: list[Any]) -> bool:
        """Whether the process of another's note has ended. False for one in another PID namespace or on
        another machine, which cannot be seen from here."""
        space, pid, began = note
        return space == self.note[0] and _began(pid) != began

    def end(self, note: list[Any]) -> None:
        """Kill the process of a note, if it is in this PID namespace and has not ended."""
        space, pid, began = note
        if space == self.note[0] and began and _began(pid) == began:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _began(pid: int) -> int:
    """When a process began, in clock ticks since boot (proc(5): field 22, starttime).

    0 when the process has ended, even if its parent has not waited for it (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
