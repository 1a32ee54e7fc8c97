"""A process that writes files for this one, out of memory that both map.

A file costs a thread about a dozen system calls and hashes, and after each it waits for the interpreter
that the other threads hold, above all the one that launches kernels. A process has an interpreter of its
own; what crosses over is a path, what comes before and after the states, and where they lie.

It ends when its connection does, and is killed when its parent is: by then another run may be writing
the same folder. Signals that ask the parent to drain it ignores.
"""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from extractor.errors import RunError
from extractor.files import Durability, Pending, Written
from extractor.write.buffers import SharedSlot
from extractor.write.child import DESCRIPTOR, READY, Answer, File, Request
from extractor.write.order import Order, Outcome

END_SECONDS = 10.0


Command = Callable[[int, int], list[str]]


def command(descriptor: int, parent: int) -> list[str]:
    """A worker process's command line, from the descriptor of its connection and its parent's number.

    -P: a folder that happens to be the current one is not a place for modules."""
    program = "import sys; from extractor.write.child import main; main(*map(int, sys.argv[1:]))"
    return [sys.executable, "-P", "-c", program, str(descriptor), str(parent)]


class Parcel(NamedTuple):
    """An order as a process gets it.

    Attributes:
        slot: where the states lie.
        oldest: the least number of a slot that there is.
        files: what a file's bytes are, and where.
        order: what it was made of.
    """

    slot: SharedSlot
    oldest: int
    files: list[File]
    durability: Durability
    order: Order

    @property
    def inline(self) -> int:
        """Bytes that it sends along, about."""
        return sum(len(before) + len(after) for _, before, _, after in self.files)


class WriterProcess:
    """A process and what it was told to write, first come first served.

    Raises OSError when the system starts no more."""

    def __init__(self, command: Command = command) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno(), os.getpid()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the group are not for it
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))},
            )
            self._socket = ours.dup()  # for descriptors
            self._connection = Connection(ours.detach())
        self.parcels: deque[Parcel] = deque()
        self.ready, self.began = False, time.monotonic()
        self._known: set[int] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when it has answered, or ended."""
        return self._connection.fileno()

    def send(self, parcel: Parcel) -> None:
        """Raises ConnectionError when the process has ended, OSError when no descriptor can be sent; it
        is of no use then."""
        slot, oldest, files = parcel.slot, parcel.oldest, parcel.files
        fresh = slot.number not in self._known
        request = Request(slot.number, slot.nbytes, fresh, oldest, parcel.durability, files)
        self._connection.send_bytes(self._encode(request))
        if fresh:
            socket.send_fds(self._socket, [DESCRIPTOR], [slot.descriptor])
            self._known = {number for number in self._known if number >= oldest} | {slot.number}
        self.parcels.append(parcel)

    def receive(self) -> Outcome | None:
        """The next answer, of the oldest parcel, whose order the caller settles with it; None when
        the process says that it is ready. Raises EOFError or OSError when it has ended."""
        message = self._connection.recv_bytes()
        if not self.ready:
            if message != READY:
                raise EOFError
            self.ready = True
            return None
        answer = self._decode(message)
        done = [
            Pending(os.fsdecode(temporary), os.fsdecode(path), Written(size, xxh3))
            for (path, *_), (temporary, size, xxh3) in zip(
                self.parcels[0].files, answer.done, strict=False
            )
        ]
        error = None
        if answer.error is not None:
            number, text, path = answer.error
            error = OSError(number, text, os.fsdecode(path))
        return Outcome(done, error, answer.seconds)

    def has_ended(self) -> bool:
        """Its connection may not tell: another child of this process may hold its end open."""
        return self._process.poll() is not None and not self._connection.poll(0)

    def how_it_ended(self) -> RunError:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        how = f" with exit code {code}" if code > 0 else ""
        if code < 0:
            how = f" by signal {-code}" + (", as out of memory does it" if code == -9 else "")
        return RunError(
            f"a writer process ended{how}: what the journal names is kept; start the same command "
            "again"
        )

    def hang_up(self) -> None:
        """Have it end; nothing may be asked of it at the time."""
        self._connection.close()
        self._socket.close()

    def join(self, seconds: float = END_SECONDS) -> None:
        """Wait until it has ended, and end it after that time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
