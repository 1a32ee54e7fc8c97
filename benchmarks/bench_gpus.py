"""The program on all GPUs of a machine, as its users start it: are the states right, what does it cost.

    python -m benchmarks.bench_gpus --output /dev/shm/bench
    python -m benchmarks.bench_gpus --output /dev/shm/bench --only states,kill
    python -m benchmarks.bench_gpus --output /tmp/bench --device cpu        # two cores, tiny models

Parts, each with a time-out of its own, none of which stops the others:
    startup   start-up of tensor parallelism over all GPUs, by stage, twice: the second time with all
              files in memory and all kernels built
    states    every state of small random models against transformers, at every power of two of ranks
    fused     the same with SGLang's fused all-reduce, where that can run; kernels are compiled in it
    share     the whole pipeline against the bare forward, over all GPUs, with one writer
    replicas  as many replicas as GPUs, and half as many of two each, against one
    kill      a rank that dies in mid-run: how soon all have ended, and whether a second start completes

A table, and JSON as the last line, beside a line of JSON as each part ends. Exit code 1 when a part
failed; what this machine cannot do is named, as "unavailable", and is no failure. SIGTERM or Ctrl-C
ends what runs, and prints what there is.

GPUs that share a host with others' may need NVLink multicast off: NCCL_NVLS_ENABLE=0,
TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NVSHMEM_DISABLE_NVLS=1. Whatever is set reaches every process, and is
in the JSON. SGLang's own all-reduce kernels are off (disable_custom_all_reduce): they serve
messages of at most 16 MB, are compiled at the first start and share memory in a way that asks for
multicast; --custom-all-reduce leaves them on.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import (
    Child,
    Deadline,
    Deadlines,
    Failed,
    alive,
    last_json,
    last_words,
    rank_of,
    run,
    sglang_flags,
    torchrun,
)
from benchmarks.gpu_watch import GpuWatch, means
from benchmarks.shapes import SHAPES, lengths, write_rows, write_shape
from benchmarks.timed import read_marks
from benchmarks.together import Together, together
from tests.support import models
from tests.support.parity_ledger import complaints, parse

MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
# Plain, with a norm on queries and keys, and a mixture of experts with latent attention; and states
# that include the stream before the first layer and the last layer's own.
FAMILIES = {
    "tiny_llama": ["0,2,4", "5,3,embed,1"],
    "tiny_qwen3": ["0,2,4", "5,3,embed,1"],
    "tiny_dsv3": ["0,2,4", "9,3,embed,1"],
}
GIB = 1 << 30
# Whose latent is too narrow for FA3, which SGLang chooses on GPUs of compute capability 9.
NOT_FOR_FA3 = ("tiny_dsv3",)
# All ranks must be gone this long after one was killed, and all writers must end this near each other.
DEAD_SECONDS, SPREAD = 60.0, 0.05
# Replicas must be at work together for this part of a run, and as fast as this part of their number.
TOGETHER, SPEEDUP = 0.5, 0.9
SAMPLES_PER_GPU = 400
REPLICA_BATCH = 8192  # small, so that replicas can end together
OK, FAILED, UNAVAILABLE = "ok", "failed", "unavailable"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: within its part.
        status: OK, FAILED or UNAVAILABLE.
        note: for people.
        values: for programs.
    """

    what: str
    status: str
    note: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    gpus: int
    name: str
    gib: float  # of one GPU
    capability: str = ""
    cpu: bool = False


