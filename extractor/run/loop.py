"""A writer's run: batches from the shared counter through the model to files; and what the other ranks
of its replica do meanwhile."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from extractor.run.meter import HostMemory, Timeline, Waits, resident_bytes
from extractor.write.buffers import HostRing
from extractor.write.staging import Stager
from extractor.write.writer import ORDINARY, Workers, Writer

# The loop launches hundreds of kernels a batch and asks for the interpreter at each: a thread that kept
# it for the usual 5 ms would starve the device.
SWITCH_SECONDS = 0.0005
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What a writer is to write, and the buffers for it.

    Attributes:
        batches: all of them, of all replicas.
        ring: of budget's slots, or of fewer when there are fewer batches.
        workers: how the writer comes by threads and processes.
    """

    store: PreparedStore
    batches: Plan
    layout: Layout
    budget: Budget
    ring: HostRing
    workers: Workers = ORDINARY

    @classmethod
    def begin(
        cls,
        store: PreparedStore,
        batches: Plan,
        layout: Layout,
        budget: Budget,
        device: torch.device,
        workers: Workers = ORDINARY,
    ) -> "Writing":
        """Buffers are found and page-locked from now on, in threads: a large one takes as long as a
        pass, so this is for before the model is loaded. Raises RunError where there is no memory."""
        # What threads write is not shared: shared memory is slower to come by.
        shared = workers.are_processes(device) and isinstance(layout, Framed) and pages.can_share()
        slots = max(min(budget.slots, len(batches)), 1)
        ring = HostRing(budget.slot_bytes, slots, pinned=device.type == "cuda", shared=shared)
        # A sample longer than a slot, a batch by itself, takes the place of some.
        longer = budget.longest > budget.max_tokens
        displaced = -(-budget.longest // budget.max_tokens) if longer else 0
        ring.make_ready(min(slots - displaced, RING_SLOTS))
        return cls(
            store=store,
            batches=batches,
            layout=layout,
            budget=budget,
            ring=ring,
            workers=workers,
        )


def write_batches(
    engine: Engine,
    world: World,
    watch: Watch,
    writing: Writing,
    *,
    output: Path,
    journal: str,
    durability: Durability = "none",
    threads: int | None = None,
    counter: str = "batch",
) -> tuple[bool, dict[str, Any]]:
    """Write this replica's share of the batches.

    Args:
        journal: name of this writer's.
        threads: or processes, that write files; None for as many as it takes, up to the cores and
            MOST_WRITERS (plan/budget.py).
        counter: in torchrun's store, from which replicas take numbers of batches.

    Returns whether a signal stopped it, and what run.json says of it. Raises what pump raises.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    device = engine.info.device
    store, batches, layout, ring = writing.store, writing.batches, writing.layout, writing.ring
    if not ring.is_shared:  # its pages are this process's own, once they are found
        ring.wait_until_ready()
    memory = HostMemory(writing.budget.host_bytes, resident_bytes() - ring.private_bytes)
    lines = Journal(output / JOURNAL / journal, sync=durability != "none")
    writer = Writer(
        output,
        lines,
        ring,
        layout=layout,
        threads=threads or min(MOST_WRITERS, max(len(os.sched_getaffinity(0)), 2)),
        at_once=threads is not None,
        processes=ring.is_shared,
        durability=durability,
        landing=watch.step,
        workers=writing.workers,
    )
    total = int(batches.tokens(store.lengths).sum())
    line = ProgressLine("extracting", total, "token", quiet=world.place.rank != 0)
    waits, timeline = Waits(), Timeline()

    def numbers() -> Iterator[int]:
        while (number := world.next_number(counter)) < len(batches):
            yield number

    def make(number: int) -> Batch:
        return Batch.of(number, tuple(store.sample(int(i)) for i in batches.batch(number)))

    def step() -> None:
        at, done = time.perf_counter() - begun, writer.progress
        nonlocal looked
        if at - looked > LOOK_SECONDS:  # at some of many short steps
            looked = at
            memory.look(ring, writer)
        timeline.note(at, done.tokens, done.bytes, waits.data, waits.disk, waits.model)
        line.set(
            done.tokens,
            lambda: f"{done.bytes / at / 1e9:.2f} GB/s, waits for {waits.most()}",
        )

    looked = -LOOK_SECONDS
    source = Prefetch(numbers(), make)
    began, begun = time.time(), time.perf_counter()
    try:
        stopped = pump(
            engine,
            world,
            source,
            Stager(layout.planes, device),
            ring,
            writer,
            waits,
            watch,
            step,
        )
        lines.close()
        seconds = time.perf_counter() - begun
        watch.stop.drained()
    finally:
        source.close()
        line.close()
        # The samples are written; that buffers and who maps them are gone takes a while yet.
        writer.end_processes()
        ring.close()
    progress = writer.progress
    return stopped, {
        "replica": world.place.replica,
        "device": _device_name(device),
        "began": round(began, 3),
        "seconds": round(seconds, 3),
        "samples": progress.samples,
        "rejected": progress.rejected,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "tokens_per_second": round(progress.tokens / seconds, 1),
        "waits": {name: round(value, 3) for name, value in waits.by_kind.items()},
        "launching": round(waits.launching, 3),
        "landing": round(progress.wait_seconds, 3),
        "writing": round(progress.write_seconds, 3),
        "host_memory": asdict(memory),
        "timeline": timeline.points,
    }


def _device_name(device: torch.device) -> str:
    """By which one GPU is told from another, also by nvidia-smi."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, GPU-{properties.uuid}"


def pump(
    engine: Engine,
    world: World,
    source: "Prefetch",
    stager: Stager,
    ring: HostRing,
    writer: Writer,
    waits: Waits,
    watch: Watch,
    on_step: Callable[[], None],
) -> bool:
    """Batches through the model to the writer, until there are no more or a signal came.

    The host buffer is taken before the replica hears of a batch, so that when the disk is behind the
    other ranks wait here, in a CPU broadcast, and never in a collective on the GPU. Returns whether it
    was stopped; raises the writer's error, and PeerError when another rank has failed."""
    stop, stopped = watch.stop, False
    clock = time.perf_counter

    def check() -> None:
        writer.check()
        watch.check()
        if stop.asked is not None:  # the batch that waits for a buffer has not begun
            raise Stopped(stop.asked)

    try:
        while True:
            mark = clock()
            batch = None if stop.asked else source.next()
            waits.data += clock() - mark
            stopped = stop.asked is not None
            if batch is None:
                break
            mark = clock()
            busy = writer.busy_seconds()
            try:
                buffer = ring.acquire(stager.nbytes(batch.num_tokens), check)
            except Stopped:
                stopped = True
                break
            waited, busy = clock() - mark, writer.busy_seconds() - busy
            waits.disk += min(waited, busy)
            waits.model += max(waited - busy, 0.0)
            mark = clock()
            with watch.step("pass", str(batch), batch.num_tokens):
                world.share_batch(batch)
                staged = stager.stage(engine.forward(batch), buffer)
            writer.submit(staged)
            launched = clock() - mark
            waits.model += launched
            waits.launching += launched
            on_step()
        world.share_batch(None)
    finally:
        writer.drain()
    on_step()
    return stopped


def follow(engine: Engine, world: World, watch: Watch) -> None:
    """A rank that computes and does not write: the same batches, until the writer says no more."""
    while (batch := world.share_batch(None)) is not None:
        with watch.step("pass", str(batch), batch.num_tokens):
            engine.forward(batch)


class Prefetch:
    """Makes the next batches in a thread while the model runs."""

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
        """The next batch, or None at the end. Raises what making it raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise RunError(f"cannot read the prepared samples: {item!r}") from item
        return item

    def close(self) -> None:
        self._closed.set()
