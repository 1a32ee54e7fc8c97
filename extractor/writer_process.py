"""A process that writes files for a thread of this one, out of memory that both map.

A file costs a thread about a dozen system calls and hashes, and after each it waits for the interpreter
that the other threads hold, above all the one that launches kernels. A process has an interpreter of its
own; what crosses over is a path, a header and where the states lie.

It ends when its connection does, and is killed when its parent is: by then another run may be writing
the same folder. Signals that ask the parent to drain it ignores.
"""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

import msgspec

from extractor.errors import RunError
from extractor.files import Durability, Pending, Written
from extractor.scribe import LOOK_SECONDS, READY, Answer, File, Piece, Request
from extractor.transfer import SharedSlot

START_SECONDS, END_SECONDS = 60.0, 10.0
# Of what does not lie in a slot, such as ids; more than that is not worth sending.
MOST_INLINE = 1 << 20


class WriterProcess:
    """A process that writes for one thread. Raises OSError when the system starts no more."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno(), os.getpid()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the group are not for it
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))},
            )
            self._connection = Connection(ours.detach())
        self._known: set[int] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    def is_ready(self) -> bool:
        """Wait until it can write; False when it ended instead, or did not come up in time."""
        try:
            return self._connection.poll(START_SECONDS) and self._connection.recv_bytes() == READY
        except (EOFError, OSError):
            return False

    def write(
        self,
        slot: SharedSlot,
        oldest: int,
        files: Sequence[tuple[str, Sequence[bytes | memoryview]]],
        durability: Durability,
    ) -> tuple[list[Pending], OSError | None] | None:
        """As write_files, there; None, and nothing is written, when the files are not of this slot.

        Raises RunError when the process has died."""
        located = _locate(slot, files)
        if located is None:
            return None
        fresh = slot.number not in self._known
        request = Request(slot.number, slot.nbytes, fresh, oldest, durability, located)
        try:
            self._connection.send_bytes(self._encode(request))
            if fresh:
                send_handle(self._connection, slot.descriptor, self._process.pid)
                self._known = {number for number in self._known if number >= oldest} | {slot.number}
            answer = self._decode(self._answer())
        except (EOFError, ConnectionError) as error:
            raise RunError(
                f"a writer process ended{_how(self._process)}: what the journal names is kept; start "
                "the same command again"
            ) from error
        except OSError as error:  # no descriptor left to send one with
            error.filename = error.filename or files[0][0]
            raise
        done = [
            Pending(os.fsdecode(temporary), path, Written(size, xxh3))
            for (path, _), (temporary, size, xxh3) in zip(files, answer.done, strict=False)
        ]
        if answer.error is None:
            return done, None
        number, text, path = answer.error
        return done, OSError(number, text, os.fsdecode(path))

    def _answer(self) -> bytes:
        while not self._connection.poll(LOOK_SECONDS):
            # Not by the connection's end alone: another child of ours may hold the other end open.
            if self._process.poll() is not None and not self._connection.poll(0):
                raise EOFError
        return self._connection.recv_bytes()

    def close(self) -> None:
        """End it; nothing may be asked of it at the time."""
        self._connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def command(descriptor: int, parent: int) -> list[str]:
    """Its command line. -P: a folder that happens to be the current one is not a place for modules."""
    program = "import sys; from extractor.scribe import main; main(*map(int, sys.argv[1:]))"
    return [sys.executable, "-P", "-c", program, str(descriptor), str(parent)]


def _locate(
    slot: SharedSlot, files: Sequence[tuple[str, Sequence[bytes | memoryview]]]
) -> list[File] | None:
    """The same files with the pieces that lie in the slot as places; None when too much does not."""
    inline = 0
    located: list[File] = []
    for path, parts in files:
        pieces: list[Piece] = []
        for part in parts:
            at = _place(part, slot)
            if at is not None:
                pieces.append((at, len(part)))
                continue
            inline += len(part)
            if inline > MOST_INLINE:
                return None
            pieces.append(bytes(part))
        located.append((os.fsencode(path), pieces))
    return located


def _place(part: bytes | memoryview, slot: SharedSlot) -> int | None:
    """Where in the slot it lies, if it does."""
    if isinstance(part, bytes) or part.readonly or not part:
        return None
    # Of the ways to ask for an address the one that takes the least of the interpreter's time.
    at = ctypes.addressof(ctypes.c_char.from_buffer(part)) - slot.address
    return at if at >= 0 and at + len(part) <= slot.nbytes else None


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1)
    except subprocess.TimeoutExpired:
        return ""
    if code < 0:
        return f" by signal {-code}" + (", as out of memory does it" if code == -9 else "")
    return f" with exit code {code}"
