"""Host buffers for batches in flight.

They are pinned (page-locked) for CUDA, worker processes can map them, and their total size has a
bound."""

import itertools
import mmap
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from extractor import pages
from extractor.errors import RunError
from extractor.pages import GIB

WAIT_SECONDS = 0.2  # seconds between the calls of check() while acquire() waits for a buffer


class SharedSlot(NamedTuple):
    """A buffer that worker processes can map.

    Attributes:
        number: unique in its ring; it is never used again, not even after the slot is closed.
        descriptor: file descriptor of its memory.
        nbytes: its size in bytes.
    """

    number: int
    descriptor: int
    nbytes: int


class HostBuffer:
    """Memory for a batch's states.

    Attributes:
        tensor: the memory, uint8 [nbytes].
        slot: how worker processes find the memory; None when it is private to this process.
    """

    def __init__(self, nbytes: int, pinned: bool, number: int | None = None) -> None:
        """Allocate the memory, and start to pin it when asked.

        number: the slot number of a shared buffer; None for a private one. Raises OSError or
        RuntimeError when there is no memory."""
        self.nbytes = nbytes
        self.slot: SharedSlot | None = None
        self._lock: PageLock | None = None
        if number is None and not pinned:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
            return
        if number is None:
            memory = pages.anonymous(nbytes)
        else:
            memory, descriptor = pages.shared(nbytes)
            self.slot = SharedSlot(number, descriptor, nbytes)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            self._lock = PageLock(memory, self.tensor.data_ptr())

    def wait_until_locked(self) -> None:
        """Wait until the buffer is pinned, which is needed before anything is copied into it.

        Raises RunError when CUDA cannot lock its pages."""
        if self._lock is not None:
            self._lock.wait()

    def close(self) -> None:
        """Give the memory back, which takes a while when it is pinned.

        The caller makes sure that nobody reads or writes it. A mapping that another process still has
        keeps no memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        slot, self.slot = self.slot, None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.undo()
        if slot is not None:
            pages.give_back(slot.descriptor)


class PageLock:
    """Pins memory for CUDA in a thread of its own.

    The system has to allocate the pages and fill them with zeros. For a large batch this takes as
    long as a pass of a small model, which can run at the same time.

    PyTorch's own pinned allocator is not used because it rounds the size up to the next power of two,
    which can be twice the bound of the run."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory, self._address = memory, address
        self._runtime: Any = torch.cuda.cudart()
        self._device = torch.cuda.current_device()
        self._error: BaseException | None = None
        # It is no daemon thread, because a process that exits while one is in PyTorch's code aborts.
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="page-lock")
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no more threads, so the caller's thread pins it
            self._thread = None
            self._run()

    def wait(self) -> None:
        """Wait until the memory is pinned. Raises RunError when CUDA refuses."""
        self._join()
        if self._error is not None:
            raise RunError(
                f"CUDA cannot lock {len(self._memory) / GIB:.2f} GiB of host memory "
                f"({self._error}): use a smaller --batch-tokens or --host-memory"
            ) from self._error

    def undo(self) -> None:
        """Unpin the memory. This must happen before the pages are unmapped: otherwise the memory that
        is mapped at the same address next cannot be pinned."""
        self._join()
        if self._error is None:
            torch.cuda.set_device(self._device)
            self._runtime.cudaHostUnregister(self._address)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            # Writing one byte per page makes the system allocate the pages here. Otherwise CUDA does
            # it, and no other thread can launch kernels for that time.
            torch.frombuffer(self._memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
            # Without this the first CUDA call of a thread makes a context on GPU 0, which may belong
            # to another rank.
            torch.cuda.set_device(self._device)
            size = len(self._memory)
            torch.cuda.check_error(self._runtime.cudaHostRegister(self._address, size, 0))
        except BaseException as error:
            # The frames of a traceback would keep the memory alive.
            self._error = error.with_traceback(None)


class HostRing:
    """Host buffers that are used again and again.

    Most are slots of slot_bytes each. A larger batch (one sample over the token budget) gets a buffer
    of its own. The total is at most slots * slot_bytes, or the bytes of one larger batch, which is
    then the only buffer in flight. One thread acquires buffers; any thread may release them.

    Args:
        slot_bytes: size of a slot in bytes.
        slots: how many slots fit the bound.
        pinned: whether the buffers are pinned for CUDA.
        shared: whether worker processes can map the slots.
    """

    def __init__(self, slot_bytes: int, slots: int, pinned: bool, shared: bool = False) -> None:
        assert slots >= 1 and slot_bytes >= 1
        self.slot_bytes, self.is_shared, self._pinned = slot_bytes, shared, pinned
        self._most_bytes = slots * slot_bytes
        self._bytes = 0  # total size of all buffers, in flight or free
        self._free: list[HostBuffer] = []
        self._in_flight = 0
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._shared_numbers: set[int] = set()

    def acquire(self, nbytes: int, check: Callable[[], None]) -> HostBuffer:
        """A buffer of at least nbytes bytes; waits until there is room for it.

        The buffer may not be pinned yet (see HostBuffer.wait_until_locked). check() is called again
        and again during the wait and may raise, so that the failure of a writer ends the wait. Raises
        RunError when the system has no memory."""
        size = max(nbytes, self.slot_bytes)
        buffer: HostBuffer | None = None
        given_up: list[HostBuffer] = []
        while True:
            check()
            with self._changed:
                if size == self.slot_bytes and self._free:
                    buffer = self._free.pop()
                elif self._fits(size):
                    given_up = self._give_up(size)
                    self._bytes += size
                else:
                    self._changed.wait(WAIT_SECONDS)
                    continue
                self._in_flight += 1
                break
        for each in given_up:  # outside the lock, because it takes a while
            each.close()
        buffer = buffer or self._make(size)
        self.make_one_ready()
        return buffer

    def make_ready(self, count: int) -> None:
        """Add up to `count` free slots while there is room; each is pinned in a thread of its own.

        This is for the time before the first batch, when no batch waits for a slot yet."""
        while count > 0 and self._add_slot():
            count -= 1

    def make_one_ready(self) -> None:
        """Add a free slot when there is none and there is room, so that it is pinned when the next
        batch needs it."""
        if not self._free:
            self._add_slot()

    def wait_until_ready(self) -> None:
        """Wait until all free slots are pinned. Raises RunError when CUDA cannot pin one."""
        for buffer in list(self._free):
            buffer.wait_until_locked()

    def release(self, buffer: HostBuffer) -> None:
        """Take a buffer back. The caller makes sure that nobody reads or writes it."""
        larger = buffer.nbytes > self.slot_bytes
        if larger:  # its memory first, then the room for the next
            buffer.close()
        with self._changed:
            self._in_flight -= 1
            if larger:
                self._bytes -= buffer.nbytes
            else:
                self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Give back the memory of all free slots."""
        with self._changed:
            free, self._free = self._free, []
            self._forget(free)
        for buffer in free:
            buffer.close()

    @property
    def oldest_slot(self) -> int:
        """The smallest number among the shared slots that exist; 0 when there is none."""
        return min(list(self._shared_numbers), default=0)

    @property
    def shared_bytes(self) -> int:
        """Total size in bytes of the slots that worker processes can map."""
        return len(self._shared_numbers) * self.slot_bytes

    @property
    def private_bytes(self) -> int:
        """Total size in bytes of the pinned buffers that worker processes cannot map.

        Only pinned buffers count: they take memory before a batch is in them."""
        return self._bytes - self.shared_bytes if self._pinned else 0

    def _fits(self, size: int) -> bool:
        """Whether a buffer of this size fits, when free slots may be closed for it, or when it is
        the only one in flight."""
        in_flight = self._bytes - len(self._free) * self.slot_bytes
        return not self._in_flight or in_flight + size <= self._most_bytes

    def _give_up(self, size: int) -> list[HostBuffer]:
        """Take out as many free slots as must be closed to make room for `size` bytes."""
        given_up: list[HostBuffer] = []
        while (
            self._free and self._bytes - len(given_up) * self.slot_bytes + size > self._most_bytes
        ):
            given_up.append(self._free.pop())
        self._forget(given_up)
        return given_up

    def _forget(self, slots: list[HostBuffer]) -> None:
        self._bytes -= len(slots) * self.slot_bytes
        self._shared_numbers.difference_update(each.slot.number for each in slots if each.slot)

    def _add_slot(self) -> bool:
        """Add a free slot when there is room. Returns whether there was room."""
        with self._changed:
            if self._bytes + self.slot_bytes > self._most_bytes:
                return False
            self._bytes += self.slot_bytes
        buffer = self._make(self.slot_bytes)
        with self._changed:
            self._free.insert(0, buffer)  # acquire() takes from the end: the oldest is ready first
        return True

    def _make(self, nbytes: int) -> HostBuffer:
        slot = self.is_shared and nbytes == self.slot_bytes
        number = next(self._numbers) if slot else None
        try:
            buffer = HostBuffer(nbytes, self._pinned, number)
        except (OSError, RuntimeError) as error:
            raise RunError(
                f"no host memory for a buffer of {nbytes / GIB:.2f} GiB ({error}): use a smaller "
                "--batch-tokens or --host-memory"
            ) from error
        if number is not None:
            self._shared_numbers.add(number)
        return buffer
