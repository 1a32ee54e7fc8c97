"""What runs in a writer process (process.py): files out of memory that the parent filled.

Little is imported here, PyTorch above all not, because it starts with every one of them.
"""

import ctypes
import errno
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from extractor.files import Durability, write_files

READY, DESCRIPTOR = b"ready", b"\0"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
LOOK_SECONDS = 1.0

# Path, as the system has it; what comes before the states; (offset, length) of each piece of them in the
# slot; what comes after them.
File = tuple[bytes, bytes, list[tuple[int, int]], bytes]


class Request(msgspec.Struct, array_like=True):
    """Files to write.

    Attributes:
        slot, nbytes: the memory that their pieces lie in; when `follows`, its descriptor comes next.
        oldest: of the slots that are still there; mappings of those before it are let go.
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
        seconds: that it took.
        error: number, text and path of an OSError that ended it.
    """

    done: list[tuple[bytes, int, str]]
    seconds: float = 0.0
    error: tuple[int, str, bytes] | None = None


def main(descriptor: int, parent: int) -> None:
    """Serve requests over an inherited socket until it closes or the parent is gone.

    Signals are the parent's business: a drain wants its writers to the end, whoever asked for it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The thread that started this ends it before itself, so that this is of the parent's death only.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=os.dup(descriptor))  # for descriptors
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
                    slots[request.slot] = _map(channel, request.nbytes)
            except OSError as error:  # what follows in the stream could be anything
                answer = Answer([], error=_described(error, request.files[0][0]))
                connection.send_bytes(encode(answer))
                break
            answer = _write(request, slots[request.slot], parent_lives)
            connection.send_bytes(encode(answer))
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # the parent waits for it, and nothing here needs an orderly end


def _write(request: Request, slot: memoryview, go_on: Callable[[], bool]) -> Answer:
    begun = time.perf_counter()
    files = [
        (os.fsdecode(path), [before, *(slot[at : at + length] for at, length in places), after])
        for path, before, places, after in request.files
    ]
    done, error = write_files(files, request.durability, go_on)
    named = [(os.fsencode(f.temporary), f.written.size, f.written.xxh3) for f in done]
    answer = Answer(named, time.perf_counter() - begun)
    if error is not None:
        answer.error = _described(error, request.files[len(done)][0])
    return answer


def _described(error: OSError, path: bytes) -> tuple[int, str, bytes]:
    return error.errno or errno.EIO, error.strerror or str(error), path


def _map(channel: socket.socket, nbytes: int) -> memoryview:
    """Memory by the descriptor that comes next. Raises OSError when there is none, or no memory."""
    _, descriptors, *_ = socket.recv_fds(channel, len(DESCRIPTOR), 1)
    if not descriptors:  # the system has dropped it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        return memoryview(mmap.mmap(descriptors[0], nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    finally:
        os.close(descriptors[0])
