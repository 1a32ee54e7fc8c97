"""The parent's side of a worker process, which writes files from memory that both processes map.

A thread makes about a dozen system calls and hashes per file, and after each it waits for the
interpreter lock that other threads hold, above all the one that launches kernels. A process has an
interpreter of its own. Only the path, the bytes before and after the states, and the place of the
states are sent to it.

The process ends when its connection closes. The kernel kills it when its parent dies, because another
run may then write to the same folder. It ignores the signals that ask the parent to drain.
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
    """The command line of a worker process.

    -P keeps Python from importing modules from the current folder.

    descriptor: of its connection. parent: process id of this process."""
    program = "import sys; from extractor.write.child import main; main(*map(int, sys.argv[1:]))"
    return [sys.executable, "-P", "-c", program, str(descriptor), str(parent)]


class Parcel(NamedTuple):
    """An order in the form in which a worker process gets it.

    Attributes:
        slot: the buffer that holds the states.
        oldest: the smallest number of a slot that exists (see child.Request).
        files: see child.File.
        durability: see write_files.
        order: the order that this parcel is made from.
    """

    slot: SharedSlot
    oldest: int
    files: list[File]
    durability: Durability
    order: Order

    @property
    def inline(self) -> int:
        """About how many bytes the request takes on the socket."""
        return sum(len(before) + len(after) for _, before, _, after in self.files)


class WriterProcess:
    """A worker process and the parcels that were sent to it; it answers them in their order.

    Raises OSError when the system cannot start the process."""

    def __init__(self, command: Command = command) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno(), os.getpid()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the parent's process group does not reach it
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))},
            )
            self._socket = ours.dup()  # sends the descriptors of slots
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
        """The descriptor to select on: it is readable when the process has answered or has ended."""
        return self._connection.fileno()

    def send(self, parcel: Parcel) -> None:
        """Send a parcel, and the slot's descriptor when the process does not have it yet.

        Raises ConnectionError when the process has ended and OSError when the descriptor cannot be
        sent; after either the process cannot be used."""
        slot, oldest, files = parcel.slot, parcel.oldest, parcel.files
        fresh = slot.number not in self._known
        request = Request(slot.number, slot.nbytes, fresh, oldest, parcel.durability, files)
        self._connection.send_bytes(self._encode(request))
        # The process maps a slot once and keeps it, so the descriptor is sent only the first time.
        if fresh:
            socket.send_fds(self._socket, [DESCRIPTOR], [slot.descriptor])
            self._known = {number for number in self._known if number >= oldest} | {slot.number}
        self.parcels.append(parcel)

    def receive(self) -> Outcome | None:
        """Read the next message. It is the outcome of the oldest parcel, which the caller removes and
        settles, or None for the first message, which says that the process is ready.

        Raises EOFError or OSError when the process has ended."""
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
        """Whether the process has ended and all its answers are read.

        The connection alone may not tell, because another child of this process may hold its other end
        open."""
        return self._process.poll() is not None and not self._connection.poll(0)

    def how_it_ended(self) -> RunError:
        """The error that names the exit code or the signal of a process that has ended."""
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
        """Close the connection, which ends the process."""
        self._connection.close()
        self._socket.close()

    def join(self, seconds: float = END_SECONDS) -> None:
        """Wait until the process has ended; kill it when that takes longer than `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
