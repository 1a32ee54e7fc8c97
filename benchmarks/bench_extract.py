"""The whole pipeline against the bare forward of the same batches, in one replica and one run.

    python -m benchmarks.bench_extract --shape qwen3-8b --samples 1024 --output /dev/shm/bench
    python -m benchmarks.bench_extract --model PATH --device cpu --samples 64 --longest 512
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_extract --shape llama-3-70b --tp 4

Dummy weights of a public shape (or a real checkpoint by --model), pre-tokenized rows, real files.
The two are timed in turn, --repeats times each; the last line is JSON with every run and the medians.
Over several ranks rank 0 writes and the others follow, as in the program; each says what it waited for.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.shapes import SHAPES, lengths, write_rows, write_shape
from benchmarks.timed import TimedEngine
from extractor.config import ExtractConfig
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import Engine
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.plan import batches as plan
from extractor.plan import budget as memory
from extractor.plan.batches import Plan
from extractor.plan.budget import Budget
from extractor.plan.dry_run import weight_bytes
from extractor.plan.request import Wanted
from extractor.prepared.store import PreparedStore
from extractor.ranks.place import Place
from extractor.ranks.signals import StopSignals
from extractor.ranks.watch import Watch
from extractor.ranks.world import World
from extractor.records import Batch, CapturedBatch
from extractor.run.loop import Sink, Writing, follow, write_batches
from extractor.states import States
from extractor.write.buffers import HostRing
from extractor.write.staging import Stager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", help="a real checkpoint instead of a shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, help="ranks; torchrun must start as many")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--writers", type=int)
    parser.add_argument("--output", type=Path, help="where files go; default: a temporary folder")
    parser.add_argument(
        "--profile", type=Path, help="write a table of one bare pass's kernels there"
    )
    parser.add_argument(
        "--as-sglang",
        action="store_true",
        help="passes as SGLang would run them: no kernel of ours",
    )
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    place = Place.from_environment(args.tp)
    if place.replicas > 1:
        parser.error(f"--tp {place.tp} of {place.world_size} ranks: this times one replica")
    if args.profile and place.tp > 1:
        parser.error("--profile is of one rank: the others would not be in its pass")
    device = engine_sglang.choose_device(args.device, place)
    engine_sglang.prepare_process(device, place)
    world = World(place)
    work = Path(tempfile.mkdtemp(prefix="bench-extract-")) if place.is_writer else Path()
    output = args.output or work / "out"
    try:
        result = run(args, place, world, device, work, output)
    finally:
        if place.is_writer:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(output, ignore_errors=True)
    world.leave()
    if place.is_writer:
        print(json.dumps(result))


@dataclass
class Load:
    """What every rank needs to know of the work.

    Attributes:
        batches: on the writer with their samples.
        store, layout, order: the writer's.
    """

    model: str
    budget: Budget
    batches: list[Batch]
    store: PreparedStore | None = None
    layout: Layout | None = None
    order: Plan | None = None

    @property
    def tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    def begin_writing(self, sink: Sink, device: torch.device) -> Writing | None:
        """On the writer."""
        if self.store is None or self.order is None or self.layout is None:
            return None
        return Writing.begin(self.store, self.order, self.layout, self.budget, sink, device)


def prepare_load(args: argparse.Namespace, place: Place, device: torch.device, work: Path) -> Load:
    """The writer's part: rows, their batches, sizes."""
    model = args.model or str(write_shape(args.shape, work))
    vocab_size = ModelSpec.read(model).vocab_size
    rows = write_rows(work / "rows.jsonl", lengths(args.samples, args.longest), vocab_size)
    config = ExtractConfig(
        model=model,
        data=(str(rows),),
        output=work / "prepared",
        layers=args.layers,
        batch_tokens=args.batch_tokens,
    )
    wanted = Wanted.of(config)
    store = wanted.prepare(quiet=True)
    layout = wanted.layout(store)
    # A shape has no weight files to tell its size by.
    spec = replace(wanted.spec, weight_bytes=weight_bytes(config, wanted.spec))
    ask = replace(wanted.ask(layout, store.lengths, device.type, place.tp), spec=spec)
    budget = memory.choose(ask)
    order = plan.batches(
        np.arange(len(store.lengths)), store.lengths, budget.max_tokens, budget.max_sequences
    )
    batches = [
        Batch.of(n, tuple(store.sample(int(i)) for i in order.batch(n))) for n in range(len(order))
    ]
    return Load(model, budget, batches, store, layout, order)


