"""Whether a process is alive, and the same one as before."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Life:
    """How a rank on the same machine can tell that this process has ended: its namespace of process
    numbers, its number, and when it began, by which a number that came again is known."""

    note: list[Any]

    @classmethod
    def own(cls) -> "Life":
        space = f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
        return cls([space, os.getpid(), _began(os.getpid())])

    def is_over(self, note: list[Any]) -> bool:
        """Whether the process of another's note has ended, as far as can be seen from here."""
        space, pid, began = note
        return space == self.note[0] and _began(pid) != began

    def end(self, note: list[Any]) -> None:
        """Kill that process, when it can be seen from here that it is the one of the note."""
        space, pid, began = note
        if space == self.note[0] and began and _began(pid) == began:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _began(pid: int) -> int:
    """When a process began, in clock ticks; 0 when it has ended, waited for by its parent or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