@dataclass(frozen=True)
class Setting:
    """What all parts share.

    Attributes:
        small, large: model folders for one GPU and for all together.
        flags: of every start of the program or of a benchmark, beside those.
        layers: of those models.
    """

    machine: Machine
    work: Path
    output: Path
    small: Path
    large: Path
    layers: str
    longest: int
    batch_tokens: int | None
    samples: int
    repeats: int
    jobs: int
    sglang: tuple[str, ...]
    dummy: bool
    families: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return self.machine.gpus

    @property
    def device(self) -> str:
        return "cpu" if self.machine.cpu else "cuda"

    def sglang_flags(self) -> list[str]:
        extra = ("load_format=dummy",) if self.dummy else ()
        return sglang_flags((*self.sglang, *extra))

    def rows(self, samples: int) -> Path:
        path = self.work / f"rows-{samples}-{self.longest}.jsonl"
        if not path.exists():
            vocab = min(self._config(model)["vocab_size"] for model in (self.small, self.large))
            write_rows(path, lengths(samples, self.longest), vocab)
        return path

    def fits(self, model: Path, samples: int) -> int:
        """As many samples, or what fits into half of the output folder's space."""
        config = self._config(model)
        token = 2 * config["hidden_size"] * (len(self.layers.split(",")) + 1)
        if self.layers == "eagle3":
            token = 2 * config["hidden_size"] * 4
        mean = sum(lengths(samples, self.longest)) / samples
        self.output.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.output).free
        return max(min(samples, int(free / 2 / token / mean)), 1)

    def attention(self, family: str) -> tuple[str, ...]:
        """The backend that a small model needs where SGLang's default and the user's wish are none."""
        asked = any(value.startswith("attention_backend=") for value in self.sglang)
        if asked or family not in NOT_FOR_FA3 or not self.machine.capability.startswith("9."):
            return ()
        return ("attention_backend=triton",)

    def extract(
        self,
        ranks: int,
        tp: int,
        model: Path,
        samples: int,
        output: Path,
        *flags: str,
        program: tuple[str, ...] = ("launch/extract.py",),
    ) -> list[str]:
        """The program's own command line."""
        budget = ["--batch-tokens", str(self.batch_tokens)] if self.batch_tokens else []
        return torchrun(
            ranks,
            *program,
            *("--model", str(model), "--data", str(self.rows(samples))),
            *("--output", str(output), "--tp", str(tp), "--device", self.device),
            *("--layers", self.layers, *budget, *flags, *self.sglang_flags()),
        )

    @staticmethod
    def _config(model: Path) -> dict[str, Any]:
        return json.loads((model / "config.json").read_text())


# Parts --------------------------------------------------------------------------------------------


