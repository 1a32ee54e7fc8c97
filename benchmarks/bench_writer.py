"""The writer against a plain parallel loop that writes the same bytes.

    python -m benchmarks.bench_writer --folder /dev/shm [--kib 1024] [--samples 2048] [--threads N]

The loop knows every file beforehand and does nothing but open, write and close it; the writer gets them
in batches of as many tokens as a pass of the engine leaves, and also makes headers, checksums, temporary
names and journal lines. They take turns, --rounds each; the last line is JSON with the medians. Rates
are of files, without what it takes to make room for them again.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.durability import HIDDEN, STATES, write
from extractor.layouts.base import sample_path
from extractor.plan.budget import RING_SLOTS

BATCH_TOKENS = 16384  # what a pass of the engine leaves, whatever the length of its samples


def loop(folder: Path, samples: int, files: Sequence[Sequence[memoryview]], threads: int) -> float:
    """Seconds to write that many files, each under its own name, their bytes in turn from `files`."""

    def one(row: int) -> None:
        data = files[row % len(files)]
        descriptor = os.open(folder / sample_path(row, 0), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.writev(descriptor, data)
        finally:
            os.close(descriptor)

    begun = time.perf_counter()
    for row in range(0, samples, 1000):
        (folder / sample_path(row, 0)).parent.mkdir(parents=True)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(one, range(samples)):
            pass
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--kib", type=int, default=1024, help="size of a sample's states")
    parser.add_argument("--threads", type=int, default=max(len(os.sched_getaffinity(0)), 2))
    parser.add_argument(
        "--no-processes", action="store_true", help="threads that write by themselves, as on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokens = max(options.kib * 1024 // (HIDDEN * 2 * len(STATES)), 1)
    batch = max(BATCH_TOKENS // tokens, 1)
    samples = -(-options.samples // batch) * batch
    top = Path(tempfile.mkdtemp(prefix="bench-writer-", dir=options.folder))
    # As much memory as the writer's ring, so that both write what no cache holds; no zeros, which a
    # filesystem could skip.
    lengths = [1024, 8 * tokens, *[HIDDEN * 2 * tokens] * len(STATES), tokens]
    size = sum(lengths)
    noise = np.random.default_rng(0).bytes(1 << 20)
    memory = memoryview(noise * (size * batch * RING_SLOTS // len(noise) + 1))
    ends = list(itertools.accumulate(lengths))
    plain = [
        [memory[at + end - length : at + end] for end, length in zip(ends, lengths, strict=True)]
        for at in range(0, len(memory), size)
    ]
    rates: dict[str, list[float]] = {"writer": [], "loop": []}
    try:
        for number in range(options.rounds + 1):  # the first one warms up
            for name in rates:
                folder = top / name
                folder.mkdir()
                if name == "writer":
                    seconds = write(
                        folder,
                        "none",
                        samples // batch,
                        tokens,
                        options.threads,
                        batch=batch,
                        processes=not options.no_processes,
                        at_once=True,
                    )
                else:
                    seconds = loop(folder, samples, plain, options.threads)
                shutil.rmtree(folder)
                if number:
                    rates[name].append(samples / seconds)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in median.items():
        print(f"{name}: {rate:,.0f} files/s, {rate * size / 1e9:.2f} GB/s")
    result = {
        "benchmark": "bench_writer",
        "date": time.strftime("%Y-%m-%d"),
        "file_bytes": size,
        "samples": samples,
        "batch": batch,
        "threads": options.threads,
        "processes": not options.no_processes,
        "files_per_s": {name: round(rate) for name, rate in median.items()},
        "share": round(median["writer"] / median["loop"], 3),
        "rounds": {name: [round(rate) for rate in values] for name, values in rates.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
