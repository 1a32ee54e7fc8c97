"""What --durability costs: the writer alone, fed from memory as fast as it takes it.

usage: durability.py FOLDER [--samples N] [--kib SIZE_OF_ONE]; the last line is JSON.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch

from extractor.files import Durability
from extractor.layouts.native import Native
from extractor.output.journal import JOURNAL, Journal
from extractor.records import Batch, Sample
from extractor.write.buffers import HostRing
from extractor.write.staging import StagedBatch
from extractor.write.writer import ORDINARY, Workers, Writer

HIDDEN, STATES, BATCH = 1024, ("1", "2", "4", "final"), 32
MODES: tuple[Durability, ...] = ("none", "group", "file")


def write(
    folder: Path,
    mode: Durability,
    batches: int,
    tokens: int,
    threads: int = 4,
    *,
    batch: int = BATCH,
    processes: bool = False,
    at_once: bool = False,
    workers: Workers = ORDINARY,
) -> float:
    """Seconds to write that many batches of `batch` samples, which lie in host memory as a GPU's copies
    leave them."""
    layout = Native(stored=STATES, hidden=HIDDEN, dtype=torch.bfloat16, model="m")
    planes = layout.planes
    size = batch * tokens
    nbytes = size * layout.row_bytes
    ring = HostRing(nbytes, 4, pinned=False, shared=processes)
    held = [ring.acquire(nbytes, lambda: None) for _ in range(4)]
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    for buffer in held:  # not zeros, which a filesystem could skip
        for piece in buffer.tensor.split(len(noise)):
            piece.copy_(noise[: len(piece)])
        ring.release(buffer)
    finite = torch.ones(len(planes), size, dtype=torch.bool)
    journal = Journal(folder / JOURNAL / "0000.jsonl", sync=mode != "none")
    ids, mask = torch.arange(tokens), torch.ones(tokens, dtype=torch.uint8)
    writer = Writer(
        folder,
        journal,
        ring,
        layout=layout,
        threads=threads,
        at_once=at_once,
        processes=processes,
        durability=mode,
        workers=workers,
    )
    writer.wait_until_ready()
    begun = time.perf_counter()
    try:
        for number in range(batches):
            samples = tuple(
                Sample(
                    row=number * batch + i,
                    turn=0,
                    id=str(i),
                    source="-",
                    input_ids=ids,
                    loss_mask=mask,
                )
                for i in range(batch)
            )
            buffer = ring.acquire(nbytes, writer.check)
            writer.submit(StagedBatch(Batch.of(number, samples), planes, buffer, finite))
        writer.drain()
        return time.perf_counter() - begun
    finally:
        writer.end_processes()
        ring.close()
        journal.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--kib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokens = max(options.kib * 1024 // (HIDDEN * 2 * len(STATES)), 1)
    megabytes = options.samples * tokens * HIDDEN * 2 * len(STATES) / 1e6
    best: dict[str, float] = {}
    for _ in range(options.rounds):  # one after the other each round: a busy machine is fair to all
        for mode in MODES:
            folder = options.folder / f"durability-{mode}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            seconds = write(folder, mode, options.samples // BATCH, tokens)
            best[mode] = max(best.get(mode, 0.0), megabytes / seconds)
            shutil.rmtree(folder)
    result = {mode: round(rate, 1) for mode, rate in best.items()}
    for mode, rate in result.items():
        samples = rate / megabytes * options.samples
        print(f"{mode}: {samples:,.0f} samples/s, {rate:,} MB/s")
    print(json.dumps({"unit": "MB/s", "kib": options.kib, **result}))


if __name__ == "__main__":
    main()
