"""The main job, put together: rank 0 decides what is to be done, every rank builds its part of the
model, and each replica's writer pumps batches through it to disk."""

import contextlib
import dataclasses
import importlib.metadata
import io
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extractor import fingerprint, memory, plan
from extractor.config import ExtractConfig, invocation, parse
from extractor.data.prepare import prepare
from extractor.data.store import PreparedStore
from extractor.data.vocab import TokenCounts, draft_vocabulary, write_vocab
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import Backend, EngineOptions
from extractor.errors import RunError, UsageError, disk_error
from extractor.files import sweep_temporaries, sweep_temporaries_of, write_whole
from extractor.folder import check_output
from extractor.journal import (
    REJECTS,
    RUN,
    Done,
    find_done,
    read_run,
    write_rejects,
    write_run,
)
from extractor.layout import DTYPES
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.lock import ALL_ROWS, FolderLock
from extractor.memory import Ask, Budget
from extractor.model import ModelSpec
from extractor.plan import Plan
from extractor.progress import ProgressLine, say
from extractor.pump import follow, write_batches
from extractor.signals import Stopped, StopSignals
from extractor.states import States
from extractor.store import PREPARED, VOCAB
from extractor.topk import check_topk
from extractor.topology import Place, World, is_broken_connection, record_error
from extractor.watch import Watch

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_REJECTS, EXIT_AGAIN = 0, 3, 75
JOIN, START = "join", "start"  # where a replica's ranks meet
IMPORT, JOB = "import", "job"  # what rank 0 tells the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What rank 0 tells every rank, as JSON: enough to do its part without reading the folder.

    Attributes:
        model: local path of the model.
        states: names of those to capture, in order.
        stored: names as a file holds them; the layout may keep one twice.
        dtype: stored dtype.
        store: path of the prepared store, which writers open.
        plan: path of the batches' file, or "" when rank 0 is the only writer.
        budget: sizes of a batch.
        answer: an exit code when there is nothing to run, else None.
    """

    model: str = ""
    states: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    dtype: str = ""
    store: str = ""
    plan: str = ""
    budget: dict[str, int] = dataclasses.field(default_factory=dict)
    answer: int | None = None


@dataclass(slots=True)
class Lead:
    """What rank 0 knows beyond the job.

    Attributes:
        counts: of supervised tokens, when a draft vocabulary is asked for.
    """

    config: ExtractConfig
    spec: ModelSpec
    layout: Layout
    store: PreparedStore
    plan: Plan
    done: Done
    selected: np.ndarray
    run: dict[str, Any]
    run_path: Path
    stages: dict[str, float]
    lock: FolderLock
    counts: TokenCounts | None = None


def extract(
    argv: Sequence[str], backend: Backend = engine_sglang, stop: StopSignals | None = None
) -> int:
    """The verb: returns the exit code, raises UsageError and RunError."""
    begun = time.perf_counter()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    quiet = contextlib.nullcontext() if first else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        config = parse(ExtractConfig, argv, "extractor extract")
    config.check()
    if config.dry_run:
        from extractor.dry_run import dry_run  # noqa: PLC0415  (it stands on this module)

        return dry_run(config)
    stop = stop or StopSignals()
    place = Place.from_environment(config.tp)
    device = torch.device("cpu")
    with contextlib.suppress(Stopped), stop.interrupting():
        device = backend.choose_device(config.device, place)
        backend.prepare_process(device, place, config.verbose)
    # Not interrupted: a rank that leaves without a word is taken for dead by the others.
    world = World(place, stopping=lambda: stop.asked is not None)
    watch = Watch(
        world.board(),
        place.rank,
        place.world_size,
        stop,
        stuck_after=config.stuck_after,
        record=record_error,
    )
    if place.rank == 0:
        watch.last_words = partial(_mark_end, _run_path(config))
    watch.start()
    try:
        code = _watched(config, place, world, device, backend, watch, begun)
    except BaseException as error:
        watch.fail(error)
        if not isinstance(error, UsageError | SystemExit):
            watch.last_words("failed", str(error))
        raise
    finally:
        watch.close()
    stop.settle()
    world.leave()
    return code


def _watched(
    config: ExtractConfig,
    place: Place,
    world: World,
    device: torch.device,
    backend: Backend,
    watch: Watch,
    begun: float,
) -> int:
    lead: Lead | None = None
    try:
        with watch.stop.interrupting():
            if place.rank == 0:
                job, lead = _lead_and_tell(config, place, world, device, backend, begun)
            else:
                # While rank 0 does: its replica would be that much ahead of every other.
                if world.hear(IMPORT, watch.check):
                    backend.import_modules(device)
                job = Job(**world.hear(JOB, watch.check))
        if job.answer == EXIT_AGAIN:  # rank 0 waits for the word of all that they stop
            raise Stopped("rank 0")
        if job.answer is not None:
            return job.answer
        return _work(config, place, world, device, backend, job, lead, watch)
    except Stopped:
        return _stop_early(place, world, watch, lead)
    except OSError as error:
        raise disk_error(error) from error
    except RuntimeError as error:
        if not is_broken_connection(error):
            raise
        if watch.stop.asked is None:
            raise watch.reason_for(error) from error
        # Another rank of the replica was asked while this one waited for it in a collective of its
        # loading, where no handler runs.
        return _stop_early(place, world, watch, lead)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return EXIT_AGAIN
    return 2 if isinstance(error, UsageError | SystemExit) else 1


def _stop_early(place: Place, world: World, watch: Watch, lead: Lead | None) -> int:
    """A signal came before this replica had anything to drain; others may be ahead of it.

    Leaves once those have drained, for torchrun ends all ranks when one has left; and not later, for
    a rank that waits for this one in a collective is let go by that only. Raises RunError when
    another rank failed."""
    watch.stop.drained()
    watch.say_stopping()
    watch.check_board()
    world.call_off(START, place.replica)
    if place.is_writer:
        world.tell(f"done/{place.replica}", {"replica": place.replica, "stopped": True})
    if place.rank == 0:
        watch.check_everyone_stops()
    others = (r for r in range(place.replicas) if r != place.replica)
    drained = [world.hear(f"done/{r}", watch.check) for r in others if not world.call_off(START, r)]
    if place.rank:
        return EXIT_AGAIN
    if lead is None:
        watch.last_words("stopped", "")
        say(f"stopped by {watch.stop.asked} before the first batch: nothing is lost")
        code = EXIT_AGAIN
    else:
        lead.run["replicas"] = drained
        try:
            code = _finish(lead, "stopped")
        except OSError as error:
            raise disk_error(error) from error
    world.tell("answer", code)
    return code


def _run_path(config: ExtractConfig) -> Path:
    index, count = config.shard_index
    return config.output / (RUN if count == 1 else f"run-{index}-of-{count}.json")


def _mark_end(path: Path, status: str, reason: str) -> None:
    """run.json's last word from a run that cannot write its own: as well as it can be done.

    A run stopped before it knew its fingerprint leaves one without, for whoever looks whether it is
    to be started again."""
    with contextlib.suppress(OSError, ValueError):
        run = read_run(path)
        if run is None and status != "stopped":
            return
        run = run or {"schema": 1, "fingerprint": "", "parts": {}}
        run["status"] = status
        if reason:
            run["error"] = reason
        write_run(path, run)


def process_age() -> float:
    """Seconds since this process began, by the kernel's clock (proc(5): starttime, ticks after boot)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