def share_load(world: World, load: Load | None) -> Load:
    """The same on all ranks: the others get batches without samples, as in the program."""
    if load is not None:
        world.tell("load", {"model": load.model, "budget": asdict(load.budget)})
        for batch in load.batches:
            world.share_batch(batch)
        world.share_batch(None)
        return load
    told = world.hear("load")
    batches: list[Batch] = []
    while (batch := world.share_batch(None)) is not None:
        batches.append(batch)
    return Load(told["model"], Budget(**told["budget"]), batches)


@dataclass
class Listening:
    """A follower's ear: how long it waited for the writer's next batch."""

    world: World
    seconds: float = 0.0

    def share_batch(self, batch: Batch | None) -> Batch | None:
        mark = time.perf_counter()
        heard = self.world.share_batch(batch)
        self.seconds += time.perf_counter() - mark
        return heard


@dataclass
class Timed:
    """One run of the whole pipeline on this rank."""

    seconds: float
    numbers: dict[str, float | None]
    written: int = 0
    waits: dict[str, float] = field(default_factory=dict)


class Bench:
    """A built engine and what it is to run."""

    def __init__(
        self,
        engine: engine_sglang.SGLangEngine,
        world: World,
        device: torch.device,
        load: Load,
        states: States,
        writers: int | None,
    ) -> None:
        self.engine, self.world, self.device, self.load = engine, world, device, load
        self._states, self._writers = states, writers
        self._turns = itertools.count()
        place = world.place
        self._watch = Watch(
            world.board(), place.rank, place.world_size, StopSignals(), stuck_after=0
        )

    def _all_here(self) -> None:
        _synchronize(self.device)
        self.world.least(0)

    def bare(self) -> float:
        self.engine.capture.remove()
        self._all_here()
        mark = time.perf_counter()
        for batch in self.load.batches:
            self.engine.forward_bare(batch)
        _synchronize(self.device)
        return time.perf_counter() - mark

    def whole(self, output: Path) -> Timed:
        self.engine.mark(self._states)
        timed = TimedEngine(cast(Engine, self.engine), self.device)
        sink = Sink(output=output, journal="0000.jsonl", threads=self._writers)
        writing = self.load.begin_writing(sink, self.device)
        if writing is not None:  # before the others' clocks begin
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            writing.ring.wait_until_ready()  # as they are once a model is loaded
        self._all_here()
        mark = time.perf_counter()
        if writing is None:
            ear = Listening(self.world)
            follow(cast(Engine, timed), cast(World, ear), self._watch)
            _synchronize(self.device)
            seconds = time.perf_counter() - mark
            return Timed(seconds, _shares(timed, seconds) | {"for_writer": round(ear.seconds, 2)})
        return self._write(timed, writing)

    def _write(self, timed: TimedEngine, writing: Writing) -> Timed:
        _, wrote = write_batches(
            cast(Engine, timed),
            self.world,
            self._watch,
            writing,
            f"batch{next(self._turns)}",
        )
        if wrote["samples"] != len(writing.store.lengths):
            sys.exit(f"stopped after {wrote['samples']} samples of {len(writing.store.lengths)}")
        seconds = wrote["seconds"]
        numbers = _shares(timed, seconds) | {"writing": wrote["writing"]}
        return Timed(seconds, numbers, wrote["bytes"], wrote["waits"])


def _shares(timed: TimedEngine, seconds: float) -> dict[str, float | None]:
    """seconds, those in which the device was in a pass, and those of this thread in launching it."""
    return {
        "seconds": round(seconds, 2),
        "in_passes": round(timed.busy(), 2),
        "launching": round(timed.launching, 2),
    }


