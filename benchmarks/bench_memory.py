"""Host memory over a long run of short samples: is it flat, and within what the program said.

    python -m benchmarks.bench_memory --shape qwen3-0.6b --samples 50000 --output /dev/shm/out
    python -m benchmarks.bench_memory --model SMOLLM2 --device cpu --samples 50000 --longest 16 \\
        --layers 0 --output /tmp/out

The program as its users start it; the writer's own resident memory (files that it maps left out), looked
at every tenth of a second from outside. JSON last: at each tenth of the run, and what run.json says.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import Child, extract, last_words
from benchmarks.shapes import SHAPES, model_folder, write_rows, write_shape
from extractor.run.meter import resident_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--shape", choices=SHAPES)
    target.add_argument("--model", type=model_folder)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--longest", type=int, default=256, help="lengths are uniform up to this")
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-memory-"))
    try:
        model = write_shape(args.shape, work) if args.shape else args.model
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        counts = np.random.default_rng(0).integers(1, args.longest + 1, args.samples).tolist()
        rows = write_rows(work / "rows.jsonl", counts, vocab)
        result = run(args, model, rows)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(args.output, ignore_errors=True)
    print(json.dumps(result))


def run(args: argparse.Namespace, model: Path, rows: Path) -> dict[str, Any]:
    shutil.rmtree(args.output, ignore_errors=True)
    budget = ("--batch-tokens", str(args.batch_tokens)) if args.batch_tokens else ()
    flags = ("--device", args.device, "--layers", args.layers, *budget)
    given = [*args.sglang, *(["load_format=dummy"] if args.shape else [])]
    child = Child(extract(model, rows, args.output, *flags, sglang=given), rows.parent / "log")
    seen: list[tuple[float, int]] = []
    try:
        while not child.ended:
            with contextlib.suppress(OSError):  # it is gone
                if nbytes := resident_bytes(child.pid):  # nor is it a zombie
                    seen.append((time.time(), nbytes))
            time.sleep(0.1)
    finally:
        child.end()
    if child.code:
        sys.exit(f"bench_memory: exit code {child.code}: {last_words(child.text)}")
    described = json.loads((args.output / "run.json").read_text())
    (replica,) = described["replicas"]
    begun = seen[-1][0] - described["stages"]["run"]
    inside = [(at - begun, nbytes) for at, nbytes in seen if at >= begun]
    tenths = [inside[(len(inside) - 1) * n // 10][1] for n in range(11)]
    settled = tenths[2:]
    return {
        "benchmark": "bench_memory",
        "model": args.shape or str(args.model),
        "date": time.strftime("%Y-%m-%d"),
        "device": args.device,
        "samples": replica["samples"],
        "tokens": replica["tokens"],
        "gb_written": round(replica["bytes"] / 1e9, 2),
        "seconds": replica["seconds"],
        "host_memory": replica["host_memory"],
        "over_before": replica["host_memory"]["most"] - replica["host_memory"]["before"],
        "mib_by_tenth": [round(nbytes / (1 << 20), 1) for nbytes in tenths],
        "growth_after_second_tenth_mib": round((max(settled) - settled[0]) / (1 << 20), 1),
    }


if __name__ == "__main__":
    main()
