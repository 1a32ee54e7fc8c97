"""Host buffers for batches in flight: page-locked for CUDA, mapped by writer processes, and together
within a bound."""

import itertools
import mmap
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from extractor import pages
from extractor.errors import RunError
from extractor.pages import GIB

WAIT_SECONDS = 0.2  # how often who waits for a buffer looks whether all is well


class SharedSlot(NamedTuple):
    """A buffer that writer processes can map.

    Attributes:
        number: no two of a ring have the same one, ever.
        descriptor: of its memory.
        nbytes: of it.
    """

    number: int
    descriptor: int
    nbytes: int


class HostBuffer:
    """Memory for a batch's states.

    Attributes:
        tensor: uint8 [nbytes].
        slot: how other processes find it; None when it is of this process alone.
    """

    def __init__(self, nbytes: int, pinned: bool, number: int | None = None) -> None:
        """number: of a slot to be shared. Raises OSError or RuntimeError when there is no memory."""
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
        """Before anything is copied into it. Raises RunError when its pages cannot be locked."""
        if self._lock is not None:
            self._lock.wait()

    def close(self) -> None:
        """Give the memory back, which takes a while when it is locked. Nobody reads or writes it any
        more; what other processes still map of it holds no memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        slot, self.slot = self.slot, None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.undo()
        if slot is not None:
            pages.give_back(slot.descriptor)


class PageLock:
    """Memory page-locked for CUDA, in a thread: its pages are found and filled with zeros, which for a
    large batch takes as long as a small model's pass, and that can run meanwhile.

    Locked here, because PyTorch's own allocator takes the next power of two, up to twice what the run's
    bound says."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory, self._address = memory, address
        self._runtime: Any = torch.cuda.cudart()
        self._device = torch.cuda.current_device()
        self._error: BaseException | None = None
        # No daemon: a process that ends while such a thread is in PyTorch's code is aborted.
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="page-lock")
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no more
            self._thread = None
            self._run()

    def wait(self) -> None:
        self._join()
        if self._error is not None:
            raise RunError(
                f"CUDA cannot lock {len(self._memory) / GIB:.2f} GiB of host memory "
                f"({self._error}): use a smaller --batch-tokens or --host-memory"
            ) from self._error

    def undo(self) -> None:
        """Before the pages are unmapped, or what is mapped there next could not be locked."""
        self._join()
        if self._error is None:
            torch.cuda.set_device(self._device)
            self._runtime.cudaHostUnregister(self._address)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            # The pages are found here, and not by CUDA, which keeps other threads from launching kernels
            # for as long as it takes.
            torch.frombuffer(self._memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
            # Or a thread's first call of CUDA would make a context on GPU 0, whoever's that is.
            torch.cuda.set_device(self._device)
            size = len(self._memory)
            torch.cuda.check_error(self._runtime.cudaHostRegister(self._address, size, 0))
        except BaseException as error:
            self._error = error.with_traceback(None)  # whose frames hold the memory


class HostRing:
    """Host buffers, handed out again and again: slots of slot_bytes each, and for a larger batch (a
    sample over the token budget) one of its own.

    All together take at most slots * slot_bytes, or a larger batch's bytes, which then is alone. One
    thread acquires; any releases.

    Args:
        pinned: page-locked, for CUDA.
        shared: writer processes can map the slots.
    """

    def __init__(self, slot_bytes: int, slots: int, pinned: bool, shared: bool = False) -> None:
        assert slots >= 1 and slot_bytes >= 1
        self.slot_bytes, self.is_shared, self._pinned = slot_bytes, shared, pinned
        self._most_bytes = slots * slot_bytes
        self._bytes = 0  # of buffers in flight and free ones
        self._free: list[HostBuffer] = []
        self._in_flight = 0
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._shared_numbers: set[int] = set()

    def acquire(self, nbytes: int, check: Callable[[], None]) -> HostBuffer:
        """One of at least nbytes; waits for room. It may still be being page-locked.

        check() is called while waiting and may raise, so that a dead writer is noticed. Raises RunError
        where the system has no memory."""
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
        for each in given_up:  # the ring is not held up meanwhile
            each.close()
        buffer = buffer or self._make(size)
        self.make_one_ready()
        return buffer

    def make_ready(self, count: int) -> None:
        """So many slots, if there is room, each page-locked in a thread of its own: for the time in
        which nothing waits for them yet."""
        while count > 0 and self._add_slot():
            count -= 1

    def make_one_ready(self) -> None:
        """A slot beyond those in use, if there is room, so that the next batch finds it page-locked."""
        if not self._free:
            self._add_slot()

    def wait_until_ready(self) -> None:
        """Until the slots that are free are page-locked. Raises RunError when one cannot be."""
        for buffer in list(self._free):
            buffer.wait_until_locked()

    def release(self, buffer: HostBuffer) -> None:
        """Nobody reads or writes it any more."""
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
        """Give back what is not in use."""
        with self._changed:
            free, self._free = self._free, []
            self._forget(free)
        for buffer in free:
            buffer.close()

    @property
    def oldest_slot(self) -> int:
        """The least number of a slot that there is."""
        return min(list(self._shared_numbers), default=0)

    @property
    def shared_bytes(self) -> int:
        """Of the slots there are now that other processes can map."""
        return len(self._shared_numbers) * self.slot_bytes

    @property
    def private_bytes(self) -> int:
        """Of buffers that they cannot map and that take memory before a batch is in them: page-locked
        ones, once they are."""
        return self._bytes - self.shared_bytes if self._pinned else 0

    def _fits(self, size: int) -> bool:
        """In the place of slots that are free, or alone."""
        in_flight = self._bytes - len(self._free) * self.slot_bytes
        return not self._in_flight or in_flight + size <= self._most_bytes

    def _give_up(self, size: int) -> list[HostBuffer]:
        """Free slots in whose place so much fits."""
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
        """A free one, if there is room; whether there was."""
        with self._changed:
            if self._bytes + self.slot_bytes > self._most_bytes:
                return False
            self._bytes += self.slot_bytes
        buffer = self._make(self.slot_bytes)
        with self._changed:
            self._free.insert(0, buffer)  # those that were made first go first
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
