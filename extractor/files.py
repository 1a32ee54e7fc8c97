"""A file that appears whole or not at all: written under a temporary name, then renamed.

Little is imported, because a worker process starts with this: the standard library, a hash, msgspec.
"""

import contextlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import xxhash

TEMPORARY = ".tmp"

# Bytes and parts that are hashed, and then written while a core's cache still has them (Linux takes 1024
# parts).
PIECE, MOST_PARTS = 256 << 10, 64
Durability = Literal["none", "file", "group"]

# Jobs of an array write run.json's kin and rejects.jsonl from several machines, and processes come and
# go: names of temporary files must differ between all of them.
_PROCESS = secrets.token_hex(4)
_COUNTER = itertools.count()
_MADE = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{8,}}(?:-[0-9a-f]+)?{re.escape(TEMPORARY)}")


class Written(NamedTuple):
    """What the journal says of a file: its size and the xxh3-64 of its bytes, in hex."""

    size: int
    xxh3: str


class Pending(NamedTuple):
    """A whole file that has no name yet: written under a temporary one."""

    temporary: str
    path: str
    written: Written

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    def sync(self) -> None:
        """Force its bytes to disk. Raises OSError with the file's name."""
        sync_path(self.temporary, named=self.path)

    def commit(self) -> Written:
        """Give it its name. Raises OSError with the file's name; the temporary file is gone then."""
        try:
            os.rename(self.temporary, self.path)
        except OSError as error:
            self.discard()
            raise _named(error, self.path) from None
        return self.written

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


def write_pending(
    path: str | Path, parts: Sequence[bytes | memoryview], sync: bool = False
) -> Pending:
    """Write parts, flat bytes each, one after the other to a temporary name beside path.

    Raises OSError with path's name; the temporary file is gone then."""
    path = os.fspath(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(
        folder, f".{name}.{_PROCESS}{os.getpid():x}-{next(_COUNTER):x}{TEMPORARY}"
    )
    digest = xxhash.xxh3_64()
    size = 0
    try:
        descriptor = _create(temporary)
        try:
            for piece in _pieces(parts):
                for part in piece:
                    digest.update(part)
                size += _write_all(descriptor, piece)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _named(error, path) from None
    return Pending(temporary, path, Written(size, digest.hexdigest()))


def write_whole(path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> Written:
    """write_pending and commit in one: the final name never shows less than the whole file. With
    sync the bytes are on the disk before the rename.

    Raises OSError with the file's name; the temporary file is gone then.
    """
    return write_pending(path, parts, sync).commit()


def write_files(
    files: Sequence[tuple[str, Sequence[bytes | memoryview]]],
    durability: Durability,
    go_on: Callable[[], bool],
) -> tuple[list[Pending], OSError | None]:
    """Write several (path, parts), as far as it gets: those written, and the error of the next one.

    Each has its name then, and in mode "file" is on disk with its folder's entry; in mode "group" it
    has neither. go_on() is asked before each file and before it gets its name."""
    done: list[Pending] = []
    try:
        for path, parts in files:
            if not go_on():
                break
            pending = write_pending(path, parts, sync=durability == "file")
            if durability != "group":
                if not go_on():
                    pending.discard()
                    break
                pending.commit()
            if durability == "file":
                sync_path(pending.folder)
            done.append(pending)
    except OSError as error:
        return done, error
    return done, None


def sync_path(path: str | Path, named: str | Path | None = None) -> None:
    """fsync a file, or a folder so that the names in it are on disk. Raises OSError with its name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _named(error, named or path) from None


def _named(error: OSError, path: str | Path) -> OSError:
    """The same error, saying which file of the user's it is about, not which temporary name."""
    error.filename, error.filename2 = str(path), None
    return error


def made_for(name: str) -> str | None:
    """The file that a temporary file of this name was to become, or None when write_pending makes no
    such name."""
    found = _MADE.fullmatch(name)
    return found["name"] if found else None


def sweep_temporaries(folder: Path, names: Container[str]) -> int:
    """Remove what writers that were killed left of the files of these names in one folder; how many
    there were.

    Those of other files stay: another job of an array may be writing them."""
    count = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(".") and entry.name.endswith(TEMPORARY)):
                continue
            if entry.name[1:].removesuffix(TEMPORARY).rpartition(".")[0] in names:
                with contextlib.suppress(FileNotFoundError):
                    Path(entry.path).unlink()
                    count += 1
    return count


def sweep_temporaries_of(path: Path) -> None:
    """Remove what killed writers left of one file that nobody else writes now."""
    for temporary in path.parent.glob(f".{path.name}.*{TEMPORARY}"):
        temporary.unlink(missing_ok=True)


def _create(path: str) -> int:
    # O_NOFOLLOW and O_EXCL: a planted link or leftover is never written through.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, flags, 0o644)


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """The same bytes in order, about PIECE at a time."""
    piece: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        for at in range(0, len(part), PIECE):
            some = part if len(part) <= PIECE else part[at : at + PIECE]
            piece.append(some)
            size += len(some)
            if size >= PIECE or len(piece) == MOST_PARTS:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> int:
    """How many bytes they are."""
    size = sum(map(len, parts))
    written = os.writev(descriptor, parts)
    if written == size:
        return size
    pending = [memoryview(part) for part in parts]  # a disk that fills takes a part
    while True:
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if not pending:
            return size
        pending[0] = pending[0][written:]
        written = os.writev(descriptor, pending)


def compact_json(value: object) -> bytes:
    """JSON without spaces, of text, whole numbers, lists and dicts; half a surrogate pair, which has no
    UTF-8, as its escape."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def json_line(value: object) -> bytes:
    """One line of JSON, readable, whatever text is in it: half a surrogate pair, which has no UTF-8,
    becomes its JSON escape."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: object) -> None:
    """A small JSON file that appears whole, on disk before it has its name."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    # Half a surrogate pair, as in the name of a file that is not UTF-8, becomes its JSON escape.
    write_whole(path, [text.encode("utf-8", "backslashreplace")], sync=True)