# Rank 0: what is to be done -----------------------------------------------------------------------


def _lead_and_tell(
    config: ExtractConfig,
    place: Place,
    world: World,
    device: torch.device,
    backend: Backend,
    begun: float,
) -> tuple[Job, Lead | None]:
    """_lead, and the others hear what came of it, or that there is nothing for them to do."""

    def importing() -> None:
        world.tell(IMPORT, True)

    def tell(job: Job) -> None:
        if job.answer is not None:  # those that have not begun to import need not
            world.tell(IMPORT, False)
        world.tell(JOB, asdict(job))

    try:
        job, lead = _lead(config, place, device, backend, begun, importing)
    except BaseException as error:
        tell(Job(answer=_exit_code(error)))
        raise
    tell(job)
    return job, lead


def _lead(
    config: ExtractConfig,
    place: Place,
    device: torch.device,
    backend: Backend,
    begun: float,
    importing: Callable[[], None],
) -> tuple[Job, Lead | None]:
    """importing: called right before this rank imports SGLang."""
    # What the interpreter and this program's own imports, PyTorch's among them, took before.
    stages = {"start": process_age() - (time.perf_counter() - begun)}
    spec = ModelSpec.read(config.model)
    asked = States.resolve(config.layers, config.final, spec.num_layers)
    stored = LAYOUTS[config.layout].stored_for(asked)
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"--dtype auto: the model's own dtype is {dtype}; give --dtype")
    check_topk(config.topk_logits, spec.vocab_size)
    say(
        f"states {', '.join(stored)} of {spec.num_layers} layers, {spec.architecture}, stored as "
        f"{dtype}{'' if config.layout == 'native' else f' for {config.layout}'}"
    )
    if stored != asked.names:
        say(f"--layout {config.layout} stores these where --layers and --final name {asked}")
    index, count = config.shard_index
    run_path = _run_path(config)
    before = check_output(config.output)
    if before is None:
        importing()
        backend.check_model(spec, place, config.sglang_args)
        stages["import"] = time.perf_counter() - begun
    lock = FolderLock(config.output, say)
    if count == 1:
        lock.rows(0, ALL_ROWS)
    mark = time.perf_counter()
    try:
        with lock.alone("preparing the rows"):
            store = _prepare(config, spec)
    except UsageError:
        lock.undo()
        raise
    stages["prepare"] = time.perf_counter() - mark
    layout = _layout(config, stored, spec, DTYPES[dtype], store)
    parts = fingerprint.parts(config, spec, layout, dtype, store.parts)
    if before is not None and (changed := fingerprint.changes(before["parts"], parts)):
        raise UsageError(
            f"{config.output} holds a run with other settings; {'; '.join(changed)}. "
            "Give the same settings, or another --output (docs/reliability.md)"
        )
    mark = time.perf_counter()
    selected = plan.shard(store.rows, store.lengths, index, count)
    if count > 1 and len(selected):
        lock.rows(int(store.rows[selected[0]]), int(store.rows[selected[-1]]) + 1)
    done = find_done(config.output, store.rows, store.turns, layout.path)
    finished = done.finished.copy()
    finished[list(done.rejected)] = True
    left = selected[~finished[selected]]
    _say_rest(store, selected, done, left)
    if before is not None:
        _sweep(config.output, layout, store, left)
    lead = Lead(config, spec, layout, store, _no_plan(), done, selected, {}, run_path, stages, lock)
    lead.run = _describe(lead, place, device, parts, dtype)
    lead.run["started_from"] = int(done.finished.sum())
    sweep_temporaries_of(run_path)
    with lock.alone("writing rejects.jsonl"):
        sweep_temporaries_of(config.output / REJECTS)
        write_rejects(config.output, [*store.rejects, *done.rejected.values()])
    with lock.alone("writing vocab/"):
        lead.counts = _write_vocabulary(config, spec, store)
    if not len(left):
        return Job(answer=_finish(lead, "complete")), None
    ask = Ask(
        spec=spec,
        device=device.type,
        tp=place.tp,
        row_bytes=layout.row_bytes,
        longest=int(store.lengths[left].max()),
        batch_tokens=config.batch_tokens,
        host_gib=config.host_memory,
        topk=layout.topk,
    )
    budget = memory.choose(ask, place.local_writers)
    lead.plan = plan.batches(left, store.lengths, budget.max_tokens, budget.max_sequences)
    stages["plan"] = time.perf_counter() - mark
    say(
        f"{len(lead.plan):,} batches of at most {budget.max_tokens:,} tokens; at most "
        f"{budget.host_bytes / memory.GIB:.1f} GiB of states in host memory"
    )
    if before is not None:
        importing()
        backend.check_model(spec, place, config.sglang_args)
    write_run(run_path, lead.run)
    job = Job(
        model=str(spec.path),
        states=layout.captured,
        stored=layout.stored,
        dtype=dtype,
        store=str(store.path),
        plan=str(_write_plan(config, lead.plan)) if place.replicas > 1 else "",
        budget=asdict(budget),
    )
    return job, lead


