"""Threads that write files. They work for every layout and on every machine."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from extractor.files import Durability, Pending, write_files
from extractor.layouts import Layout
from extractor.write.order import Order, Outcome


class Threads:
    """A pool of threads that grows while tasks wait.

    Args:
        layout: what is in a file.
        durability: what is forced to disk before a file counts as written.
        first, most: how many threads there are in the beginning, and at most.
        go_on: called before each file; once it is False no more files are written.
        settle: called with the outcome of each order.
        fail: called with an error of a task itself.
        start: starts a thread; raises RuntimeError when the system gives no more.
        write: see write_files.
    """

    def __init__(
        self,
        layout: Layout,
        durability: Durability,
        first: int,
        most: int,
        *,
        go_on: Callable[[], bool],
        settle: Callable[[Order, Outcome], None],
        fail: Callable[[BaseException], None],
        start: Callable[[threading.Thread], None] = threading.Thread.start,
        write: Callable[..., tuple[list[Pending], OSError | None]] = write_files,
    ) -> None:
        self._layout, self._durability, self._most = layout, durability, most
        self._go_on, self._settle, self._fail = go_on, settle, fail
        self._start, self._write_files = start, write
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        for _ in range(first):
            self._add()

    @property
    def size(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def put(self, orders: Iterable[Order]) -> None:
        """Queue orders."""
        for order in orders:
            self.do(partial(self._write, order))

    def do(self, task: Callable[[], None]) -> None:
        """Queue a function that one of the threads calls."""
        self._tasks.put(task)

    def grow(self) -> bool:
        """Add a thread when tasks wait and there are fewer than `most`. Returns whether it did."""
        with self._lock:
            if self._tasks.empty() or len(self._threads) >= self._most:
                return False
            try:
                self._add()
            except RuntimeError:  # the system gives no more threads; the pool keeps those it has
                self._most = len(self._threads)
                return False
        return True

    def drain(self) -> None:
        """Wait until all tasks are done and the threads have ended. Nothing may be put after it."""
        while self.grow():  # no kernels are launched at the end, so more threads disturb nothing
            pass
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _add(self) -> None:
        name = f"writer-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start(thread)
        self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # reported, because its batch may never be settled
                self._fail(error)

    def _write(self, order: Order) -> None:
        outcome = Outcome([])
        try:
            outcome = self._written(order)
        except BaseException as error:
            self._fail(error)
        self._settle(order, outcome)

    def _written(self, order: Order) -> Outcome:
        begun = time.perf_counter()
        files = [
            (path, self._layout.parts(sample, order.staged.blobs(number)))
            for number, sample, path in order.files
        ]
        done, error = self._write_files(files, self._durability, self._go_on)
        return Outcome(done, error, time.perf_counter() - begun)
