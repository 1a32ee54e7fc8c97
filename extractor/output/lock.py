"""One job at a time for a row of an output folder, and for its preparation.

Byte-range locks of one small file: byte r stands for row r, so that two jobs of an array run side by
side whatever their shard counts, and two that would write the same row do not. The kernel lets go of
them when a process ends, however it ends; over NFS the server does when the client's lease is over.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path

from extractor.errors import RunError, UsageError
from extractor.printable import printable

LOCK = ".lock"
ALL_ROWS = 1 << 61
_ALONE = 1 << 61  # the byte past all rows
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Locks of one process. The file stays open until the process ends, for closing any descriptor
    of it would let all of them go."""

    def __init__(self, output: Path, warn: Callable[[str], None]) -> None:
        self._made = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
        self._path, self._warn = output / LOCK, warn
        self._useless = False
        self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(self._path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise RunError(
                f"{printable(str(self._path))}: is a FIFO or a device, no regular file: remove it"
            )

    def undo(self) -> None:
        """Nothing came of it: leave no folder that was not there before, unless it is in use."""
        if self._made:
            with contextlib.suppress(OSError):
                if all(entry.name == LOCK for entry in self._path.parent.iterdir()):
                    self._path.unlink()
                    self._path.parent.rmdir()

    def rows(self, begin: int, end: int) -> None:
        """Rows begin to end are this process's from now on. Raises UsageError when another has one."""
        if not self._take(begin, end - begin):
            raise UsageError(
                f"--output {self._path.parent}: another run is writing it now "
                f"({self._path} is locked, on {socket.gethostname()} or another machine); "
                "wait for it, or choose another --output"
            )

    @contextlib.contextmanager
    def alone(self, why: str, while_waiting: Callable[[], None] = lambda: None) -> Generator[None]:
        """Within, no other job of the folder is: for the preparation of rows and for what all jobs
        write. Waits for as long as another holds it; while_waiting may raise, to give up."""
        said = False
        while not self._take(_ALONE, 1):
            if not said:
                self._warn(f"another job of this folder is {why}: waiting for it")
                said = True
            while_waiting()
            time.sleep(0.2)
        try:
            yield
        finally:
            if not self._useless:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _ALONE)

    def _take(self, begin: int, length: int) -> bool:
        if self._useless:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, begin)
            while os.fstat(self._descriptor).st_nlink == 0:  # its last holder undid it meanwhile
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, begin)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self._useless = True
            self._warn(
                f"{self._path}: this filesystem has no locks ({error.strerror}): nothing keeps a "
                "second run out of this folder"
            )
        return True
