"""Rank 0's part of a run: decide what is to be done, tell the other ranks, and record the result."""

import io
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from extractor import pages
from extractor.config import ExtractConfig
from extractor.engine.base import Backend
from extractor.engine.settings import given_then
from extractor.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REJECTS,
    EXIT_USAGE,
    RunError,
    UsageError,
)
from extractor.files import sweep_temporaries, sweep_temporaries_of, write_whole
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.output import run_json
from extractor.output.done import Done, find_done
from extractor.output.folder import PREPARED, check_output
from extractor.output.journal import REJECTS, write_rejects
from extractor.output.lock import ALL_ROWS, FolderLock
from extractor.output.run_json import Run
from extractor.plan import fingerprint
from extractor.plan.batches import Plan
from extractor.plan.budget import choose
from extractor.plan.request import Wanted
from extractor.plan.todo import Todo, part_of
from extractor.prepared.store import PreparedStore
from extractor.prepared.vocab import VOCAB, TokenCounts, draft_vocabulary, write_vocab
from extractor.progress import say
from extractor.ranks.signals import Stopped
from extractor.run import provenance
from extractor.run.session import Session

IMPORT, JOB = "import", "job"  # keys under which rank 0 tells the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What rank 0 tells every rank, as JSON: enough to do its part without reading the folder.

    Attributes:
        model: local path of the model.
        states: names of the states to capture, in order.
        stored: names of the states in a file, in order; a layout may store one twice.
        dtype: stored dtype.
        store: path of the prepared store, which writers open.
        plan: path of the file with the batches, or "" when rank 0 is the only writer.
        budget: the fields of Budget.
        answer: an exit code when there is nothing to run, else None.
        reason: why rank 0 refuses or fails, for a rank on another machine to show; else "".
    """

    model: str = ""
    states: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    dtype: str = ""
    store: str = ""
    plan: str = ""
    budget: dict[str, int] = field(default_factory=dict)
    answer: int | None = None
    reason: str = ""


@dataclass(slots=True)
class Lead:
    """What rank 0 knows beyond the job.

    Attributes:
        selected: indices of this shard's samples in the store, int64 [samples].
        run: the record that run.json holds.
        run_path: path of run.json.
        stages: seconds that each stage took, by name.
        lock: the locks of the output folder.
        counts: how often each token is supervised, when a draft vocabulary is asked for.
        plan: batches of the samples that are left.
    """

    config: ExtractConfig
    spec: ModelSpec
    layout: Layout
    store: PreparedStore
    selected: np.ndarray
    run: Run
    run_path: Path
    stages: dict[str, float]
    lock: FolderLock
    counts: TokenCounts | None = None
    plan: Plan = field(default_factory=Plan.empty)


def lead_and_tell(session: Session) -> tuple[Job, Lead | None]:
    """Decide what is to be done and tell the other ranks.

    When this rank fails, the others get a job with the exit code and the reason; the error is then
    raised here. The second value is None when there is nothing to run."""

    world = session.world

    def importing() -> None:
        world.tell(IMPORT, True)

    def tell(job: Job) -> None:
        if job.answer is not None:  # there is nothing to run, so ranks that wait need not import
            world.tell(IMPORT, False)
        world.tell(JOB, asdict(job))

    try:
        job, lead = _decide(session, importing)
    except BaseException as error:
        tell(Job(answer=_exit_code(error), reason=str(error)))
        raise
    tell(job)
    return job, lead


def hear_job(session: Session) -> Job:
    """Wait for the job that lead_and_tell sends; every rank but rank 0 calls this.

    SGLang is imported at the same time as on rank 0; otherwise rank 0's replica would start ahead of
    the others by the time of the import."""
    world, check = session.world, session.watch.check
    if world.hear(IMPORT, check):
        session.backend.import_modules(session.device)
    return Job(**world.hear(JOB, check))


def _decide(session: Session, importing: Callable[[], None]) -> tuple[Job, Lead | None]:
    """Prepare the rows, check the output folder, plan the batches and write run.json.

    importing: called right before this rank imports SGLang. The second value is None when nothing is
    left to run."""
    config, place, device, backend = (
        session.config,
        session.place,
        session.device,
        session.backend,
    )
    begun = session.begun
    # The time before `begun`: the start of the interpreter and this program's imports, with PyTorch.
    stages = {"start": provenance.process_age() - (time.perf_counter() - begun)}
    wanted = Wanted.of(config)
    spec, dtype = wanted.spec, wanted.dtype
    _say_states(wanted)
    count = config.shard_index[1]
    run_path = provenance.run_path(config)
    before = check_output(config.output)
    # In a new folder there is work to do, so that the model is checked before the rows are prepared.
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
            store = wanted.prepare()
    except UsageError:  # a refused run does not leave a new, empty output folder behind
        lock.undo()
        raise
    stages["prepare"] = time.perf_counter() - mark
    layout = wanted.layout(store)
    numbers = backend.numbers(spec, device, config.sglang_args)
    parts = fingerprint.parts(
        config,
        spec,
        layout,
        dtype,
        store.parts,
        computed_in=numbers.computed_in,
        given=numbers.given,
    )
    if before is not None:
        _refuse_other_settings(config.output, before, parts)
    mark = time.perf_counter()
    selected = part_of(config, store)
    if count > 1 and len(selected):
        lock.rows(int(store.rows[selected[0]]), int(store.rows[selected[-1]]) + 1)
    todo = Todo.of(config.output, store, layout, selected)
    done, left = todo.done, todo.left
    _say_rest(store, selected, done, left)
    if before is not None:
        _sweep(config.output, layout, store, left)
    run = provenance.describe(
        config, spec, layout, store, place, device=device, parts=parts, dtype=dtype
    )
    run = run_json.replace(run, started_from=int(done.finished.sum()))
    run = run.after(run_json.read(run_path))
    sweep_temporaries_of(run_path)
    with lock.alone("writing rejects.jsonl"):
        sweep_temporaries_of(config.output / REJECTS)
        write_rejects(config.output, [*store.rejects, *done.rejected.values()])
    with lock.alone("writing vocab/"):
        counts = _write_vocabulary(config, spec, store)
    lead = Lead(config, spec, layout, store, selected, run, run_path, stages, lock, counts)
    if not len(left):
        return Job(answer=finish(lead, "complete")), None
    budget = choose(todo.ask(wanted, device.type, place.tp), place.local_writers)
    lead.plan = todo.batches(budget)
    stages["plan"] = time.perf_counter() - mark
    say(
        f"{len(lead.plan):,} batches of at most {budget.max_tokens:,} tokens; at most "
        f"{budget.host_bytes / pages.GIB:.2f} GiB of host memory beside the model's"
    )
    # A folder with an earlier run may have nothing left to do, so SGLang is imported only here.
    if before is not None:
        importing()
        backend.check_model(spec, place, config.sglang_args)
    _check_window(backend, spec, store.lengths[left])
    run_json.write(run_path, lead.run)
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


def _refuse_other_settings(output: Path, run: Run, parts: dict[str, str]) -> None:
    before = fingerprint.parts_of_run(run, parts, given_then)
    if changed := fingerprint.changes(before, parts):
        raise UsageError(
            f"{output} holds a run with other settings; {'; '.join(changed)}. "
            "Give the same settings, or another --output (docs/reliability.md)"
        )


def _check_window(backend: Backend, spec: ModelSpec, lengths: np.ndarray) -> None:
    """Raises UsageError when samples are longer than an attention window of the model that SGLang does
    not apply."""
    beyond = 0 if spec.window is None else int((lengths > spec.window).sum())
    if beyond and not backend.applies_window(spec):
        raise UsageError(
            f"{beyond:,} samples are longer than the {spec.window:,} tokens of this model's attention "
            f"window, which SGLang's {spec.architecture} leaves out: their states would be another "
            f"model's. Give --max-length {spec.window} (and --overlong skip, to leave these out)"
        )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return EXIT_AGAIN
    return EXIT_USAGE if isinstance(error, UsageError | SystemExit) else EXIT_FAILED


def _say_states(wanted: Wanted) -> None:
    layout, spec = wanted.config.layout, wanted.spec
    say(
        f"states {', '.join(wanted.stored)} of {spec.num_layers} layers, {spec.architecture}, stored as "
        f"{wanted.dtype}{'' if layout == 'native' else f' for {layout}'}"
    )
    if wanted.stored != wanted.asked.names:
        say(f"--layout {layout} stores these where --layers and --final name {wanted.asked}")


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


def _sweep(output: Path, layout: Layout, store: PreparedStore, left: np.ndarray) -> None:
    """Remove the temporary files that killed writers left behind, of samples that are still to do."""
    names: dict[Path, set[str]] = {}
    for row, turn in zip(store.rows[left].tolist(), store.turns[left].tolist(), strict=True):
        path = output / layout.path(row, turn)
        names.setdefault(path.parent, set()).add(path.name)
    count = sum(sweep_temporaries(folder, files) for folder, files in names.items())
    if count:
        say(f"removed {count:,} unfinished files of a run that was killed")


def _write_vocabulary(
    config: ExtractConfig, spec: ModelSpec, store: PreparedStore
) -> TokenCounts | None:
    """Write vocab/: how often each token is supervised over all rows, and a draft vocabulary if asked
    for.

    Returns the counts if a draft vocabulary is asked for, because the layout's own files of it need
    them; else None."""
    folder, size = config.output / VOCAB, config.draft_vocab_size
    if (folder / "token_freq.safetensors").exists() and not size:
        return None
    counts = TokenCounts.of(store, spec.vocab_size)
    write_vocab(folder, counts, draft_vocabulary(counts, size) if size else None)
    return counts if size else None


def _write_plan(config: ExtractConfig, batches: Plan) -> Path:
    """Write the batches for the other writers and return the path.

    The name is new each time, so that a rank with a stale view of a network folder cannot read an old
    plan."""
    index, count = config.shard_index
    prefix = f"plan-{index}-of-{count}-"
    for path in (config.output / PREPARED).glob(f"{prefix}*.npz"):
        path.unlink()
    path = config.output / PREPARED / f"{prefix}{secrets.token_hex(8)}.npz"
    content = io.BytesIO()
    np.savez(content, order=batches.order, starts=batches.starts)
    write_whole(path, [content.getbuffer()], sync=False)
    return path


def read_plan(path: str) -> Plan:
    """The batches that rank 0 has written (see Job.plan)."""
    with np.load(path, allow_pickle=False) as arrays:
        return Plan(arrays["order"], arrays["starts"])


def finish(lead: Lead, status: str) -> int:
    """End the run: count what the folder holds, write rejects.jsonl and run.json, and say the counts.

    When all is done, the layout's own files are written too. Returns the exit code.

    status: "complete" or "stopped"; a stopped run that has nothing left counts as complete."""
    with lead.lock.alone("writing rejects.jsonl"):
        done = find_done(lead.config.output, lead.store.rows, lead.store.turns, lead.layout.path)
        write_rejects(lead.config.output, [*lead.store.rejects, *done.rejected.values()])
    rejected = len(done.rejected)
    written = int(done.finished[lead.selected].sum())
    if status == "stopped" and written + rejected >= len(lead.selected):
        status = "complete"  # the signal came during the last batch
    counts = {
        "rows": lead.store.num_rows,
        "samples": len(lead.selected),
        "written": written,
        "rejected_in_preparation": len(lead.store.rejects),
        "rejected_in_run": rejected,
    }
    finished = provenance.now()
    if status == "complete":
        samples = (lead.store.sample(i) for i in range(len(lead.store.rows)))
        lead.layout.finish(lead.config.output, samples)
        _write_side_files(lead)
    lead.run = run_json.replace(
        lead.run,
        status=status,
        finished=finished,
        counts=counts,
        stages={name: round(value, 3) for name, value in lead.stages.items()},
    )
    run_json.write(lead.run_path, lead.run)
    say(
        f"{status}: {written:,} of {len(lead.selected):,} samples written, {rejected:,} rejected "
        f"in the run, {len(lead.store.rejects):,} in preparation; {lead.config.output}"
    )
    if status == "stopped":
        return EXIT_AGAIN
    return EXIT_REJECTS if rejected else EXIT_OK


def check_count(batches: Plan, results: Sequence[dict[str, Any]]) -> None:
    """Raises RunError when the writers, none of which was stopped, wrote and rejected together another
    number of samples than planned."""
    if any(result["stopped"] for result in results):
        return
    wrote = sum(result["samples"] + result["rejected"] for result in results)
    if wrote != len(batches.order):
        raise RunError(
            f"{wrote:,} samples were written or rejected of {len(batches.order):,} planned: start the "
            "same command again, and look into the filesystem if it says so again"
        )


def _write_side_files(lead: Lead) -> None:
    """Write the draft vocabulary also in the format of the project that the layout belongs to."""
    if (size := lead.config.draft_vocab_size) and lead.counts is not None:
        for name, parts in lead.layout.vocabulary(lead.counts, size).items():
            write_whole(lead.config.output / name, parts, sync=False)
