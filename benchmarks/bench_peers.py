"""This program and its peers on the same samples, one after the other, from tokens to files.

    python -m benchmarks.bench_peers --shape qwen3-8b --samples 256 --output /dev/shm/peers \\
        --extractor-path SITE --vllm-path VLLM --specforge-path SPECFORGE \\
        --sglang attention_backend=triton

Each runs in a process of its own, with its own PYTHONPATH: no two agree on their dependencies.
Every rate is of real tokens, padding excluded, from the first forward to the last file closed, after
one pass over the same data that does not count; the median of --repeats. Slow ones get the first
--slow-samples of the same samples. One that did not run is in the table with the reason. The last line
is JSON.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, Child, Deadlines, Failed, last_json, sglang_flags
from benchmarks.shapes import SHAPES, lengths, write_rows, write_shape
from extractor.states import States

OURS = "extractor"


@dataclass(frozen=True)
class Peer:
    """What to run, and under which packages."""

    title: str
    command: Callable[["Job"], list[str]]
    packages: str  # which --NAME-path and --NAME-python are its own
    slow: bool = False
    writes: bool = True  # else a rate of the bare engine, which ours is not compared with


@dataclass(frozen=True)
class Job:
    """The data of one run, as the children see it."""

    args: argparse.Namespace
    model: Path
    layers: str
    rows: Path
    slow_rows: Path
    output: Path

    def runner(self, name: str, *more: str, slow: bool = False) -> list[str]:
        """A program of benchmarks/peers/ with the arguments that all of them take."""
        return [
            *("-m", f"benchmarks.peers.{name}", "--model", str(self.model)),
            *("--rows", str(self.slow_rows if slow else self.rows), "--layers", self.layers),
            *("--output", str(self.output), "--repeats", str(self.args.repeats)),
            *("--device", self.args.device, *more),
        ]


@dataclass
class Outcome:
    """One line of the table: rates, or why there are none."""

    title: str
    command: str
    why: str | None = None
    samples: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    gb_per_s: float = 0.0
    writes: bool = True
    details: dict[str, Any] = field(default_factory=dict)


def ours(job: Job) -> list[str]:
    args = job.args
    named = ["--shape", args.shape] if args.shape else ["--model", args.model]
    more = sglang_flags(args.sglang)
    if args.batch_tokens:
        more += ["--batch-tokens", str(args.batch_tokens)]
    return [
        *("-m", "benchmarks.bench_extract", *named, "--device", args.device),
        *("--samples", str(args.samples), "--longest", str(args.longest)),
        *("--layers", args.layers, "--repeats", str(args.repeats), "--output", str(job.output)),
        *more,
    ]


def vllm(job: Job, bare: bool = False) -> list[str]:
    more = [part for item in job.args.vllm_set for part in ("--set", item)]
    if job.args.batch_tokens:
        more += ["--batch-tokens", str(job.args.batch_tokens)]
    return job.runner("run_vllm", *more, *(["--bare"] if bare else []))


def specforge(job: Job) -> list[str]:
    args = job.args
    script = args.specforge_script
    if script is None:
        script = Path(args.specforge_path or ".") / "scripts/prepare_hidden_states.py"
    return job.runner(
        "run_specforge",
        *("--script", str(script), "--batch-size", str(args.specforge_batch)),
        *("--max-length", str(args.longest), "--attention-backend", args.specforge_attention),
        slow=True,
    )


PEERS = {
    OURS: Peer("this program", ours, OURS),
    "vllm": Peer("vLLM, extract_hidden_states", vllm, "vllm"),
    "vllm-bare": Peer(
        "vLLM, nothing extracted", lambda job: vllm(job, bare=True), "vllm", writes=False
    ),
    "specforge": Peer("SpecForge, its own generator", specforge, "specforge", slow=True),
    "transformers": Peer(
        "transformers, batch 1, torch.save",
        lambda job: job.runner("run_transformers", slow=True),
        "transformers",
        slow=True,
    ),
    "transformers-backbone": Peer(
        "the same without lm_head",
        lambda job: job.runner("run_transformers", "--backbone", slow=True),
        "transformers",
        slow=True,
    ),
}


def main() -> None:
    args = parse()
    work = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    try:
        result = run(args, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result))
    failed = [name for name in args.peers if "not_run" in result["peers"][name]]
    sys.exit(1 if OURS in failed else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--shape", choices=SHAPES)
    target.add_argument("--model", help="a folder with config.json; peers give it dummy weights")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--slow-samples", type=int, default=64, help="for SpecForge, transformers")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, help="ours and vLLM's; default: each its own")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=list(PEERS),
        help=f"some of {','.join(PEERS)}; default: all, in this order",
    )
    parser.add_argument("--output", type=Path, help="where files go; default: a temporary folder")
    parser.add_argument("--logs", type=Path, help="keep what each printed in this folder")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each")
    for name in sorted({peer.packages for peer in PEERS.values()}):
        parser.add_argument(f"--{name}-path", help="goes before PYTHONPATH for this one")
        parser.add_argument(f"--{name}-python", default=sys.executable)
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE", help="ours")
    parser.add_argument("--vllm-set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--specforge-script", type=Path, help="its prepare_hidden_states.py")
    parser.add_argument("--specforge-batch", type=int, default=32)
    parser.add_argument("--specforge-attention", default="triton")
    args = parser.parse_args()
    unknown = sorted(set(args.peers) - set(PEERS))
    if unknown:
        parser.error(f"--peers {','.join(unknown)}: there are {', '.join(PEERS)}")
    args.slow_samples = min(args.slow_samples, args.samples)
    return args


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    model = write_shape(args.shape, work) if args.shape else Path(args.model).resolve()
    config = json.loads((model / "config.json").read_text())
    states = States.resolve(args.layers, True, config["num_hidden_layers"])
    counts = lengths(args.samples, args.longest)
    vocab = config["vocab_size"]
    job = Job(
        args,
        model,
        ",".join(map(str, states.layers)),
        write_rows(work / "rows.jsonl", counts, vocab),
        # numpy draws one number after the other, so these are the first of the samples above.
        write_rows(work / "slow.jsonl", counts[: args.slow_samples], vocab),
        args.output or work / "out",
    )
    logs = args.logs or work
    logs.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    deadlines = Deadlines()  # what was measured is printed, whoever ends this early
    for name in args.peers:
        outcomes[name] = measure(PEERS[name], job, logs / f"{name}.log", deadlines)
        print(line(outcomes[name], outcomes.get(OURS)), flush=True)
        shutil.rmtree(job.output, ignore_errors=True)
    print(f"\n{HEADING}")
    for outcome in outcomes.values():
        print(line(outcome, outcomes.get(OURS)))
    return {
        "benchmark": "bench_peers",
        "command": shlex.join(["python", "-m", "benchmarks.bench_peers", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": next((o.details["device"] for o in outcomes.values() if not o.why), None),
        "model": args.shape or args.model,
        "states": list(states.names),
        "samples": args.samples,
        "slow_samples": args.slow_samples,
        "longest": args.longest,
        "repeats": args.repeats,
        "peers": {name: record(outcome, outcomes.get(OURS)) for name, outcome in outcomes.items()},
    }


def measure(peer: Peer, job: Job, log: Path, deadlines: Deadlines) -> Outcome:
    """Run it, and read the line of JSON it ended with. Whatever went wrong is an outcome too."""
    args = job.args
    command = [getattr(args, f"{peer.packages}_python"), *peer.command(job)]
    outcome = Outcome(peer.title, shlex.join(command[1:]), writes=peer.writes)
    if deadlines.asked:
        outcome.why = f"{deadlines.asked} came before its turn"
        return outcome
    own_path = getattr(args, f"{peer.packages}_path")
    if own_path and not Path(own_path).is_dir():
        outcome.why = f"--{peer.packages}-path {own_path} is not a folder"
        return outcome
    paths = [own_path, str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "WANDB_MODE": "disabled",
    }
    child = Child(command, log, environment)
    code: int | None = None
    with contextlib.suppress(Failed):
        # With its helpers: an engine left behind would keep the GPU's memory from the next one.
        code = child.wait(deadlines.after(args.timeout))
    seconds = time.monotonic() - child.begun
    text = child.text
    found = None if code != 0 else last_json(text, is_result)
    if found is None:
        printed = text.splitlines()
        said = next((each.strip() for each in reversed(printed) if each.strip()), "nothing")
        ended = f"stopped after {seconds:.0f} s" if code is None else f"exit code {code}"
        outcome.why = f"{ended}; it said last: {said[:200]}"
        print(*printed[-25:], sep="\n", file=sys.stderr)
        return outcome
    fill(outcome, found)
    outcome.details["whole_run_s"] = round(seconds, 1)
    return outcome


def is_result(found: dict[str, Any]) -> bool:
    return "peer_result" in found or found.get("benchmark") == "bench_extract"


def fill(outcome: Outcome, found: dict[str, Any]) -> None:
    """Medians of its passes. bench_extract's own JSON calls the rate of the whole pipeline so."""
    whole = found.get("benchmark") == "bench_extract"
    key = "whole_tokens_per_s" if whole else "tokens_per_s"
    outcome.samples, outcome.tokens = found["samples"], found["tokens"]
    outcome.tokens_per_s = statistics.median(run[key] for run in found["runs"])
    outcome.gb_per_s = statistics.median(run["gb_per_s"] for run in found["runs"])
    outcome.details = {k: v for k, v in found.items() if k not in ("peer_result", "benchmark")}


