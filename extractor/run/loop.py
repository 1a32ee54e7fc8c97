"""The loop of a writer, which takes batches from the shared counter through the model to files, and the
loop of the other ranks of its replica."""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from extractor import pages
from extractor.engine.base import Engine
from extractor.errors import RunError
from extractor.files import Durability
from extractor.layouts import Layout
from extractor.layouts.safetensors import Framed
from extractor.output.journal import JOURNAL, Journal
from extractor.plan.batches import Plan
from extractor.plan.budget import MOST_WRITERS, RING_SLOTS, Budget
from extractor.prepared.store import PreparedStore
from extractor.progress import ProgressLine
from extractor.ranks.signals import Stopped
from extractor.ranks.watch import Watch
from extractor.ranks.world import World
from extractor.records import Batch
from extractor.run.meter import HostMemory, Meter, resident_bytes
from extractor.write.buffers import HostRing
from extractor.write.staging import Stager
from extractor.write.writer import ORDINARY, Workers, Writer

# The loop launches hundreds of kernels per batch and may have to wait for the interpreter lock at each.
# With the default switch interval of 5 ms per wait, the device would run out of work.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where a replica's files go, and how they are written.

    Attributes:
        output: the folder.
        journal: name of this writer's journal.
        durability: see Writer.
        threads: how many threads or worker processes write files; None for as many as are needed, up to
            the number of cores (2 at least) and MOST_WRITERS (plan/budget.py).
        workers: how the writer starts them.
    """

    output: Path
    journal: str
    durability: Durability = "none"
    threads: int | None = None
    workers: Workers = ORDINARY

    def open_journal(self) -> Journal:
        return Journal(self.output / JOURNAL / self.journal, sync=self.durability != "none")

    def open_writer(self, journal: Journal, ring: HostRing, layout: Layout, watch: Watch) -> Writer:
        return Writer(
            self.output,
            journal,
            ring,
            layout=layout,
            threads=self.threads or min(MOST_WRITERS, max(len(os.sched_getaffinity(0)), 2)),
            at_once=self.threads is not None,
            processes=ring.is_shared,
            durability=self.durability,
            landing=watch.step,
            workers=self.workers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What a writer is to write, and the buffers for it.

    Attributes:
        store: the prepared samples.
        batches: the batches of all replicas.
        layout: what a file holds.
        budget: sizes of a batch and of the ring.
        ring: has the budget's number of slots, or fewer when there are fewer batches.
        sink: where the files go.
    """

    store: PreparedStore
    batches: Plan
    layout: Layout
    budget: Budget
    ring: HostRing
    sink: Sink

    @classmethod
    def begin(
        cls,
        store: PreparedStore,
        batches: Plan,
        layout: Layout,
        budget: Budget,
        sink: Sink,
        device: torch.device,
    ) -> "Writing":
        """Make the ring and start to allocate and pin its buffers in threads.

        A large buffer takes as long as a pass through a small model, so this is called before the model
        is loaded. Raises RunError when there is no memory."""
        # Buffers are shared only for worker processes, because shared memory is slower to allocate.
        by_processes = sink.workers.are_processes(device) and isinstance(layout, Framed)
        slots = max(min(budget.slots, len(batches)), 1)
        ring = HostRing(
            budget.slot_bytes,
            slots,
            pinned=device.type == "cuda",
            shared=by_processes and pages.can_share(),
        )
        # A sample longer than a slot needs a buffer of its own, which takes the room of several slots.
        longer = budget.longest > budget.max_tokens
        displaced = -(-budget.longest // budget.max_tokens) if longer else 0
        ring.make_ready(min(slots - displaced, RING_SLOTS))
        return cls(store=store, batches=batches, layout=layout, budget=budget, ring=ring, sink=sink)

    @property
    def tokens(self) -> int:
        """Tokens of all batches."""
        return int(self.batches.tokens(self.store.lengths).sum())

    def numbers(self, world: World, counter: str) -> Iterator[int]:
        """Numbers of the batches that this replica takes, until the counter of all replicas has passed
        the last batch."""
        while (number := world.next_number(counter)) < len(self.batches):
            yield number

    def batch(self, number: int) -> Batch:
        """The batch with this number, with its samples read from the store."""
        indices = self.batches.batch(number)
        return Batch.of(number, tuple(self.store.sample(int(index)) for index in indices))


class Parts(NamedTuple):
    """The parts that run beside the model while a replica's batches are written."""

    source: "Prefetch"
    writer: Writer
    meter: Meter


@contextlib.contextmanager
def _at_work(world: World, watch: Watch, writing: Writing, counter: str) -> Generator[Parts]:
    """Open what write_batches needs, and close it at the end, also after an error."""
    ring = writing.ring
    if not ring.is_shared:  # its pages count as this process's own memory once they are pinned
        ring.wait_until_ready()
    memory = HostMemory(writing.budget.host_bytes, resident_bytes() - ring.private_bytes)
    journal = writing.sink.open_journal()
    writer = writing.sink.open_writer(journal, ring, writing.layout, watch)
    quiet = world.place.rank != 0
    meter = Meter(
        writer, ring, memory, ProgressLine("extracting", writing.tokens, "token", quiet=quiet)
    )
    source = Prefetch(writing.numbers(world, counter), writing.batch)
    try:
        yield Parts(source, writer, meter)
        journal.close()
        meter.stop()
        watch.stop.drained()
    finally:
        source.close()
        meter.close()
        # The samples are written. To end the worker processes and free the buffers takes a while more.
        writer.end_processes()
        ring.close()


def write_batches(
    engine: Engine, world: World, watch: Watch, writing: Writing, counter: str = "batch"
) -> tuple[bool, dict[str, Any]]:
    """Write this replica's share of the batches, until there are no more or a signal comes.

    The host buffer is acquired before the other ranks get the batch. When the disk is slower than the
    model, they then wait in a broadcast on the CPU and never in a collective on the GPU.

    counter: name of the counter in torchrun's store from which replicas take numbers of batches.

    Returns whether a signal stopped it, and this replica's record for run.json. Raises the writer's
    error, and PeerError when another rank has failed."""
    sys.setswitchinterval(SWITCH_SECONDS)
    device, stop, stopped = engine.info.device, watch.stop, False
    stager = Stager(writing.layout.planes, device)
    with _at_work(world, watch, writing, counter) as (source, writer, meter):

        def check() -> None:
            writer.check()
            watch.check()
            if stop.asked is not None:  # the batch that waits for a buffer is not started
                raise Stopped(stop.asked)

        try:
            while True:
                with meter.waiting_for_data():
                    batch = None if stop.asked else source.next()
                stopped = stop.asked is not None
                if batch is None:
                    break
                try:
                    with meter.waiting_for_a_buffer():
                        buffer = writing.ring.acquire(stager.nbytes(batch.num_tokens), check)
                except Stopped:
                    stopped = True
                    break
                with meter.launching():
                    with watch.step("pass", str(batch), batch.num_tokens):
                        world.share_batch(batch)
                        staged = stager.stage(engine.forward(batch), buffer)
                    writer.submit(staged)
                meter.step()
            world.share_batch(None)
        finally:
            writer.drain()
        meter.step()
    return stopped, {
        "replica": world.place.replica,
        "device": _device_name(device),
        **meter.report(),
    }


def _device_name(device: torch.device) -> str:
    """A name that tells one GPU from another: its model and its UUID as nvidia-smi shows it."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, GPU-{properties.uuid}"


def follow(engine: Engine, world: World, watch: Watch) -> None:
    """The loop of a rank that computes and does not write: it runs the same batches as its writer, until
    the writer sends the end."""
    while (batch := world.share_batch(None)) is not None:
        with watch.step("pass", str(batch), batch.num_tokens):
            engine.forward(batch)


class Prefetch:
    """Makes the next batches in a thread while the model runs.

    Args:
        numbers: of the batches to make, in order.
        make: makes a batch from its number.
        depth: how many batches wait at most.
    """

    def __init__(
        self, numbers: Iterator[int], make: Callable[[int], Batch], depth: int = 2
    ) -> None:
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(numbers, make), name="prefetch", daemon=True
        )
        self._thread.start()

    def _fill(self, numbers: Iterator[int], make: Callable[[int], Batch]) -> None:
        item: Batch | BaseException | None = None
        try:
            for number in numbers:
                if not self._put(make(number)):
                    return
        except BaseException as error:
            item = error
        self._put(item)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.2)
                return True
        return False

    def next(self) -> Batch | None:
        """The next batch, or None at the end. Raises RunError when the batch cannot be made."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise RunError(f"cannot read the prepared samples: {item!r}") from item
        return item

    def close(self) -> None:
        """Let the thread end; the batches that wait are dropped."""
        self._closed.set()
