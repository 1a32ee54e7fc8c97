"""Page-locked buffers, without a GPU: what CUDA would be asked to lock and unlock."""

import gc
import threading
import time
import weakref
from pathlib import Path
from random import Random

import pytest
import torch

from extractor import pages, transfer
from extractor.transfer import HostRing, PageLock


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


class Runtime:
    """CUDA's two functions, which refuse what overlaps; a call takes a while, as theirs does."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.wrong: list[str] = []
        self.unlocked = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if any(address < at + n and at < address + size for at, n in list(self.locked.items())):
            self.wrong.append("locked twice")
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        time.sleep(0.0005)  # others have the interpreter meanwhile
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
    return fake


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_are_unlocked_before_they_are_unmapped(runtime: Runtime, shared: bool) -> None:
    slot = 1 << 20
    ring = HostRing(slot, 3, pinned=True, shared=shared)
    threads: list[threading.Thread] = []

    def use(buffer: torch.Tensor) -> None:
        time.sleep(0.0005)
        ring.release(buffer)

    for number in range(60):
        size = (
            slot + number * 4096 if number % 3 == 2 else slot
        )  # a long sample takes the slots' place
        buffer = ring.acquire(size, never)
        if number % 2:  # a batch that is copied at once, and one that is not at all
            ring.wait_until_locked(buffer)
        threads.append(threading.Thread(target=use, args=(buffer,)))
        threads[-1].start()
        del buffer
    for thread in threads:
        thread.join()
    threads.clear()
    assert not runtime.wrong
    assert runtime.unlocked >= 20


def never() -> None:
    pass


class NoRoom(Exception):
    pass


def take(ring: HostRing, nbytes: int) -> torch.Tensor | None:
    """A buffer if the ring has one now."""
    asked = []

    def once() -> None:
        if asked:
            raise NoRoom
        asked.append(1)

    try:
        return ring.acquire(nbytes, once)
    except NoRoom:
        return None


@pytest.mark.parametrize("seed", range(8))
def test_buffers_stay_within_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and longer batches at any time take what was announced, or one batch larger than that does
    alone; and whoever gives all back gets any size."""
    monkeypatch.setattr(transfer, "LOOK_SECONDS", 0)
    slot, slots, random = 1000, 4, Random(seed)
    ring, held = HostRing(slot, slots, pinned=False), []
    beside = 0
    for _ in range(400):
        size = random.choice([1, 500, slot, slot, slot, 1500, 2500, 4000, 9000])
        if (buffer := take(ring, size)) is not None:
            assert len(buffer) >= size
            held.append(buffer)
        del buffer
        total = sum(map(len, held))
        assert total <= slot * slots or len(held) == 1
        beside += len({len(each) > slot for each in held}) == 2
        while held and random.random() < 0.4:
            ring.release(held.pop(random.randrange(len(held))))
    assert beside > 10  # a longer batch does not wait for all others
    for buffer in held:
        ring.release(buffer)
    held.clear()
    for size in (9000, slot, 4000):
        ring.release(ring.acquire(size, never))
    assert all(take(ring, slot) is not None for _ in range(slots))
    assert take(ring, 1) is None


def test_the_next_buffer_is_locked_while_this_one_is_filled(runtime: Runtime) -> None:
    ring = HostRing(1 << 20, 3, pinned=True)
    held = []
    for ready in (2, 3, 3):
        held.append(ring.acquire(1 << 20, never))
        ring.wait_until_locked(held[-1])
        deadline = time.monotonic() + 10
        while len(runtime.locked) < ready and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(runtime.locked) == ready
    for buffer in held:
        ring.release(buffer)
    assert len(runtime.locked) == 3


def test_pages_that_cannot_be_locked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    ring = HostRing(1 << 16, 2, pinned=True)
    buffer = ring.acquire(1 << 16, never)
    with pytest.raises(RuntimeError, match="out of memory"):
        ring.wait_until_locked(buffer)
    del buffer, ring
    assert runtime.unlocked == 0


def test_what_is_locked_is_held(runtime: Runtime) -> None:
    """The array over the pages may let go of them before it tells of its end, as numpy 2.5's does."""
    memory = pages.anonymous(1 << 16)
    pages_of = weakref.ref(memory)
    lock = PageLock(memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
    lock.future.result()
    del memory
    gc.collect()
    assert pages_of() is not None
    lock.undo()
    del lock
    gc.collect()
    assert pages_of() is None and not runtime.wrong and runtime.unlocked == 1