HEADING = f"{'':36} {'samples':>7} {'tokens/s':>10} {'GB/s':>6}  ours is"


def line(outcome: Outcome, first: Outcome | None) -> str:
    if outcome.why:
        return f"{outcome.title:36} not run: {outcome.why}"
    written = f"{outcome.gb_per_s:6.2f}" if outcome.writes else f"{'-':>6}"
    times = ratio(outcome, first)
    return (
        f"{outcome.title:36} {outcome.samples:7,} {outcome.tokens_per_s:10,.0f} {written}"
        f"  {'' if times is None else f'{times:.3g} times as fast'}"
    ).rstrip()


def ratio(outcome: Outcome, first: Outcome | None) -> float | None:
    """Our tokens a second over theirs, where both were measured."""
    if first is None or first is outcome or first.why or outcome.why:
        return None
    return round(first.tokens_per_s / outcome.tokens_per_s, 3)


def record(outcome: Outcome, first: Outcome | None) -> dict[str, Any]:
    base = {"title": outcome.title, "command": outcome.command}
    if outcome.why:
        return base | {"not_run": outcome.why}
    return base | {
        "samples": outcome.samples,
        "tokens": outcome.tokens,
        "tokens_per_s": outcome.tokens_per_s,
        "gb_per_s": outcome.gb_per_s if outcome.writes else None,
        "ours_over_theirs": ratio(outcome, first),
        "details": outcome.details,
    }


if __name__ == "__main__":
    main()
