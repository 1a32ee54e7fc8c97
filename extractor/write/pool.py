"""Worker processes that write files, and the one thread that keeps all of them busy.

There is one thread for all, because a thread that waits for an answer releases the interpreter lock and
then has to wait for it again. With a thread per process this wait costs more than the work for a file.
"""

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from extractor.files import Durability
from extractor.layouts.safetensors import Framed
from extractor.write.buffers import HostRing
from extractor.write.child import LOOK_SECONDS, File
from extractor.write.order import Order, Outcome
from extractor.write.process import END_SECONDS, Command, Parcel, WriterProcess, command

logger = logging.getLogger(__name__)
START_SECONDS = 60.0

# A process holds up to DEPTH parcels, so that it has the next one while its last answer is on the way.
# A parcel of more than SMALL bytes is sent only to an idle process: a socket may not hold it, and then
# this thread, which serves all processes, would block until the process reads it.
DEPTH, SMALL = 2, 64 << 10


class Processes:
    """A pool of worker processes that grows while orders wait.

    Args:
        layout: what is in a file.
        ring: its slots hold the states of every batch that is put here.
        durability: what is forced to disk before a file counts as written.
        first, most: how many processes there are in the beginning, and at most.
        go_on: called before each order; once it is False the other orders are settled with nothing done.
        settle: called with the outcome of each order. It must not wait for the disk, because no process
            gets its next order during the call.
        decline: called with an order when there is no process at all; it must have the order written.
        fail: called with the error when a process has ended, and with an error of the thread itself.
        command: see process.py.

    Raises OSError or RuntimeError when the system gives no descriptor or no thread.
    """

    def __init__(
        self,
        layout: Framed,
        ring: HostRing,
        durability: Durability,
        first: int,
        most: int,
        *,
        go_on: Callable[[], bool],
        settle: Callable[[Order, Outcome], None],
        decline: Callable[[Order], None],
        fail: Callable[[BaseException], None],
        command: Command = command,
    ) -> None:
        self._layout, self._ring = layout, ring
        self._durability: Durability = durability
        self._wanted, self._most, self._command = first, most, command
        self._go_on, self._settle, self._decline, self._fail = go_on, settle, decline, fail
        self._parcels: deque[Parcel] = deque()
        self._processes: list[WriterProcess] = []
        self._closing = False
        self._looked = time.monotonic()
        self._changed = threading.Condition()  # the number of processes, or of ready ones, changes
        self._settled = threading.Event()  # set once all orders are settled after drain()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="worker-processes", daemon=True)
        try:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            raise

    @property
    def size(self) -> int:
        """How many processes there are, or are about to be."""
        return self._wanted

    @property
    def pids(self) -> list[int]:
        """Process ids of the worker processes that exist."""
        return [process.pid for process in list(self._processes)]

    def put(self, orders: Iterable[Order]) -> None:
        """Queue orders. Their batches must lie in slots of the ring."""
        self._parcels.extend([self._parcel(order) for order in orders])
        self._look_up()

    def grow(self) -> None:
        """Add a process when orders wait and there are fewer than `most`."""
        if not self._parcels:
            return
        with self._changed:
            self._wanted = min(self._wanted + 1, self._most)
        self._look_up()

    def wait_until_ready(self) -> None:
        """Wait until all processes that are wanted are started and ready to write."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    all(p.ready for p in self._processes) and len(self._processes) == self._wanted
                )
            )

    def drain(self) -> None:
        """Wait until all orders are settled; the processes begin to end. Nothing may be put after it."""
        self._closing = True
        self._look_up()
        self._settled.wait()

    def close(self) -> None:
        """drain(), then wait until the processes have ended. Nothing may be called after it."""
        self.drain()
        self._thread.join()
        os.close(self._wake)

    def _parcel(self, order: Order) -> Parcel:
        slot = order.staged.buffer.slot
        assert slot is not None
        files: list[File] = []
        for number, sample, path in order.files:
            before, after = self._layout.frame(sample)
            files.append((os.fsencode(path), before, order.staged.places(number), after))
        return Parcel(slot, self._ring.oldest_slot, files, self._durability, order)

    def _look_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        # This thread starts the processes, because the kernel kills a worker process when the thread
        # that started it ends (PR_SET_PDEATHSIG in child.py).
        try:
            while True:
                self._start_those_wanted()
                self._hand_out()
                if self._closing and not self._parcels and not self._is_writing():
                    self._settled.set()
                    break
                self._hear()
                self._look_after_them()
        except BaseException as error:  # reported, so that the writer knows that the pool is gone
            self._fail(error)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            for process in self._processes:
                process.hang_up()
            end = time.monotonic() + END_SECONDS
            for process in self._processes:
                process.join(max(end - time.monotonic(), 0.0))
            left = [*self._parcels, *(parcel for p in self._processes for parcel in p.parcels)]
            for parcel in left:  # there are some only after an error
                self._settle(parcel.order, Outcome([]))
            self._parcels.clear()
        finally:  # even after an error, so that drain() returns
            self._settled.set()
            with self._changed:
                self._processes.clear()
                self._wanted = 0
                self._changed.notify_all()
            self._selector.close()

    def _is_writing(self) -> bool:
        return any(process.parcels for process in self._processes)

    def _start_those_wanted(self) -> None:
        if self._closing and not self._parcels:
            return
        while len(self._processes) < self._wanted:
            try:
                process = WriterProcess(self._command)
            except OSError as error:
                logger.warning("no more writer processes (%s): %s", error, self._make_do())
                return
            self._processes.append(process)
            self._selector.register(process, selectors.EVENT_READ, process)

    def _hand_out(self) -> None:
        while self._parcels:
            parcel = self._parcels[0]
            if not parcel.files or not self._go_on():
                self._settle(parcel.order, Outcome([]))
            elif not self._processes and not self._wanted:
                self._decline(parcel.order)
            elif (process := self._free_for(parcel)) is not None:
                self._send(process, parcel)
            else:
                return
            self._parcels.popleft()

    def _send(self, process: WriterProcess, parcel: Parcel) -> None:
        try:
            process.send(parcel)
        except OSError as error:
            if not isinstance(error, ConnectionError):  # the slot's descriptor cannot be sent
                error.filename = error.filename or os.fsdecode(parcel.files[0][0])
                self._fail(error)
            self._settle(parcel.order, Outcome([], self._lose(process)))

    def _free_for(self, parcel: Parcel) -> WriterProcess | None:
        """The ready process with the fewest parcels that can take this one; None when none can."""
        depth = DEPTH if parcel.inline <= SMALL else 1
        free = [p for p in self._processes if p.ready and len(p.parcels) < depth]
        return min(free, key=lambda process: len(process.parcels), default=None)

    def _hear(self) -> None:
        """Wait for answers or for new orders, at most LOOK_SECONDS, and handle them."""
        for key, _ in self._selector.select(LOOK_SECONDS):
            if key.data is None:
                os.eventfd_read(self._wake)
            elif key.data in self._processes:
                self._hear_from(key.data)

    def _hear_from(self, process: WriterProcess) -> None:
        try:
            outcome = process.receive()
        except (EOFError, OSError):
            self._lose(process)
            return
        if outcome is not None:
            self._settle(process.parcels.popleft().order, outcome)
            return
        with self._changed:
            self._changed.notify_all()

    def _look_after_them(self) -> None:
        """Remove the processes that have ended, and those that do not become ready in START_SECONDS.

        The connection does not always tell that a process has ended, because another child of this
        process may hold its other end open."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for process in list(self._processes):
            late = not process.ready and now - process.began > START_SECONDS
            if late or process.has_ended():
                self._lose(process)

    def _lose(self, process: WriterProcess) -> Exception | None:
        """Remove a process that has ended or cannot be used, and settle its orders.

        Returns the error that says how it ended; None when it was never ready, which is no failure of
        the run because the others go on without it."""
        error = process.how_it_ended() if process.ready else None
        self._selector.unregister(process)
        with self._changed:
            self._processes.remove(process)
        rest = self._make_do()
        process.hang_up()
        process.join(0.0)
        if error is None:
            logger.warning("a writer process did not start: %s", rest)
            return None
        self._fail(error)
        for parcel in process.parcels:
            self._settle(parcel.order, Outcome([], error))
        return error

    def _make_do(self) -> str:
        """Start no more processes. Returns a phrase for the log that says who writes from here on."""
        with self._changed:
            self._wanted = self._most = len(self._processes)
            self._changed.notify_all()
        return f"{self._wanted} go on" if self._wanted else "threads write instead"
