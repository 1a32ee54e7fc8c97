"""How fast a trainer can read a folder: `python benchmarks/bench_reader.py [--gib 1] [--threads 2]`.

Writes samples like those of an 8B model (4 states of 4,096 bfloat16) with the real writer, warms the
page cache, and reads them on the cores given, in threads, as torch releases the interpreter in copies:

- `memcpy`: copy memory to memory, what nothing can beat;
- `mmap`: map each file and copy its bytes, what the system itself gives;
- `items`: HiddenStates' items, every state copied once into a buffer;
- `joined`: three states side by side and the fourth apart, which must be assembled;
- `batches`: the same with Pad in batches of samples of like length;
- `loader`: `batches` through a DataLoader with as many worker processes.

Each is the best of five rounds, interleaved, so that a busy machine slows all of them alike. The last
line is JSON; the goal is 3 GB/s, or 80 % of mmap, for `items`.
"""

import argparse
import json
import mmap
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extractor.dataset import HiddenStates, LengthBatchSampler, Pad
from extractor.records import Sample
from tests.support.written import make_layout, write_folder

HIDDEN, STATES, ROUNDS = 4096, 4, 5
JOINED = {"aux": ("1", "3", "4"), "target": ("final",)}


def make(folder: Path, gib: float) -> None:
    rng = np.random.default_rng(0)
    token_bytes = HIDDEN * STATES * 2
    samples: list[Sample] = []
    while sum(map(len, samples)) * token_bytes < gib * (1 << 30):
        length = int(np.clip(rng.lognormal(6.2, 0.6), 64, 2048))
        samples.append(
            Sample(
                row=len(samples),
                turn=0,
                id=str(len(samples)),
                source="",
                input_ids=torch.zeros(length, dtype=torch.int64),
                loss_mask=torch.ones(length, dtype=torch.uint8),
            )
        )
    layout = make_layout(samples=samples, hidden=HIDDEN)
    write_folder(folder, layout, samples, batch=1)


def spread(work: Callable[[int, torch.Tensor], int], count: int, threads: int) -> int:
    """work(i, buffer of this thread) for i in range(count), on threads; returns bytes moved."""

    def part(thread: int) -> int:
        return sum(work(i, buffers[thread]) for i in range(thread, count, threads))

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(part, range(threads)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the threads here are the parallelism
    folder = Path(tempfile.mkdtemp(prefix="bench_reader_"))
    try:
        make(folder, options.gib)
        print(json.dumps(measure(folder, options.threads)))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, threads: int) -> dict[str, float | int | bool]:
    apart, joined = HiddenStates(folder), HiddenStates(folder, JOINED)
    paths = [apart.path(i) for i in range(len(apart))]
    largest = max(path.stat().st_size for path in paths)
    buffers[:] = [torch.zeros(largest, dtype=torch.uint8) for _ in range(threads)]
    source = torch.ones(largest, dtype=torch.uint8)
    batches = list(LengthBatchSampler(joined.lengths, max_tokens=4096))
    pad = Pad()

    def memcpy(i: int, buffer: torch.Tensor) -> int:
        size = paths[i].stat().st_size
        buffer[:size].copy_(source[:size])
        return size

    def mapped(i: int, buffer: torch.Tensor) -> int:
        with paths[i].open("rb") as handle:
            memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        buffer[: len(memory)].copy_(torch.frombuffer(memory, dtype=torch.uint8))
        return len(memory)

    def items(data: HiddenStates) -> Callable[[int, torch.Tensor], int]:
        def work(i: int, buffer: torch.Tensor) -> int:
            moved = 0
            for value in data[i].values():
                if isinstance(value, torch.Tensor):
                    buffer[: value.nbytes].view(value.dtype).copy_(value.view(-1))
                    moved += value.nbytes
            return moved

        return work

    def batch(i: int, _: torch.Tensor) -> int:
        return useful(pad([joined[j] for j in batches[i]]))

    def loader() -> int:
        return sum(map(useful, reader))

    reader = DataLoader(
        joined, batch_sampler=batches, collate_fn=pad, num_workers=threads, persistent_workers=True
    )
    rounds: dict[str, Callable[[], int]] = {
        "memcpy": lambda: spread(memcpy, len(paths), threads),
        "mmap": lambda: spread(mapped, len(paths), threads),
        "items": lambda: spread(items(apart), len(paths), threads),
        "joined": lambda: spread(items(joined), len(paths), threads),
        "batches": lambda: spread(batch, len(batches), threads),
        "loader": loader,
    }
    best = dict.fromkeys(rounds, 0.0)
    for _ in range(ROUNDS):
        for name, run in rounds.items():
            begun = time.perf_counter()
            best[name] = max(best[name], run() / (time.perf_counter() - begun) / 1e9)
    for name, rate in best.items():
        print(f"{name:>8}  {rate:6.2f} GB/s")
    return {
        "samples": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
        "threads": threads,
        **{f"{name}_gb_s": round(rate, 2) for name, rate in best.items()},
        "of_mmap": round(best["items"] / best["mmap"], 3),
        "goal_met": best["items"] >= 3 or best["items"] >= 0.8 * best["mmap"],
    }


def useful(batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the states, padding left out."""
    tokens = int(batch["lengths"].sum())
    widths: Sequence[torch.Tensor] = [batch["aux"], batch["target"]]
    return sum(tokens * value.shape[-1] * value.element_size() for value in widths)


buffers: list[torch.Tensor] = []

if __name__ == "__main__":
    main()
