"""The program of a worker process (process.py): it writes files from memory that the parent filled.

This module imports little, and never PyTorch, because every worker process pays for the imports when
it starts.
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

# Four parts: the path in the encoding of the filesystem, the bytes before the states, the (offset,
# length) in bytes of each piece of the states in the slot, and the bytes after the states.
File = tuple[bytes, bytes, list[tuple[int, int]], bytes]


class Request(msgspec.Struct, array_like=True):
    """Files to write.

    Attributes:
        slot, nbytes: number and size of the slot that holds the states.
        follows: whether the slot's descriptor comes next on the socket.
        oldest: the smallest number of a slot that exists; the process unmaps slots with smaller ones.
        durability: see write_files.
        files: the files, in the order in which they are written.
    """

    slot: int
    nbytes: int
    follows: bool
    oldest: int
    durability: Durability
    files: list[File]


class Answer(msgspec.Struct, array_like=True):
    """The result of a request.

    Attributes:
        done: temporary name, size in bytes and xxh3 hash of each file that was written.
        seconds: how long it took.
        error: number, text and path of the OSError that ended the request early, if any.
    """

    done: list[tuple[bytes, int, str]]
    seconds: float = 0.0
    error: tuple[int, str, bytes] | None = None


def main(descriptor: int, parent: int) -> None:
    """Serve requests over an inherited socket until it closes or the parent is gone.

    The process ignores the signals that ask for an end: the parent handles them, and needs its worker
    processes until it has drained."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The kernel sends the signal when the thread that started this process ends. That thread ends its
    # worker processes before it returns, so the signal comes only when the parent has died.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=os.dup(descriptor))  # receives the descriptors of slots
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
                # Another child of the parent may hold the other end open, so that no end of file comes
                # when the parent dies. The loop therefore asks again whether the parent lives.
                continue
            request = decode(connection.recv_bytes())
            # A mapping of a slot that the parent has closed would be kept for nothing.
            for number in [number for number in slots if number < request.oldest]:
                del slots[number]
            try:
                if request.follows:
                    slots[request.slot] = _map(channel, request.nbytes)
            except OSError as error:  # the position in the stream is unknown, so the process ends
                answer = Answer([], error=_described(error, request.files[0][0]))
                connection.send_bytes(encode(answer))
                break
            answer = _write(request, slots[request.slot], parent_lives)
            connection.send_bytes(encode(answer))
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # the parent waits for this process, and nothing here needs an orderly end


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
    """Map the memory of the descriptor that comes next. Raises OSError when no descriptor comes, or
    when it cannot be mapped."""
    _, descriptors, *_ = socket.recv_fds(channel, len(DESCRIPTOR), 1)
    if not descriptors:  # the system drops it when this process may not open more files
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        return memoryview(mmap.mmap(descriptors[0], nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    finally:
        os.close(descriptors[0])