def run(
    args: argparse.Namespace,
    place: Place,
    world: World,
    device: torch.device,
    work: Path,
    output: Path,
) -> dict[str, object]:
    begun = time.perf_counter()
    sglang = dict(item.split("=", 1) for item in args.sglang)
    if args.shape:
        sglang.setdefault("load_format", "dummy")
    world.join_replica(device)
    load = share_load(world, prepare_load(args, place, device, work) if place.is_writer else None)
    spec = ModelSpec.read(load.model)
    states = States.resolve(args.layers, True, spec.num_layers)
    loading = time.perf_counter()
    engine = engine_sglang.SGLangEngine(
        spec,
        states,
        place,
        engine_sglang.EngineOptions(
            device=device,
            max_tokens=load.budget.max_tokens,
            max_sequences=load.budget.max_sequences,
            longest=load.budget.longest,
            sglang_args=sglang,
            as_sglang=args.as_sglang,
        ),
    )
    loaded = time.perf_counter()
    bench = Bench(engine, world, device, load, states, args.writers)
    bench.bare(), bench.whole(output)  # kernels are compiled; not counted
    runs: list[dict[str, Any]] = []
    for number in range(args.repeats):
        bare_seconds, timed = bench.bare(), bench.whole(output)
        ranks = gather(world, f"run/{number}", timed.numbers)
        if place.is_writer:
            runs.append(_entry(load.tokens, bare_seconds, timed, ranks))
            print(runs[-1], flush=True)
    fullest = max(load.batches, key=lambda batch: batch.num_tokens)
    passes = one_pass(engine, fullest, device)
    if args.profile:
        profile(engine, fullest, device, args.profile)
    if not place.is_writer:
        return {}
    assert load.store is not None
    result: dict[str, object] = {
        "benchmark": "bench_extract",
        "model": args.shape or args.model,
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"cpu x{os.cpu_count()}",
        "date": time.strftime("%Y-%m-%d"),
        "tp": place.tp,
        "engine": engine.info.details,
        "states": list(states.names),
        "samples": len(load.store.lengths),
        "tokens": load.tokens,
        "batches": len(load.batches),
        "max_tokens": load.budget.max_tokens,
        "fill": round(load.tokens / len(load.batches) / load.budget.max_tokens, 4),
        **medians(runs),
        "runs": runs,
        **passes,
        "import_s": round(loading - begun, 1),
        "load_s": round(loaded - loading, 1),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2),
    }
    if device.type == "cuda":
        result |= _ceilings(engine, device, load, medians(runs)["whole_tokens_per_s"])
        result["copy_gb_per_s"] = round(copy_rate(load, fullest, device), 2)
    return result


def gather(world: World, key: str, numbers: dict[str, float | None]) -> list[dict[str, Any]]:
    """All ranks' numbers on rank 0, by rank; elsewhere nothing."""
    place = world.place
    if not place.is_writer:
        world.tell(f"{key}/{place.rank}", numbers)
        return []
    return [numbers, *(world.hear(f"{key}/{rank}") for rank in range(1, place.tp))]


