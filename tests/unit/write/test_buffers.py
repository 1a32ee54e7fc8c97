"""Host buffers, without a GPU: what CUDA would be asked to lock and unlock, and how much there is at a
time."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from extractor import pages
from extractor.errors import RunError
from extractor.write import buffers as ring
from extractor.write.buffers import HostBuffer, HostRing, PageLock


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


class Runtime:
    """CUDA's two functions, which refuse what overlaps; a call takes a while, as theirs does.

    Attributes:
        most: bytes locked at a time.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.wrong: list[str] = []
        self.unlocked = self.most = 0
        self.seconds_to_unlock = 0.0005

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if any(address < at + n and at < address + size for at, n in list(self.locked.items())):
            self.wrong.append("locked twice")
        self.locked[address] = size
        self.most = max(self.most, sum(list(self.locked.values())))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        time.sleep(self.seconds_to_unlock)  # others have the interpreter meanwhile
        if not is_mapped(address):
            self.wrong.append("unmapped before it was unlocked")
        if self.locked.pop(address, None) is None:
            self.wrong.append("not locked")
        self.unlocked += 1
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return fake


def never() -> None:
    pass


class NoRoom(Exception):
    pass


def take(buffers: HostRing, nbytes: int) -> HostBuffer | None:
    """A buffer if the ring has one now."""
    asked = []

    def once() -> None:
        if asked:
            raise NoRoom
        asked.append(1)

    try:
        return buffers.acquire(nbytes, once)
    except NoRoom:
        return None