def _layout(
    config: ExtractConfig,
    stored: Sequence[str],
    spec: ModelSpec,
    dtype: torch.dtype,
    store: PreparedStore,
) -> Layout:
    return LAYOUTS[config.layout](
        stored=tuple(stored),
        hidden=spec.hidden_size,
        dtype=dtype,
        model=spec.path.name,
        numbering=Numbering(store.rows, store.turns),
        topk=config.topk_logits,
    )


def _sweep(output: Path, layout: Layout, store: PreparedStore, left: np.ndarray) -> None:
    """Remove the temporary files that killed writers left of samples that are still to be done."""
    names: dict[Path, set[str]] = {}
    for row, turn in zip(store.rows[left].tolist(), store.turns[left].tolist(), strict=True):
        path = output / layout.path(row, turn)
        names.setdefault(path.parent, set()).add(path.name)
    count = sum(sweep_temporaries(folder, files) for folder, files in names.items())
    if count:
        say(f"removed {count:,} unfinished files of a run that was killed")


def _prepare(config: ExtractConfig, spec: ModelSpec) -> PreparedStore:
    line = ProgressLine("tokenizing", None, "row")
    try:
        return prepare(config, spec, say, lambda count, _total: line.set(count))
    finally:
        line.close()


def _write_vocabulary(
    config: ExtractConfig, spec: ModelSpec, store: PreparedStore
) -> TokenCounts | None:
    """How often each token is supervised, over all rows, and a drafter's vocabulary if asked for; then
    the counts are given back, for the layout's own files of it."""
    folder, size = config.output / VOCAB, config.draft_vocab_size
    if (folder / "token_freq.safetensors").exists() and not size:
        return None
    counts = TokenCounts.of(store, spec.vocab_size)
    write_vocab(folder, counts, draft_vocabulary(counts, size) if size else None)
    return counts if size else None


