"""From the device to the host without the forward waiting: pinned buffers under a byte budget, a
stream of their own for the copies, and an event that says when a batch has landed.

On the CPU the same code runs with plain buffers and no stream.
"""

import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from extractor import pages
from extractor.layout import Plane, encode, finite_rows, surely_finite_rows
from extractor.records import Batch, CapturedBatch
from extractor.store import Blob

LOOK_SECONDS = 0.2  # how often who waits for a buffer looks whether all is well


class SharedSlot(NamedTuple):
    """A buffer of the ring that writer processes can map.

    Attributes:
        number: no two of a ring have the same one, ever.
        descriptor: of its memory.
        nbytes: of it.
    """

    number: int
    descriptor: int
    nbytes: int


class HostRing:
    """Host buffers for batches in flight: up to `slots` of slot_bytes each, handed out again and again.
    One more than are in use is made ready, so that a batch finds its buffer page-locked.

    A batch larger than a slot (a sample over the token budget) gets a buffer of its own. All together
    take at most slots * slot_bytes, or a larger batch's bytes, which then is alone.

    Args:
        pinned: page-locked, for CUDA.
        shared: writer processes can map the slots (see slot_of).
    """

    def __init__(self, slot_bytes: int, slots: int, pinned: bool, shared: bool = False) -> None:
        assert slots >= 1 and slot_bytes >= 1
        self.slot_bytes, self._pinned, self._shared = slot_bytes, pinned, shared
        self._most_bytes = slots * slot_bytes
        self._bytes = 0  # of buffers in flight and free ones
        self._free: list[torch.Tensor] = []
        self._in_flight = 0
        self._changed = threading.Condition()
        self._shared_slots: dict[int, SharedSlot] = {}
        self._locking: dict[int, Future[None]] = {}
        self._numbers = itertools.count()
        self._make_one_ready()

    def acquire(self, nbytes: int, check: Callable[[], None]) -> torch.Tensor:
        """A uint8 buffer of at least nbytes; waits for one to come back.

        A new one may still be being page-locked: wait_until_locked() before anything is written into it.
        check() is called while waiting and may raise, so that a dead writer is noticed."""
        with self._changed:
            while True:
                check()
                buffer = self._large(nbytes) if nbytes > self.slot_bytes else self._slot()
                if buffer is not None:
                    self._in_flight += 1
                    return buffer
                self._changed.wait(LOOK_SECONDS)

    def release(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._in_flight -= 1
            if len(buffer) == self.slot_bytes:
                self._free.append(buffer)
            else:
                self._bytes -= len(buffer)
            self._changed.notify_all()

    def wait_until_locked(self, buffer: torch.Tensor) -> None:
        """Raises RuntimeError (CUDA's) when its pages cannot be locked."""
        locking = self._locking.pop(buffer.data_ptr(), None)
        if locking is not None:
            locking.result()

    def slot_of(self, buffer: torch.Tensor) -> SharedSlot | None:
        """How other processes find a buffer that was handed out; None for one of this process alone."""
        return self._shared_slots.get(buffer.data_ptr())

    @property
    def oldest_slot(self) -> int:
        """The least number of a slot that there is."""
        return min((slot.number for slot in list(self._shared_slots.values())), default=0)

    @property
    def shared_bytes(self) -> int:
        """Of the slots there are now that other processes can map."""
        return len(self._shared_slots) * self.slot_bytes

    def _slot(self) -> torch.Tensor | None:
        self._make_one_ready()
        if not self._free:
            return None
        buffer = self._free.pop()
        self._make_one_ready()
        return buffer

    def _make_one_ready(self) -> None:
        if not self._free and self._bytes + self.slot_bytes <= self._most_bytes:
            self._free.append(self._allocate(self.slot_bytes))

    def _large(self, nbytes: int) -> torch.Tensor | None:
        """In the place of slots that are free. None when what is in flight leaves too little."""
        free = len(self._free) * self.slot_bytes
        if self._in_flight and self._bytes - free + nbytes > self._most_bytes:
            return None
        while self._free and self._bytes + nbytes > self._most_bytes:
            at = self._free.pop(0).data_ptr()
            self._shared_slots.pop(at, None)
            self._locking.pop(at, None)
            self._bytes -= self.slot_bytes
        return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._bytes += nbytes
        slot = self._shared and nbytes == self.slot_bytes
        if not slot and not self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8)
        memory, descriptor = pages.shared(nbytes) if slot else (pages.anonymous(nbytes), -1)
        # An array in between, because it can tell of its end.
        held = np.frombuffer(memory, np.uint8)
        tensor = torch.frombuffer(held, dtype=torch.uint8)
        at = tensor.data_ptr()
        if slot:
            self._shared_slots[at] = SharedSlot(next(self._numbers), descriptor, nbytes)
        if self._pinned:
            lock = PageLock(memory, at)
            # Without it, memory would be unmapped before it is unlocked: numpy 2.5 lets go of it first.
            weakref.finalize(held, lock.undo).atexit = False
            self._locking[at] = lock.future
        return tensor


