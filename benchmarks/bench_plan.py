"""The bookkeeping at scale: python benchmarks/bench_plan.py [--samples N] [--finished N] [--folder DIR]

Plans batches for N lengths, then finds what is done in a folder with that many finished samples (files
of one byte: their size does not matter, their number does). Each in a process of its own, for its
peak memory. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from extractor.files import json_line
from extractor.layouts.base import sample_path
from extractor.output.done import find_done
from extractor.output.journal import JOURNAL
from extractor.plan import batches as plan


def plan_batches(samples: int) -> dict[str, float]:
    """Log-normal lengths around 400 tokens, at most 16,384; batches of 16,384 tokens."""
    lengths = np.random.default_rng(0).lognormal(6, 1, samples).clip(1, 16_384).astype(np.int32)
    begun = time.perf_counter()
    chosen = plan.shard(np.arange(samples), lengths, 0, 1)
    batches = plan.batches(chosen, lengths, 16_384, 256)
    seconds = time.perf_counter() - begun
    fill = float(batches.tokens(lengths).mean()) / 16_384
    return {"seconds": round(seconds, 2), "batches": len(batches), "fill": round(fill, 4)}


def make_folder(output: Path, finished: int) -> None:
    (output / JOURNAL).mkdir(parents=True)
    with (output / JOURNAL / "0000.jsonl").open("wb") as journal:
        for row in range(finished):
            path = output / sample_path(row, 0)
            if row % 1000 == 0:
                path.parent.mkdir(parents=True)
            path.write_bytes(b"x")
            line = {"row": row, "turn": 0, "id": f"conversation-{row}", "tokens": 400}
            journal.write(json_line({**line, "bytes": 1, "xxh3": f"{row:016x}"}))


def resume(output: Path, finished: int) -> dict[str, float]:
    rows, turns = np.arange(finished), np.zeros(finished, np.int16)
    begun = time.perf_counter()
    done = find_done(output, rows, turns)
    seconds = time.perf_counter() - begun
    assert done.finished.all() and not done.rejected
    return {"seconds": round(seconds, 2)}


def alone(work: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """What work returns in a fresh process, and that process's peak memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_with_peak, (work, arguments))


def _with_peak(
    work: Callable[..., dict[str, float]], arguments: tuple[object, ...]
) -> dict[str, float]:
    result = work(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {**result, "peak_gb": round(peak, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to make the folder to resume")
    options = parser.parse_args()
    output = Path(tempfile.mkdtemp(prefix="bench-plan-", dir=options.folder))
    try:
        planned = alone(plan_batches, options.samples)
        print(f"plan of {options.samples:,} lengths: {planned}", flush=True)
        make_folder(output, options.finished)
        resumed = alone(resume, output, options.finished)
        print(f"resume over {options.finished:,} finished samples: {resumed}")
    finally:
        shutil.rmtree(output)
    result = {
        "benchmark": "bench_plan",
        "date": time.strftime("%Y-%m-%d"),
        "samples": options.samples,
        "finished": options.finished,
        "plan": planned,
        "resume": resumed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