def _write_side_files(lead: Lead) -> None:
    """The draft vocabulary once more, as the layout's own project wants it."""
    if (size := lead.config.draft_vocab_size) and lead.counts is not None:
        for name, parts in lead.layout.vocabulary(lead.counts, size).items():
            write_whole(lead.config.output / name, parts, sync=False)


def _say_rest(store: PreparedStore, selected: np.ndarray, done: Done, left: np.ndarray) -> None:
    tokens = int(store.lengths[left].sum())
    kept = int(done.finished[selected].sum())
    text = f"{len(selected):,} samples: {kept:,} done, {len(left):,} to do ({tokens:,} tokens)"
    if done.damaged:
        text += f"; {done.damaged:,} of these had a missing or damaged file"
    if done.rejected:
        text += f"; {len(done.rejected):,} rejected by an earlier run"
    if store.rejects:
        text += f"; {len(store.rejects):,} of {store.num_rows:,} rows rejected at preparation"
    say(text)


def _no_plan() -> Plan:
    return Plan(np.zeros(0, np.int64), np.zeros(1, np.int64))


def _write_plan(config: ExtractConfig, batches: Plan) -> Path:
    """Under a new name each time: a rank whose view of the folder is old must not find an old plan."""
    index, count = config.shard_index
    prefix = f"plan-{index}-of-{count}-"
    for path in (config.output / PREPARED).glob(f"{prefix}*.npz"):
        path.unlink()
    path = config.output / PREPARED / f"{prefix}{secrets.token_hex(8)}.npz"
    content = io.BytesIO()
    np.savez(content, order=batches.order, starts=batches.starts)
    write_whole(path, [content.getbuffer()], sync=False)
    return path


def _read_plan(path: str) -> Plan:
    with np.load(path, allow_pickle=False) as arrays:
        return Plan(arrays["order"], arrays["starts"])


def _describe(
    lead: Lead, place: Place, device: torch.device, parts: dict[str, str], dtype: str
) -> dict[str, Any]:
    """run.json as it stands before the first forward."""
    config, spec = lead.config, lead.spec
    packages = ("sglang", "torch", "transformers", "safetensors", "hidden-state-extractor")
    values = asdict(config)
    return {
        "schema": 1,
        "status": "running",
        "fingerprint": fingerprint.digest(parts),
        "parts": parts,
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in values.items()},
        "argv": invocation(),
        "layers": list(lead.layout.stored),
        "dtype": dtype,
        "layout": config.layout,
        "topk_logits": lead.layout.topk,
        "model": {
            "path": str(spec.path),
            "architecture": spec.architecture,
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
        },
        "prepared": str(lead.store.path.relative_to(config.output)),
        "world": {"ranks": place.world_size, "tp": place.tp, "replicas": place.replicas},
        "device": str(device.type),
        "versions": {name: _version(name) for name in packages},
        "git_commit": _git_commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": lead.store.summary(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _finish(lead: Lead, status: str) -> int:
    """Count what the folder holds now, write it down, say it, and return the exit code."""
    with lead.lock.alone("writing rejects.jsonl"):
        done = find_done(lead.config.output, lead.store.rows, lead.store.turns, lead.layout.path)
        write_rejects(lead.config.output, [*lead.store.rejects, *done.rejected.values()])
    rejected = len(done.rejected)
    written = int(done.finished[lead.selected].sum())
    if status == "stopped" and written + rejected >= len(lead.selected):
        status = "complete"  # the signal came with the last batch
    lead.run["status"] = status
    lead.run["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lead.run["counts"] = {
        "rows": lead.store.num_rows,
        "samples": len(lead.selected),
        "written": written,
        "rejected_in_preparation": len(lead.store.rejects),
        "rejected_in_run": rejected,
    }
    if status == "complete":
        samples = (lead.store.sample(i) for i in range(len(lead.store.rows)))
        lead.layout.finish(lead.config.output, samples)
        _write_side_files(lead)
    lead.run["stages"] = {name: round(value, 3) for name, value in lead.stages.items()}
    write_run(lead.run_path, lead.run)
    say(
        f"{status}: {written:,} of {len(lead.selected):,} samples written, {rejected:,} rejected "
        f"in the run, {len(lead.store.rejects):,} in preparation; {lead.config.output}"
    )
    if status == "stopped":
        return EXIT_AGAIN
    return EXIT_REJECTS if rejected else EXIT_OK