class PageLock:
    """Memory page-locked for CUDA, in a thread: its pages are found and filled with zeros, which for a
    large batch takes as long as a small model's pass, and that can run meanwhile.

    Locked here, because PyTorch's own allocator takes the next power of two, up to twice what the run's
    bound says."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory, self._address = memory, address
        self._runtime: Any = torch.cuda.cudart()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.future: Future[None] = Future()
        try:
            threading.Thread(target=self._run, name="page-lock", daemon=True).start()
        except RuntimeError:  # the system gives no more
            self._run()

    def _run(self) -> None:
        try:
            # The pages are found here, and not by CUDA, which keeps other threads from launching kernels
            # for as long as it takes.
            torch.frombuffer(self._memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
            self._use_device()
            size = len(self._memory)
            torch.cuda.check_error(self._runtime.cudaHostRegister(self._address, size, 0))
        except BaseException as error:
            self.future.set_exception(error.with_traceback(None))  # whose frames hold the memory
        else:
            self.future.set_result(None)

    def undo(self) -> None:
        """Before the pages are unmapped, or what is mapped there next could not be locked."""
        if self.future.exception() is None:
            self._use_device()
            self._runtime.cudaHostUnregister(self._address)

    def _use_device(self) -> None:
        """Or a thread's first call of CUDA would make a context on GPU 0, whoever's that is."""
        if self._device is not None:
            torch.cuda.set_device(self._device)


@dataclass(eq=False)
class StagedBatch:
    """A batch on its way to, or in, host memory.

    Attributes:
        batch: whose states these are, with its samples.
        planes: in the order of the buffer.
        buffer: uint8; each plane's rows in one piece.
    """

    batch: Batch
    planes: tuple[Plane, ...]
    buffer: torch.Tensor
    _finite: torch.Tensor
    _arrival: Any = None
    _sources: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """Until the bytes are here; then the device's copies are let go."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._sources.clear()

    def let_go(self) -> torch.Tensor:
        """The buffer, of which this holds nothing any more."""
        buffer, self.buffer = self.buffer, torch.empty(0, dtype=torch.uint8)
        self.__dict__.pop("_bytes", None)
        return buffer

    @cached_property
    def _columns(self) -> list[tuple[str, torch.dtype, int, int, int]]:
        """Of each plane: key, dtype, width, bytes of a row, and where its first row is."""
        base, columns = 0, []
        for plane in self.planes:
            columns.append((plane.key, plane.dtype, plane.width, plane.row_bytes, base))
            base += plane.row_bytes * self.batch.num_tokens
        return columns

    @cached_property
    def _bytes(self) -> memoryview:
        return self.buffer.numpy().data

    @cached_property
    def _all_finite(self) -> bool:
        return bool(self._finite.numpy().all())

    def tensor(self, plane: Plane, sequence: int) -> torch.Tensor:
        """One sequence's rows of a plane: a view of the buffer, [T, width] or [T]."""
        blob = self.blobs(sequence)[plane.key]
        return torch.frombuffer(blob.data, dtype=blob.dtype).view(blob.shape)

    def blobs(self, sequence: int) -> dict[str, Blob]:
        """One sequence's rows of every plane, by its key: pieces of the buffer."""
        begin, end = self.batch.offsets[sequence : sequence + 2]
        tokens, held = end - begin, self._bytes
        return {
            key: Blob(
                dtype,
                (tokens, width) if width else (tokens,),
                held[base + begin * size : base + end * size],
            )
            for key, dtype, width, size, base in self._columns
        }

    def places(self, sequence: int) -> list[tuple[int, int]]:
        """Where one sequence's rows of every plane lie in the buffer: offset and bytes."""
        begin, end = self.batch.offsets[sequence : sequence + 2]
        tokens = end - begin
        return [(base + begin * size, tokens * size) for _, _, _, size, base in self._columns]

    def first_bad_token(self, sequence: int) -> tuple[Plane, int] | None:
        """The first token with a value that is not finite, and the plane it is in, if any."""
        if self._all_finite:
            return None
        begin, end = self.batch.offsets[sequence : sequence + 2]
        if bool(self._finite[:, begin:end].all()):
            return None
        good = torch.stack([finite_rows(self.tensor(plane, sequence)) for plane in self.planes])
        bad = (~good).nonzero()
        if not len(bad):
            return None
        plane, token = min(bad.tolist(), key=lambda at: (at[1], at[0]))
        return self.planes[plane], token


class Stager:
    """Sends captured batches to host buffers."""

    def __init__(self, planes: Sequence[Plane], ring: HostRing, device: torch.device) -> None:
        self._planes = tuple(planes)
        self._ring = ring
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def nbytes(self, tokens: int) -> int:
        return tokens * sum(plane.row_bytes for plane in self._planes)

    def stage(self, captured: CapturedBatch, buffer: torch.Tensor) -> StagedBatch:
        """Start the copy into a buffer of nbytes(tokens) or more, and return at once (CUDA), but for a
        buffer's first time."""
        self._ring.wait_until_locked(buffer)
        if self._stream is None:
            return self._copy(captured, buffer)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._copy(captured, buffer)

    @torch.no_grad()
    def _copy(self, captured: CapturedBatch, buffer: torch.Tensor) -> StagedBatch:
        tokens = captured.batch.num_tokens
        encoded = encode(self._planes, captured.states)
        base = 0
        for plane in self._planes:
            size = plane.row_bytes * tokens
            target = buffer[base : base + size].view(plane.dtype).view(plane.shape(tokens))
            target.copy_(encoded[plane.key], non_blocking=True)
            base += size
        finite = torch.stack([surely_finite_rows(encoded[p.key]) for p in self._planes])
        if self._stream is None:
            return StagedBatch(captured.batch, self._planes, buffer, finite)
        host_finite = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
        host_finite.copy_(finite, non_blocking=True)
        arrival = torch.cuda.Event(blocking=True)
        arrival.record(self._stream)
        # Held until the copy is done: their memory belongs to the forward's stream.
        sources = [*captured.states.values(), *encoded.values(), finite]
        return StagedBatch(captured.batch, self._planes, buffer, host_finite, arrival, sources)
