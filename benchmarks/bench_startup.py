"""From the start of the process to the first file on disk, beside what imports and weights take.

Imports are the stages "start" (the interpreter, PyTorch and this program) and "import" (SGLang).

    python -m benchmarks.bench_startup --shape qwen3-8b --weights /dev/shm/weights --output /dev/shm/out
    python -m benchmarks.bench_startup --model SMOLLM2 --device cpu --output /tmp/out

The program as its users start it, --repeats times in turn; the first finds files and kernels as they
are, the others in memory. A shape's weights are random, written as a checkpoint by transformers to
--weights where there is none. Seconds; JSON last.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.children import Child, extract, last_words
from benchmarks.shapes import SHAPES, lengths, model_folder, write_rows, write_shape

SHARD = "5GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--shape", choices=SHAPES)
    target.add_argument("--model", type=model_folder)
    parser.add_argument("--weights", type=Path, help="where a shape's checkpoint is, or is made")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-startup-"))
    try:
        model = checkpoint(args, work) if args.shape else args.model
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        rows = write_rows(work / "rows.jsonl", lengths(args.samples, args.longest), vocab)
        starts = [one_start(args, model, rows) for _ in range(args.repeats)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        json.dumps(
            {
                "benchmark": "bench_startup",
                "model": args.shape or str(args.model),
                "date": time.strftime("%Y-%m-%d"),
                "device": args.device,
                "starts": starts,
            }
        )
    )


def checkpoint(args: argparse.Namespace, work: Path) -> Path:
    """A folder of the shape with random weights in bfloat16."""
    folder = args.weights or work / "weights"
    if not (folder / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(write_shape(args.shape, work))
        with torch.device(args.device):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder, max_shard_size=SHARD)
        # As published: transformers' own way of writing a config differs by release.
        shutil.copy(work / args.shape / "config.json", folder / "config.json")
    return folder


def one_start(args: argparse.Namespace, model: Path, rows: Path) -> dict[str, Any]:
    shutil.rmtree(args.output, ignore_errors=True)
    flags = ("--device", args.device, "--layers", args.layers)
    child = Child(
        extract(model, rows, args.output, *flags, sglang=args.sglang), rows.parent / "log"
    )
    first = None
    try:
        while not child.ended:
            if first is None and next(args.output.glob("samples/*/*.safetensors"), None):
                first = time.monotonic() - child.begun
            time.sleep(0.01)
        ended = time.monotonic() - child.begun
    finally:
        child.end()
    if child.code or first is None:
        sys.exit(f"bench_startup: exit code {child.code}: {last_words(child.text)}")
    stages = json.loads((args.output / "run.json").read_text())["stages"]
    shutil.rmtree(args.output)
    found = {
        "first_file": round(first, 2),
        "over_imports_and_load": round(
            first - stages["start"] - stages["import"] - stages["load"], 2
        ),
        "ended": round(ended, 2),
        "stages": stages,
    }
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