def startup(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Stages as the program notes them, and what the clock on the wall says of it all."""
    for number, name in enumerate(("first start", "second start")):
        output = fresh(setting.output / f"startup-{number}")
        mark = time.monotonic()
        command = setting.extract(setting.ranks, setting.ranks, setting.large, 8, output)
        run(command, setting.work / f"startup-{number}.log", deadline)
        wall = time.monotonic() - mark
        stages = read_run(output)["stages"]
        shown = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items())
        yield Row(name, OK, f"{shown}; {wall:.1f} s in all", {"wall": wall, **stages})
        shutil.rmtree(output)


def states(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    return _parity(setting, deadline, ())


def fused(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    if setting.machine.cpu:
        return iter([Row("all", UNAVAILABLE, "SGLang's fused all-reduce needs a GPU")])
    return _parity(setting, deadline, ("flashinfer_allreduce_fusion_backend=auto",))


def _parity(setting: Setting, deadline: Deadline, sglang: tuple[str, ...]) -> Iterator[Row]:
    """Families beside each other, for most of a run is import and compilation."""
    sizes = [2**n for n in range(1, 10) if 2**n <= setting.ranks]
    cases = [(name, tp) for tp in sizes for name in setting.families]
    # Before the workers, which would build the same one at the same time.
    folders = {name: models.build_weights(name, models.cache_folder()) for name, _ in cases}
    with concurrent.futures.ThreadPoolExecutor(setting.jobs) as pool:

        def one(case: tuple[str, int]) -> Row:
            return _family(setting, deadline, case[0], folders[case[0]], case[1], sglang)

        yield from pool.map(one, cases)


def _family(
    setting: Setting, deadline: Deadline, name: str, model: Path, tp: int, sglang: tuple[str, ...]
) -> Row:
    what, specs = f"{name} TP {tp}", FAMILIES[name]
    attention = setting.attention(name)
    worker = ("-m", "tests.support.parity_worker", str(model), setting.device, json.dumps(specs))
    log = setting.work / f"{name}-{tp}{'-fused' if sglang else ''}.log"
    try:
        text = run(torchrun(tp, *worker, *setting.sglang, *attention, *sglang), log, deadline)
        found = parse(text.splitlines())
        if [entry["layers"] for entry in found] != specs:
            raise Failed(f"judged {len(found)} of {len(specs)} choices: {last_words(text)}")
    except Failed as error:
        return Row(what, FAILED, str(error))
    results = [item for entry in found for item in entry["results"]]
    values = {
        "states": len({item["name"] for item in results}),
        "judged": len(results),
        "good": sum(item["good"] for item in results),
        "median": max(item["median"] for item in results),
        "noise": max(item["noise"] for item in results),
        "fused_all_reduce": found[0]["engine"]["fused_all_reduce"],
        "fused_calls": sum(entry["fused_calls"] for entry in found),
        "attention": found[0]["engine"]["attention_backend"],
    }
    if wrong := complaints(found):
        return Row(what, FAILED, "; ".join(wrong)[:500], values)
    note = f"{values['good']} of {values['judged']} good, {values['states']} states; median "
    note += f"{values['median']:.4f} against noise of {values['noise']:.4f}"
    if attention:
        note += f"; with {attention[0]}, for its latent is too narrow for FA3"
    if not sglang:
        return Row(what, OK, note, values)
    if values["fused_all_reduce"] != "on":
        note = f"SGLang cannot use its fused all-reduce here (see {log.name}); without it {note}"
        return Row(what, UNAVAILABLE, note, values)
    if not values["fused_calls"]:
        return Row(what, UNAVAILABLE, f"this model never calls it; {note}", values)
    return Row(what, OK, f"{values['fused_calls']} fused calls; {note}", values)


def share(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    samples = setting.fits(setting.large, setting.samples)
    # As in the other parts, so that a CPU's few and short samples make more than one batch.
    budget = ["--batch-tokens", str(setting.batch_tokens)] if setting.batch_tokens else []
    command = torchrun(
        setting.ranks,
        *("-m", "benchmarks.bench_extract", "--tp", str(setting.ranks)),
        *("--model", str(setting.large), "--device", setting.device, "--layers", setting.layers),
        *("--samples", str(samples), "--longest", str(setting.longest), *budget),
        *("--repeats", str(setting.repeats), "--output", str(setting.output / "share")),
        *setting.sglang_flags(),
    )
    text = run(command, setting.work / "share.log", deadline)
    result = last_json(text)
    if result is None:
        raise Failed(f"no result: {last_words(text)}")
    last = result["runs"][-1]
    writer, others = last["ranks"][0], last["ranks"][1:]
    copies = f"{result['copy_gb_per_s']} GB/s by themselves" if "copy_gb_per_s" in result else "-"
    yield Row(
        f"TP {setting.ranks}, {setting.large.name}",
        OK,
        f"share {result['share']:.3f}: bare {result['bare_tokens_per_s']:,}, whole "
        f"{result['whole_tokens_per_s']:,} tokens/s",
        result,
    )
    yield Row(
        "rank 0",
        OK,
        f"files {result['gb_per_s']:.2f} GB/s; copies {copies}; of {writer['seconds']} s "
        f"{writer['in_passes']} in passes; waits {last['waits']}",
        writer | {"waits": last["waits"]},
    )
    for rank, numbers in enumerate(others, start=1):
        note = (
            f"of {numbers['seconds']} s {numbers['in_passes']} in passes; its thread launched for "
        )
        note += f"{numbers['launching']} s and waited {numbers['for_writer']} s for rank 0's word"
        yield Row(f"rank {rank}", OK, note, numbers)


@dataclass(frozen=True)
class Replicas:
    """A run of some replicas, and how fast they were while all were at work.

    Attributes:
        together: that time, and the rates in it.
        spread: how far apart the writers ended, as a part of the run.
        values: for the JSON: each one's own numbers, and what nvidia-smi saw meanwhile.
    """

    samples: int
    together: Together
    spread: float
    values: dict[str, Any]

    @property
    def note(self) -> str:
        each = ", ".join(f"{rate:,.0f}" for rate in self.together.rates)
        return f"{self.together.rate:,.0f} tokens/s ({each}), {self.samples:,} samples"


def replicas(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    kinds = [(setting.ranks, 1)]
    if setting.ranks >= 4 and setting.ranks % 2 == 0:
        kinds.append((setting.ranks, 2))
    each = setting.fits(setting.small, setting.samples * setting.ranks) // setting.ranks
    for ranks, tp in kinds:
        count = ranks // tp
        alone = _replicas(setting, deadline, tp, tp, each)
        yield Row(f"1 replica of TP {tp}", OK, alone.note, alone.values)
        found = _replicas(setting, deadline, ranks, tp, each * count)
        speedup = found.together.rate / alone.together.rate if alone.together.rate else 0.0
        problems = slow_together(found, speedup / count)
        note = f"{found.note}; {speedup:.2f} times one ({speedup / count:.0%} of {count}) in the "
        note += (
            f"{found.together.seconds:.1f} s in which all worked; every sample once; writers ended "
        )
        note += f"within {found.spread:.1%}"
        yield Row(
            f"{count} replicas of TP {tp}",
            FAILED if problems and not setting.machine.cpu else OK,
            "; ".join([*problems, note]),
            found.values | {"speedup": speedup},
        )


def slow_together(found: Replicas, part: float) -> list[str]:
    """What is wrong with replicas that are `part` times their number as fast as one."""
    problems: list[str] = []
    if found.together.share < TOGETHER:
        problems.append(f"all worked in {found.together.share:.0%} of the run only")
    elif part < SPEEDUP:
        problems.append(f"{part:.0%} of their number times one")
    if found.spread > SPREAD:
        problems.append(f"writers ended {found.spread:.1%} apart")
    return problems


def _replicas(setting: Setting, deadline: Deadline, ranks: int, tp: int, samples: int) -> Replicas:
    name = f"replicas-{ranks // tp}x{tp}"
    output, marks = fresh(setting.output / name), fresh(setting.work / f"{name}-marks")
    budget = () if setting.batch_tokens else ("--batch-tokens", str(REPLICA_BATCH))
    program = ("-m", "benchmarks.timed", "--marks", str(marks))
    command = setting.extract(ranks, tp, setting.small, samples, output, *budget, program=program)
    with GpuWatch() as gpus:
        run(command, setting.work / f"{name}.log", deadline)
    check(setting, output, samples, deadline)
    told = read_run(output)
    entries = told["replicas"]
    if idle := [entry["replica"] for entry in entries if not entry["samples"]]:
        raise Failed(f"replica {idle[0]} of {ranks // tp} came too late for any sample")
    shutil.rmtree(output)
    found = together(entries)
    ends = [entry["began"] + entry["timeline"][-1][0] for entry in entries]
    begun = min(entry["began"] for entry in entries)
    return Replicas(
        samples=samples,
        together=found,
        spread=(max(ends) - min(ends)) / (max(ends) - begun),
        values={
            "samples": samples,
            "together": asdict(found),
            "stages": told["stages"],
            "replicas": [
                {**entry, "began": round(entry["began"] - begun, 3), "timeline": few(entry)}
                for entry in entries
            ],
            "ranks": [asdict(each) for each in read_marks(marks)],
            "gpus": [asdict(each) for each in means(gpus.samples, found.begin, found.end)],
        },
    )


def few(entry: dict[str, Any], most: int = 20) -> list[list[float]]:
    """Seconds and tokens of a timeline, at some of its points: the JSON is for people too."""
    points = entry["timeline"]
    return [point[:2] for point in points[:: -(-len(points) // most)]]


def kill(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    samples = setting.fits(setting.large, setting.samples)
    output = fresh(setting.output / "kill")
    command = setting.extract(setting.ranks, setting.ranks, setting.large, samples, output)
    child = Child(command, setting.work / "killed.log")
    try:
        processes = _kill_one(child, output, setting.ranks - 1, deadline)
        mark = time.monotonic()
        until = Deadline.after(DEAD_SECONDS)
        while alive(processes) and until.left and deadline.left:
            time.sleep(0.05)
        ended = time.monotonic() - mark
        left = alive(processes)
    finally:
        child.end()
    yield Row(
        f"rank {setting.ranks - 1} killed",
        FAILED if left or not child.code else OK,
        f"{len(processes)} processes ended in {ended:.1f} s"
        if not left
        else f"{len(left)} of {len(processes)} processes live after {ended:.0f} s",
        {"seconds": ended, "left": len(left), "said": last_words(child.text)},
    )
    before = finished(output)
    run(command, setting.work / "resumed.log", deadline)
    check(setting, output, samples, deadline, "--deep")
    started_from = read_run(output)["started_from"]
    note = f"went on from {started_from} of {samples} samples, and the check is clean"
    values = {"started_from": started_from, "samples": samples}
    # A file whose line was being written may be found whole, or be written again.
    status = OK if 0 < started_from <= before < samples else FAILED
    yield Row("the same command again", status, note, values)
    shutil.rmtree(output)


def _kill_one(child: Child, output: Path, rank: int, deadline: Deadline) -> dict[int, str]:
    """SIGKILL to a rank as soon as samples are finished; all the run's processes at that moment."""
    while not finished(output):
        if child.ended:
            raise Failed(f"ended before a rank could be killed: {last_words(child.text)}")
        if not deadline.left:
            raise Failed(f"no sample was written in time: {last_words(child.text)}")
        time.sleep(0.02)
    processes = child.pids
    victims = [pid for pid in processes if rank_of(pid) == rank]
    if not victims:
        raise Failed(f"rank {rank} had left when it was to be killed")
    os.kill(min(victims), signal.SIGKILL)
    return processes


# What parts share ---------------------------------------------------------------------------------


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def read_run(output: Path) -> dict[str, Any]:
    try:
        value = json.loads((output / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise Failed(f"run.json: {error}") from error
    return value


def finished(output: Path) -> int:
    """Lines of the journals so far."""
    return sum(path.read_bytes().count(b"\n") for path in (output / "journal").glob("*.jsonl"))


def check(
    setting: Setting, output: Path, samples: int, deadline: Deadline, *flags: str
) -> dict[str, Any]:
    """The program's own check, and that no journal has a row twice. Raises Failed."""
    command = [sys.executable, "-m", "extractor", "check", str(output), "--json", *flags]
    log = setting.work / f"check-{output.name}.log"
    text = run(command, log, deadline, codes=(0, 1))
    found = last_json(text)
    if found is None or not found["complete"]:
        raise Failed(f"check of {output.name}: {found or last_words(text)}"[:500])
    if not found["written"] == found["samples"] == samples:
        raise Failed(f"{found['written']} of {samples} samples written")
    lines = [
        json.loads(line)["row"]
        for path in (output / "journal").iterdir()
        for line in path.read_text().splitlines()
    ]
    if sorted(lines) != list(range(samples)):
        raise Failed(f"{len(lines)} journal lines for {samples} samples")
    return found


# What each is given, in seconds.
PARTS: dict[str, tuple[Callable[[Setting, Deadline], Iterator[Row]], float]] = {
    "startup": (startup, 180),
    "states": (states, 240),
    "fused": (fused, 420),
    "share": (share, 300),
    "replicas": (replicas, 480),
    "kill": (kill, 240),
}


def attempt(name: str, setting: Setting, deadline: Deadline) -> dict[str, Any]:
    """A part's rows and time; what goes wrong in it is a row, after those that it had."""
    part, _ = PARTS[name]
    mark = time.monotonic()
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(f"{name:<9} {row.what:<26} {row.status:<12} {row.note}", flush=True)

    try:
        for row in part(setting, deadline):
            add(row)
    except Failed as error:
        add(Row(name, FAILED, str(error)))
    except Exception as error:
        add(Row(name, FAILED, repr(error)[:500]))
    shutil.rmtree(setting.output, ignore_errors=True)
    status = next((s for s in (FAILED, OK) if any(r.status == s for r in rows)), UNAVAILABLE)
    return {
        "status": status,
        "seconds": round(time.monotonic() - mark, 1),
        "rows": [asdict(row) for row in rows],
    }


# The machine and what to run on it ----------------------------------------------------------------


def look(device: str, gpus: int | None) -> Machine:
    """How many GPUs there are, without a context on any of them."""
    if device == "cpu":
        return Machine(gpus or 2, f"cpu x{os.cpu_count()}", 0.0, cpu=True)
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench_gpus: no GPU was found ({error}); --device cpu runs the same on a CPU")
    found = [line.rsplit(", ", 2) for line in text.splitlines() if line.strip()]
    count = min(gpus or len(found), len(found))
    if count < 2:
        sys.exit(f"bench_gpus: {count} GPU; this needs two or more")
    name, mib, capability = found[0]
    return Machine(count, name, float(mib) / 1024, capability)


def choose_shape(machine: Machine) -> str:
    """The largest shape that leaves a GPU room for a batch; small machines get the small one."""
    weights = 141 / machine.gpus  # GB of llama-3-70b in bfloat16
    return "llama-3-70b" if machine.gpus >= 4 and weights + 40 < machine.gib else "qwen3-8b"


def settle(args: argparse.Namespace, machine: Machine) -> Setting:
    work = (args.work or args.output.with_name(args.output.name + "-work")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    sglang: list[str] = list(args.sglang)
    if not machine.cpu and args.custom_all_reduce:
        sglang.append("disable_custom_all_reduce=false")
    if not machine.cpu and args.attention != "default":
        sglang.append(f"attention_backend={args.attention}")
    output = args.output.resolve() / "bench-gpus"
    if machine.cpu:
        model = models.build_weights("tiny_qwen3", models.cache_folder())
        small = large = model
    else:
        small = write_shape(args.small_shape, work)
        large = write_shape(args.shape or choose_shape(machine), work)
    return Setting(
        machine=machine,
        work=work,
        output=output,
        small=small,
        large=large,
        layers="1,2,4" if machine.cpu else "eagle3",
        longest=args.longest or (256 if machine.cpu else 2048),
        batch_tokens=512 if machine.cpu else None,
        samples=args.samples or (60 if machine.cpu else SAMPLES_PER_GPU),
        repeats=1 if machine.cpu else 2,
        jobs=args.jobs or (1 if machine.cpu else 3),
        sglang=tuple(sglang),
        dummy=not machine.cpu,
        families=tuple(args.families.split(",")),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder on a tmpfs")
    parser.add_argument("--work", type=Path, help="logs and shapes stay here; default: OUTPUT-work")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART[,PART]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, help="fewer than there are")
    parser.add_argument("--shape", choices=SHAPES, help="over all GPUs; default: by memory")
    parser.add_argument("--small-shape", choices=SHAPES, default="qwen3-8b", help="of a replica")
    parser.add_argument("--samples", type=int, help="of a run, and of each replica")
    parser.add_argument("--longest", type=int, help="tokens of the longest sample")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--attention", default="triton", help='or "default"')
    parser.add_argument("--custom-all-reduce", action="store_true")
    parser.add_argument("--jobs", type=int, help="small models at the same time")
    parser.add_argument(
        "--patience", type=float, help="times every part's time-out; default: 1, and 3 on a CPU"
    )
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    for option, known in (("only", PARTS), ("families", FAMILIES)):
        if unknown := [name for name in getattr(args, option).split(",") if name not in known]:
            parser.error(f"--{option} {unknown[0]}: one of {', '.join(known)}")
    return args


def main() -> None:
    args = arguments()
    machine = look(args.device, args.gpus)
    setting = settle(args, machine)
    print(f"{machine.gpus} x {machine.name}; logs in {setting.work}", flush=True)
    patience = args.patience or (3.0 if machine.cpu else 1.0)
    parts: dict[str, dict[str, Any]] = {}
    deadlines = Deadlines()
    for name in args.only.split(","):
        if deadlines.asked:
            break
        parts[name] = attempt(name, setting, deadlines.after(PARTS[name][1] * patience))
        # Whoever ends this early still has what was measured.
        print(json.dumps({"part": name, **parts[name]}), flush=True)
    good = not deadlines.asked and all(part["status"] != FAILED for part in parts.values())
    print(table(parts), flush=True)
    result = {
        "benchmark": "bench_gpus",
        "date": time.strftime("%Y-%m-%d"),
        "gpus": machine.gpus,
        "device": machine.name,
        "models": {"one": setting.small.name, "all": setting.large.name},
        "sglang_args": setting.sglang,
        "multicast": {name: os.environ.get(name) for name in MULTICAST},
        "ok": good,
        "ended_by": deadlines.asked,
        "parts": parts,
    }
    print(json.dumps(result))
    sys.exit(0 if good else 1)


def table(parts: dict[str, dict[str, Any]]) -> str:
    """All rows once more, in Markdown, after what the children wrote in between."""
    lines = ["", "| part | what | result | |", "| --- | --- | --- | --- |"]
    for name, part in parts.items():
        for row in part["rows"]:
            note = row["note"].replace("|", "/")
            lines.append(f"| {name} | {row['what']} | {row['status']} | {note} |")
        lines.append(f"| {name} | | {part['status']} | {part['seconds']} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