# Every rank: doing it -----------------------------------------------------------------------------


def _work(
    config: ExtractConfig,
    place: Place,
    world: World,
    device: torch.device,
    backend: Backend,
    job: Job,
    lead: Lead | None,
    watch: Watch,
) -> int:
    budget = Budget(**job.budget)
    spec = lead.spec if lead else ModelSpec.read(job.model)
    states = States(tuple(job.states), spec.num_layers)
    mark = time.perf_counter()
    watch.enter("load")
    _together(world, JOIN, watch)
    world.join_replica(device)  # in C code, where each waits for all: not interrupted
    with watch.stop.interrupting():
        engine = backend.build(
            spec,
            states,
            place,
            EngineOptions(
                device=device,
                max_tokens=budget.max_tokens,
                max_sequences=budget.max_sequences,
                longest=budget.longest,
                sglang_args=config.sglang_args,
                topk=config.topk_logits,
                trust_remote_code=config.trust_remote_code,
                verbose=config.verbose,
            ),
        )
        loaded = time.perf_counter()
        proof = engine.self_check() if config.self_check else None
        checked = time.perf_counter()
    _together(world, START, watch)
    watch.enter("run")
    if lead:
        lead.stages["load"] = loaded - mark
        lead.stages["self_check"] = checked - loaded
        lead.run["self_check"] = asdict(proof) if proof else None
        lead.run["engine"] = engine.info.details
        write_run(lead.run_path, lead.run)
    if not place.is_writer:
        follow(engine, world, watch)
        watch.stop.drained()
        return int(world.hear("answer", watch.check))
    store = lead.store if lead else PreparedStore.open(Path(job.store))
    batches = lead.plan if lead else _read_plan(job.plan)
    mark = time.perf_counter()
    index, count = config.shard_index
    prefix = "" if count == 1 else f"s{index}of{count}-"
    stopped, stats = write_batches(
        engine,
        world,
        watch,
        store=store,
        batches=batches,
        layout=_layout(config, job.stored, spec, DTYPES[job.dtype], store),
        budget=budget,
        output=config.output,
        journal=f"{prefix}{place.replica:04d}.jsonl",
        durability=config.durability,
        threads=config.writers,
    )
    watch.stop.drained()
    world.tell(f"done/{place.replica}", {**stats, "stopped": stopped})
    if lead is None:
        return int(world.hear("answer", watch.check))
    results = [world.hear(f"done/{r}", watch.check) for r in range(place.replicas)]
    lead.stages["run"] = time.perf_counter() - mark
    lead.run["replicas"] = results
    _check_count(lead.plan, results)
    code = _finish(lead, "stopped" if any(r["stopped"] for r in results) else "complete")
    world.tell("answer", code)
    return code


def _check_count(batches: Plan, results: Sequence[dict[str, Any]]) -> None:
    """Raises RunError when writers that ran to the end wrote another number than was planned."""
    if any(result["stopped"] for result in results):
        return
    wrote = sum(result["samples"] + result["rejected"] for result in results)
    if wrote != len(batches.order):
        raise RunError(
            f"{wrote:,} samples were written or rejected of {len(batches.order):,} planned: start the "
            "same command again, and look into the filesystem if it says so again"
        )


def _together(world: World, what: str, watch: Watch) -> None:
    """Go on when all of the replica does. Raises Stopped when one of its ranks was stopped before."""
    try:
        with watch.stop.interrupting():
            met = world.meet(what, watch.check)
    except Stopped:
        met = not world.call_off(what, world.place.replica)
    if not met:
        raise Stopped(what)
