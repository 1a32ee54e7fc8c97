"""What runs in a writer process (writer_process.py): files out of memory that the parent filled.

Little is imported here, PyTorch above all not, because it starts with every one of them.
"""

import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import msgspec

from extractor.files import Durability, write_files

READY = b"ready"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
LOOK_SECONDS = 1.0

Piece = bytes | tuple[int, int]
File = tuple[bytes, list[Piece]]


class Request(msgspec.Struct, array_like=True):
    """Files to write.

    Attributes:
        slot, nbytes: the memory that their pieces lie in; when `follows`, its descriptor comes next.
        oldest: of the slots that are still there; mappings of those before it are let go.
        files: path, as the system has it, and pieces as bytes or as (offset, length) in the slot.
    """

    slot: int
    nbytes: int
    follows: bool
    oldest: int
    durability: Durability
    files: list[File]


class Answer(msgspec.Struct, array_like=True):
    """What came of them.

    Attributes:
        done: temporary name, size and hash of each that was written.
        error: number, text and path of an OSError that ended it.
    """

    done: list[tuple[bytes, int, str]]
    error: tuple[int, str, bytes] | None = None


def main(descriptor: int, parent: int) -> None:
    """Serve requests over an inherited socket until it closes or the parent is gone.

    Signals are the parent's business: a drain wants its writers to the end, whoever asked for it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The thread that started this ends it before itself, so that this is of the parent's death only.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    decode = msgspec.msgpack.Decoder(Request).decode
    encode = msgspec.msgpack.Encoder().encode
    slots: dict[int, memoryview] = {}

    def parent_lives() -> bool:
        return os.getppid() == parent

    try:
        connection.send_bytes(READY)
        while parent_lives():
            if not connection.poll(LOOK_SECONDS):
                continue  # another child of the parent's may hold the other end open
            request = decode(connection.recv_bytes())
            for number in [number for number in slots if number < request.oldest]:
                del slots[number]
            try:
                if request.follows:
                    slots[request.slot] = _map(recv_handle(connection), request.nbytes)
                answer = _write(request, slots[request.slot], parent_lives)
            except OSError as error:  # no descriptor or no memory for the slot
                answer = Answer([], _described(error, request.files[0][0]))
            connection.send_bytes(encode(answer))
    except (EOFError, ConnectionError):
        return


def _write(request: Request, slot: memoryview, go_on: Callable[[], bool]) -> Answer:
    files = [
        (
            os.fsdecode(path),
            [part if isinstance(part, bytes) else slot[part[0] : sum(part)] for part in pieces],
        )
        for path, pieces in request.files
    ]
    done, error = write_files(files, request.durability, go_on)
    answer = Answer([(os.fsencode(f.temporary), f.written.size, f.written.xxh3) for f in done])
    if error is not None:
        answer.error = _described(error, request.files[len(done)][0])
    return answer


def _described(error: OSError, path: bytes) -> tuple[int, str, bytes]:
    return error.errno or errno.EIO, error.strerror or str(error), path


def _map(descriptor: int, nbytes: int) -> memoryview:
    try:
        # The parent has filled these pages: found at once, not one by one as they are read.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return memoryview(mmap.mmap(descriptor, nbytes, flags, mmap.PROT_READ))
    finally:
        os.close(descriptor)
