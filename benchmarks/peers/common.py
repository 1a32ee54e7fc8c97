"""What every peer's program takes and gives back, so that all are timed and counted the same way.

A pass is over all samples: from the moment the first forward may begin until the last file is closed.
The first pass compiles kernels and fills caches, and does not count.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all of them take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--model", required=True, help="a folder with config.json; weights are dummies"
    )
    made.add_argument("--rows", type=Path, required=True, help="JSON lines with input_ids")
    made.add_argument(
        "--layers", required=True, help="0-based layers whose output is kept: 1,17,32"
    )
    made.add_argument("--output", type=Path, required=True, help="emptied between passes")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--device", default="cuda")
    return made


def layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def read_rows(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [json.loads(line)["input_ids"] for line in lines]


def measure(
    args: argparse.Namespace,
    rows: Sequence[Sequence[int]],
    one_pass: Callable[[Path], None],
    *,
    files: str | None,
    packages: Sequence[str],
    settings: dict[str, Any],
) -> None:
    """Warm up, time the passes, and print the line of JSON that bench_peers.py looks for.

    files: a pattern of what one sample leaves behind, counted after each pass; None if nothing is
    written. A peer that loses samples fails here, since a rate of tokens that were dropped is no rate.
    """
    tokens = sum(map(len, rows))
    runs: list[dict[str, float]] = []
    for number in range(args.repeats + 1):
        shutil.rmtree(args.output, ignore_errors=True)
        args.output.mkdir(parents=True)
        _synchronize(args.device)
        begun = time.perf_counter()
        one_pass(args.output)
        seconds = time.perf_counter() - begun
        written = [path.stat().st_size for path in args.output.rglob(files)] if files else []
        if files and len(written) != len(rows):
            raise RuntimeError(f"{len(written)} files of {len(rows)} samples in {args.output}")
        run = {
            "tokens_per_s": round(tokens / seconds),
            "gb_per_s": round(sum(written) / seconds / 1e9, 3),
            "seconds": round(seconds, 3),
        }
        print("warm-up" if number == 0 else f"pass {number}", run, flush=True)
        if number:
            runs.append(run)
    shutil.rmtree(args.output, ignore_errors=True)
    cuda = args.device != "cpu"
    result = {
        "peer_result": 1,
        "samples": len(rows),
        "tokens": tokens,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {name: metadata.version(name) for name in ("torch", *packages)},
        "settings": settings,
        "runs": runs,
    }
    print(json.dumps(result), flush=True)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
