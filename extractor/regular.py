"""Reading the files of a folder that may be damaged, or made to do harm.

Every reader of an output folder opens its files here. A FIFO, a socket or a device in the place of a
file would make `open` wait for ever or act on a machine, and a link would lead out of the folder: what
is opened here is a regular file, or it is one line that names it.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from extractor.errors import RunError
from extractor.printable import printable

MOST_BYTES = 1 << 30  # of a file that is read as a whole; those of a run hold kilobytes
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """A regular file, open for reading. It never waits, whatever lies there.

    Args:
        follow: let the last part of the path be a link, as in a copy that a hub's cache made.

    Raises:
        FileNotFoundError: there is nothing of this name.
        RunError: there is something else, or it cannot be opened; one line with the path.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        kind = _kind(os.fstat(descriptor).st_mode)
        if kind is not None:
            raise RunError(f"{printable(str(path))}: is {kind}; wanted a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def cannot_read(path: str | Path, error: OSError) -> RunError:
    """One line with the path, what lies there when that is not a file, and the errno."""
    why = f"cannot be read: {error.strerror or error} (errno {error.errno})"
    if error.errno in (errno.ELOOP, errno.ENXIO):
        try:
            kind = _kind(os.lstat(path).st_mode)
        except OSError:
            kind = None
        why = f"is {kind}; wanted a regular file (errno {error.errno})" if kind else why
    return RunError(f"{printable(str(path))}: {why}")


@contextlib.contextmanager
def reading(path: str | Path) -> Generator[None]:
    """Within, an OSError becomes a RunError of one line; path: for one that names no file."""
    try:
        yield
    except OSError as error:
        raise cannot_read(error.filename or path, error) from error


@contextlib.contextmanager
def writing() -> Generator[None]:
    """Within, an OSError becomes a RunError of one line, which names the file that it names."""
    try:
        yield
    except OSError as error:
        name = printable(str(error.filename))
        raise RunError(f"cannot write {name}: {error.strerror} (errno {error.errno})") from error


def _kind(mode: int) -> str | None:
    """What a file is when it is not a regular one."""
    if stat.S_ISREG(mode):
        return None
    return next((name for is_it, name in _KINDS if is_it(mode)), "no regular file")


def read_regular(path: str | Path, *, follow: bool = False, most: int = MOST_BYTES) -> bytes:
    """All of a file. Raises what open_regular raises, and RunError for one of more than `most` bytes."""
    with open_regular(path, follow=follow) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most:
            raise RunError(f"{printable(str(path))}: has {size:,} bytes; at most {most:,} are read")
        with reading(path):
            return handle.read(most)


def map_regular(path: str | Path, access: int, *, follow: bool = False) -> mmap.mmap:
    """A file mapped as a whole, which costs nothing until it is touched; access: mmap's.

    Raises what open_regular raises, and RunError for an empty file, which cannot be mapped."""
    with open_regular(path, follow=follow) as handle:
        try:
            return mmap.mmap(handle.fileno(), 0, access=access)
        except ValueError as error:
            raise RunError(f"{printable(str(path))}: is empty") from error
        except OSError as error:
            raise cannot_read(path, error) from error