def soon(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)
    return done()


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_are_unlocked_before_they_are_unmapped(runtime: Runtime, shared: bool) -> None:
    """And never more of them are locked than the bound lets: a larger batch's memory is gone before the
    next one's is asked for."""
    slot = 1 << 20
    buffers = HostRing(slot, 3, pinned=True, shared=shared)
    threads: list[threading.Thread] = []

    def use(buffer: HostBuffer) -> None:
        time.sleep(0.0005)
        buffers.release(buffer)

    for number in range(90):
        # A long sample takes the slots' place; some would fit beside one, some come one after the other.
        size = slot + number * 16384 if number % 9 in (2, 3, 7) else slot
        buffer = buffers.acquire(size, never)
        if number % 2:  # a batch that is copied at once, and one that is not at all
            buffer.wait_until_locked()
        threads.append(threading.Thread(target=use, args=(buffer,)))
        threads[-1].start()
        del buffer
    for thread in threads:
        thread.join()
    assert not runtime.wrong
    assert runtime.unlocked >= 20 and slot < runtime.most <= 3 * slot
    buffers.close()
    assert not runtime.locked and not runtime.wrong and buffers.shared_bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_buffers_stay_within_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and longer batches at any time take what was announced, or one batch larger than that does
    alone; and whoever gives all back gets any size."""
    monkeypatch.setattr(ring, "WAIT_SECONDS", 0)
    slot, slots, random = 1000, 4, Random(seed)
    buffers, held = HostRing(slot, slots, pinned=False), []
    beside = 0
    for _ in range(400):
        size = random.choice([1, 500, slot, slot, slot, 1500, 2500, 4000, 9000])
        if (buffer := take(buffers, size)) is not None:
            assert buffer.nbytes == len(buffer.tensor) >= size
            held.append(buffer)
        total = sum(each.nbytes for each in held)
        assert total <= slot * slots or len(held) == 1
        beside += len({each.nbytes > slot for each in held}) == 2
        while held and random.random() < 0.4:
            buffers.release(held.pop(random.randrange(len(held))))
    assert beside > 10  # a longer batch does not wait for all others
    for buffer in held:
        buffers.release(buffer)
    for size in (9000, slot, 4000):
        buffers.release(buffers.acquire(size, never))
    assert all(take(buffers, slot) is not None for _ in range(slots))
    assert take(buffers, 1) is None


def test_the_next_buffer_is_locked_while_this_one_is_filled(runtime: Runtime) -> None:
    buffers = HostRing(1 << 20, 3, pinned=True)
    buffers.make_one_ready()
    assert soon(lambda: len(runtime.locked) == 1)
    held = []
    for ready in (2, 3, 3):
        held.append(buffers.acquire(1 << 20, never))
        held[-1].wait_until_locked()
        assert soon(lambda: len(runtime.locked) == ready)  # noqa: B023
    for buffer in held:
        buffers.release(buffer)
    assert len(runtime.locked) == 3


def test_all_buffers_can_be_locked_beforehand(runtime: Runtime) -> None:
    """And are given back when a longer batch takes their place."""
    slot = 1 << 20
    buffers = HostRing(slot, 3, pinned=True)
    buffers.make_ready(5)
    buffers.wait_until_ready()
    assert len(runtime.locked) == 3 and buffers.private_bytes == 3 * slot
    held = [buffers.acquire(slot, never) for _ in range(3)]
    assert take(buffers, 1) is None and len(runtime.locked) == 3
    for buffer in held:
        buffers.release(buffer)
    del buffer, held
    longer = buffers.acquire(3 * slot, never)
    longer.wait_until_locked()
    assert list(runtime.locked.values()) == [3 * slot] and buffers.private_bytes == 3 * slot
    buffers.release(longer)
    assert not runtime.wrong


def test_who_releases_does_not_wait_for_what_is_unlocked(runtime: Runtime) -> None:
    """Slots that a longer batch takes the place of; or no process would hear of its next files."""
    buffers = HostRing(1 << 16, 4, pinned=True)
    slots = [buffers.acquire(1 << 16, never) for _ in range(3)]
    for buffer in slots[1:]:
        buffers.release(buffer)
    runtime.seconds_to_unlock = 0.5
    acquiring = threading.Thread(target=buffers.acquire, args=(3 << 16, never))
    acquiring.start()
    assert soon(lambda: buffers._bytes == 4 << 16)
    begun = time.perf_counter()
    buffers.release(slots[0])
    assert time.perf_counter() - begun < 0.25 and acquiring.is_alive()
    acquiring.join()
    runtime.seconds_to_unlock = 0.0
    assert not runtime.wrong


def test_pages_that_cannot_be_locked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    buffers = HostRing(1 << 16, 2, pinned=True)
    buffer = buffers.acquire(1 << 16, never)
    with pytest.raises(RunError, match=r"cannot lock .*out of memory.*smaller --batch-tokens"):
        buffer.wait_until_locked()
    buffers.release(buffer)
    buffers.close()
    assert runtime.unlocked == 0


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_there_is_not(shared: bool) -> None:
    buffers = HostRing(1 << 60, 1, pinned=False, shared=shared)
    with pytest.raises(RunError, match=r"no host memory for a buffer of .*smaller --batch-tokens"):
        buffers.acquire(1, never)


def test_what_is_locked_is_held(runtime: Runtime) -> None:
    """Or they could be unmapped before they are unlocked."""
    memory = pages.anonymous(1 << 16)
    pages_of = weakref.ref(memory)
    lock = PageLock(memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
    lock.wait()
    del memory
    gc.collect()
    assert pages_of() is not None
    lock.undo()
    del lock
    gc.collect()
    assert pages_of() is None and not runtime.wrong and runtime.unlocked == 1


ENDS_WHILE_LOCKING = """
import sys, torch
from extractor.write.buffers import HostRing
class Runtime:
    def cudaHostRegister(self, *_): return 0
    cudaHostUnregister = cudaHostRegister
torch.cuda.cudart, torch.cuda.check_error = Runtime, lambda code: None
torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
buffers = HostRing(256 << 20, 2, pinned=True)
buffers.make_one_ready()
sys.exit(75)
"""


def test_a_process_may_end_while_pages_are_locked() -> None:
    """By its own exit code: a thread in PyTorch's code that the interpreter ends aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_LOCKING], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (75, "")