def _entry(
    tokens: int, bare_seconds: float, timed: Timed, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bare_tokens_per_s": round(tokens / bare_seconds),
        "whole_tokens_per_s": round(tokens / timed.seconds),
        "share": round(bare_seconds / timed.seconds, 4),
        "gb_per_s": round(timed.written / timed.seconds / 1e9, 3),
        "waits": timed.waits,
        "ranks": ranks,
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = ("bare_tokens_per_s", "whole_tokens_per_s", "share", "gb_per_s")
    return {key: statistics.median(run[key] for run in runs) for key in keys}


def _ceilings(
    engine: engine_sglang.SGLangEngine, device: torch.device, load: Load, rate: float
) -> dict[str, object]:
    """This rank's memory, and its part of the model's products against a matrix product's rate: those
    with the decoder layers' weights alone (no lm_head: it does not run), and with attention's beside
    them, a causal mask's half. A GPU that multiplies for seconds on end gets warm and slows down, so the
    ceiling is measured in a burst and over as long."""
    peak, steady = matrix_flops(device), matrix_flops(device, seconds=3)
    active = engine.active_parameters()
    weights = 2 * active * rate
    pairs = sum(n * (n + 1) // 2 for batch in load.batches for n in batch.lengths)
    attention = 2 * engine.attention_width() * pairs / load.tokens * rate
    return {
        "device_peak_gib": round(torch.cuda.max_memory_allocated() / (1 << 30), 2),
        "matrix_tflops": round(peak / 1e12, 1),
        "matrix_tflops_steady": round(steady / 1e12, 1),
        "active_parameters": active,
        "weights_share_of_matrix_ceiling": round(weights / peak, 4),
        "products_share_of_matrix_ceiling": round((weights + attention) / peak, 4),
        "products_share_of_steady_ceiling": round((weights + attention) / steady, 4),
    }


def one_pass(
    engine: engine_sglang.SGLangEngine, batch: Batch, device: torch.device
) -> dict[str, float]:
    """Milliseconds of one bare pass: until its kernels are launched, and until they are done. A pipeline
    is at most as fast as the larger of the two."""
    engine.capture.remove()
    launched, done = zip(*(bare_pass(engine, batch, device) for _ in range(5)), strict=True)
    return {
        "launch_ms": round(1e3 * statistics.median(launched), 2),
        "pass_ms": round(1e3 * statistics.median(done), 2),
    }


def bare_pass(
    engine: engine_sglang.SGLangEngine, batch: Batch, device: torch.device
) -> tuple[float, float]:
    """Seconds of a bare pass on an idle device: until it is launched, and until it is done."""
    _synchronize(device)
    mark = time.perf_counter()
    engine.forward_bare(batch)
    launched = time.perf_counter() - mark
    _synchronize(device)
    return launched, time.perf_counter() - mark


def profile(
    engine: engine_sglang.SGLangEngine, batch: Batch, device: torch.device, path: Path
) -> None:
    """Where a bare pass's time goes, by kernel, as a table."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    engine.capture.remove()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        engine.forward_bare(batch)
        _synchronize(device)
    kernels = [each for each in seen.key_averages() if each.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda each: each.self_device_time_total, reverse=True)
    total = sum(each.self_device_time_total for each in kernels)
    lines = [f"{batch}: {total / 1e3:.1f} ms of kernels", "    ms  share  calls  kernel"]
    for each in kernels[:30]:
        spent = each.self_device_time_total
        lines.append(f"{spent / 1e3:6.1f}  {spent / total:5.1%}  {each.count:5}  {each.key[:90]}")
    path.write_text("\n".join(lines) + "\n")


def copy_rate(load: Load, batch: Batch, device: torch.device) -> float:
    """GB/s of the staging of one batch's states, encoded and copied to pinned memory, with nothing else
    under way."""
    layout, budget = load.layout, load.budget
    assert layout is not None
    ring = HostRing(budget.slot_bytes, 1, pinned=True)
    stager = Stager(layout.planes, device)
    size = (batch.num_tokens, layout.hidden)
    dtype = layout.dtype if layout.dtype.itemsize > 1 else torch.bfloat16
    states = {name: torch.zeros(size, dtype=dtype, device=device) for name in layout.captured}
    buffer, rates = ring.acquire(stager.nbytes(batch.num_tokens), lambda: None), []
    for _ in range(5):
        _synchronize(device)
        mark = time.perf_counter()
        stager.stage(CapturedBatch(batch, states), buffer).wait()
        rates.append(stager.nbytes(batch.num_tokens) / (time.perf_counter() - mark) / 1e9)
    ring.release(buffer)
    ring.close()
    return statistics.median(rates)


def matrix_flops(device: torch.device, size: int = 8192, seconds: float = 0.03) -> float:
    """FLOP/s of a bf16 matrix product of random data, repeated for about so long: the ceiling to compare
    with."""
    repeats = max(round(seconds * 7e14 / (2 * size**3)), 10)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        a @ b
    end.record()
    end.synchronize()
    return 2 * size**3 * repeats / (begin.elapsed_time(end) / 1e3)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
