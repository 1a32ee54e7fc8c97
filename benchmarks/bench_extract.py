"""The whole pipeline against the bare forward of the same batches, in one process and one run.

    python -m benchmarks.bench_extract --shape qwen3-8b --samples 1024 --output /dev/shm/bench
    python -m benchmarks.bench_extract --model PATH --device cpu --samples 64 --longest 512

Dummy weights of a public shape (or a real checkpoint by --model), pre-tokenized rows, real files.
The two are timed in turn, --repeats times each; the last line is JSON with every run and the medians.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, lengths, write_rows, write_shape
from extractor import memory, plan
from extractor.config import ExtractConfig
from extractor.data.prepare import prepare
from extractor.engine import sglang as engine_sglang
from extractor.engine.sglang import SGLangEngine
from extractor.layouts import LAYOUTS
from extractor.model import ModelSpec
from extractor.pipeline import DTYPES
from extractor.pump import write_batches
from extractor.records import Batch
from extractor.signals import StopSignals
from extractor.states import States
from extractor.topology import Place, World
from extractor.watch import Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", help="a real checkpoint instead of a shape")
    parser.add_argument("--device", default="auto")
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
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-extract-"))
    output = args.output or work / "out"
    try:
        result = run(args, work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)
    print(json.dumps(result))


def run(args: argparse.Namespace, work: Path, output: Path) -> dict[str, object]:
    begun = time.perf_counter()
    place = Place.from_environment(None)
    device = engine_sglang.choose_device(args.device, place)
    engine_sglang.prepare_process(device, place)
    world = World(place)
    model = args.model or str(write_shape(args.shape, work))
    spec = ModelSpec.read(model)
    states = States.resolve(args.layers, True, spec.num_layers)
    sglang = dict(item.split("=", 1) for item in args.sglang)
    if args.shape:
        sglang.setdefault("load_format", "dummy")
    rows = write_rows(work / "rows.jsonl", lengths(args.samples, args.longest), spec.vocab_size)
    config = ExtractConfig(model=model, data=(str(rows),), output=work / "prepared")
    store = prepare(config, spec, lambda _: None)
    layout = LAYOUTS["native"](
        stored=states.names,
        hidden=spec.hidden_size,
        dtype=DTYPES[spec.dtype],
        model=spec.path.name,
    )
    budget = memory.choose(
        spec,
        device=device.type,
        tp=place.tp,
        row_bytes=layout.row_bytes,
        longest=int(store.lengths.max()),
        batch_tokens=args.batch_tokens,
        host_gib=None,
    )
    import numpy as np

    order = plan.batches(
        np.arange(len(store.lengths)), store.lengths, budget.max_tokens, budget.max_sequences
    )
    tokens = order.tokens(store.lengths)
    batches = [
        Batch.of(n, tuple(store.sample(int(i)) for i in order.batch(n))) for n in range(len(order))
    ]
    world.join_replica(device)
    loading = time.perf_counter()
    engine = SGLangEngine(
        spec,
        states,
        place,
        engine_sglang.EngineOptions(
            device=device,
            max_tokens=budget.max_tokens,
            max_sequences=budget.max_sequences,
            longest=budget.longest,
            sglang_args=sglang,
        ),
    )
    loaded = time.perf_counter()
    total = int(tokens.sum())

    def bare() -> float:
        engine.capture.remove()
        _synchronize(device)
        mark = time.perf_counter()
        for batch in batches:
            engine.forward_bare(batch)
        _synchronize(device)
        return time.perf_counter() - mark

    watch = Watch(world.board(), 0, 1, StopSignals(), stuck_after=0)
    turns = itertools.count()

    def whole() -> dict[str, Any]:
        engine.mark(states)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        _synchronize(device)
        _, wrote = write_batches(
            engine,
            world,
            watch,
            store=store,
            batches=order,
            layout=layout,
            budget=budget,
            output=output,
            journal="0000.jsonl",
            threads=args.writers,
            counter=f"batch{next(turns)}",
        )
        assert wrote["samples"] == len(store.lengths), wrote
        return wrote

    bare(), whole()  # kernels are compiled and buffers pinned once; not counted
    runs = []
    for _ in range(args.repeats):
        bare_seconds, wrote = bare(), whole()
        runs.append(
            {
                "bare_tokens_per_s": round(total / bare_seconds),
                "whole_tokens_per_s": round(total / wrote["seconds"]),
                "share": round(bare_seconds / wrote["seconds"], 4),
                "gb_per_s": round(wrote["bytes"] / wrote["seconds"] / 1e9, 3),
                "waits": wrote["waits"],
            }
        )
        print(runs[-1], flush=True)
    middle = {
        key: statistics.median(run[key] for run in runs)
        for key in ("bare_tokens_per_s", "whole_tokens_per_s", "share", "gb_per_s")
    }
    result: dict[str, object] = {
        "benchmark": "bench_extract",
        "model": args.shape or args.model,
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"cpu x{os.cpu_count()}",
        "date": time.strftime("%Y-%m-%d"),
        "engine": engine.info.details,
        "states": list(states.names),
        "samples": len(store.lengths),
        "tokens": total,
        "batches": len(batches),
        "max_tokens": budget.max_tokens,
        "fill": round(total / len(batches) / budget.max_tokens, 4),
        **middle,
        "runs": runs,
        **one_pass(engine, max(batches, key=lambda batch: batch.num_tokens), device),
        "import_s": round(loading - begun, 1),
        "load_s": round(loaded - loading, 1),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2),
    }
    if args.profile:
        profile(engine, max(batches, key=lambda batch: batch.num_tokens), args.profile)
    if device.type == "cuda":
        peak = matrix_flops(device)
        result["device_peak_gib"] = round(torch.cuda.max_memory_allocated() / (1 << 30), 2)
        result["matrix_tflops"] = round(peak / 1e12, 1)
        active = engine.active_parameters()
        whole_rate = middle["whole_tokens_per_s"]
        result["active_parameters"] = active
        result["weights_share_of_matrix_ceiling"] = round(2 * active * whole_rate / peak, 4)
    return result


def one_pass(engine: SGLangEngine, batch: Batch, device: torch.device) -> dict[str, float]:
    """Milliseconds of one bare pass: until its kernels are launched, and until they are done. A pipeline
    is at most as fast as the larger of the two."""
    engine.capture.remove()
    launched, done = [], []
    for _ in range(5):
        _synchronize(device)
        mark = time.perf_counter()
        engine.forward_bare(batch)
        launched.append(time.perf_counter() - mark)
        _synchronize(device)
        done.append(time.perf_counter() - mark)
    middle = statistics.median
    return {
        "launch_ms": round(1e3 * middle(launched), 2),
        "pass_ms": round(1e3 * middle(done), 2),
    }


def profile(engine: SGLangEngine, batch: Batch, path: Path) -> None:
    """Where a bare pass's time goes, by kernel, as a table."""
    from torch.profiler import ProfilerActivity, profile

    engine.capture.remove()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        engine.forward_bare(batch)
        torch.cuda.synchronize()
    table = seen.key_averages().table(
        sort_by="self_device_time_total", row_limit=40, max_name_column_width=90
    )
    path.write_text(f"{batch}\n{table}\n")


def matrix_flops(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a bf16 matrix product of random data: the ceiling to compare with."""
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
