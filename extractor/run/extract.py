"""The verb `extract`: rank 0 decides what is to be done, every rank builds its part of the model, and
each replica's writer sends batches through it and writes the states to disk."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from extractor.config import ExtractConfig, read_extract
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import Backend
from extractor.errors import EXIT_AGAIN, EXIT_FAILED, PeerError, UsageError, disk_error
from extractor.model import OVERRIDES, ModelSpec
from extractor.output import run_json
from extractor.plan.budget import Budget
from extractor.plan.request import make_layout
from extractor.prepared.store import PreparedStore
from extractor.progress import say
from extractor.ranks.place import Place
from extractor.ranks.signals import Stopped, StopSignals
from extractor.ranks.watch import Watch
from extractor.ranks.world import World, is_broken_connection
from extractor.run.lead import Job, Lead, check_count, finish, hear_job, lead_and_tell, read_plan
from extractor.run.loop import Writing, follow, write_batches
from extractor.run.provenance import mark_end, run_path
from extractor.run.session import Session
from extractor.states import States
from extractor.torchrun import Launch, record_error
from extractor.write.writer import ORDINARY, Workers

# The points at which the ranks of a replica wait for each other: before its process groups are made,
# and before the first batch.
JOIN, START = "join", "start"


def extract(
    argv: Sequence[str],
    backend: Backend = engine_sglang,
    stop: StopSignals | None = None,
    workers: Workers = ORDINARY,
) -> int:
    """Read the command line, then run()."""
    return run(read_extract(argv), backend, stop, workers)


def run(
    config: ExtractConfig,
    backend: Backend = engine_sglang,
    stop: StopSignals | None = None,
    workers: Workers = ORDINARY,
) -> int:
    """Run one rank's part of the verb and return the exit code.

    stop: this process's signals. workers: how the writer starts threads and processes.

    Raises UsageError for a request that cannot be met and RunError for a failure of the run."""
    begun = time.perf_counter()
    if config.dry_run:
        Launch.from_environment()  # refuses wrong values of the variables that dry_run reads
        from extractor.plan.dry_run import dry_run  # noqa: PLC0415  (accelerate comes with it)

        return dry_run(config)
    stop = stop or StopSignals()
    place = Place.from_environment(config.tp)
    device = torch.device("cpu")
    with contextlib.suppress(Stopped), stop.interrupting():
        device = backend.choose_device(config.device, place)
        backend.prepare_process(device, place, config.verbose)
    # From here a signal does not raise: a rank that leaves without a note on the board would be taken
    # for dead by the others.
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
        watch.last_words = partial(mark_end, run_path(config))
    watch.start()
    session = Session(
        config=config,
        place=place,
        world=world,
        watch=watch,
        device=device,
        backend=backend,
        workers=workers,
        begun=begun,
    )
    try:
        code = _watched(session)
    except BaseException as error:
        shown = watch.fail(error)
        if not isinstance(error, UsageError | SystemExit):
            watch.last_words("failed", str(error))
        if shown is not error:
            raise shown from error
        raise
    finally:
        watch.close()
    stop.settle()
    world.leave()
    return code


def _watched(session: Session) -> int:
    watch = session.watch
    lead: Lead | None = None
    try:
        with watch.stop.interrupting():
            if session.place.rank == 0:
                job, lead = lead_and_tell(session)
            else:
                job = hear_job(session)
        if job.answer == EXIT_AGAIN:  # rank 0 waits until every rank has said that it stops
            raise Stopped("rank 0")
        if job.reason:
            place = session.place
            elsewhere = place.rank != place.local_rank  # not on rank 0's machine
            raise PeerError(job.reason, elsewhere=elsewhere, code=job.answer or EXIT_FAILED)
        if job.answer is not None:
            return job.answer
        return _work(session, job, lead)
    except Stopped:
        return _stop_early(session, lead)
    except OSError as error:
        raise disk_error(error) from error
    except RuntimeError as error:
        if not is_broken_connection(error):
            raise
        if watch.stop.asked is None:
            raise watch.reason_for(error) from error
        # This rank waited for another one in a collective while the model was loaded, where no signal
        # handler runs. The connection broke because the other rank was asked to stop, or because it
        # died and torchrun's SIGTERM came first. check_everyone_stops tells the two cases apart.
        watch.say_stopping()
        watch.check_everyone_stops()
        return _stop_early(session, lead)


def _stop_early(session: Session, lead: Lead | None) -> int:
    """End this rank after a signal that came before this replica had anything to drain.

    Other replicas may already write. This rank leaves as soon as they have drained: not earlier,
    because torchrun ends all ranks when one has left, and not later, because only its end releases a
    rank that waits for it in a collective. Returns the exit code; raises RunError when another rank
    failed."""
    place, world, watch = session.place, session.world, session.watch
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
        lead.run = run_json.replace(lead.run, replicas=tuple(drained))
        try:
            code = finish(lead, "stopped")
        except OSError as error:
            raise disk_error(error) from error
    world.tell("answer", code)
    return code


def _work(session: Session, job: Job, lead: Lead | None) -> int:
    """Build this rank's part of the model, then compute batches. Returns the exit code."""
    place, world, watch = session.place, session.world, session.watch
    budget = Budget(**job.budget)
    overrides = session.config.sglang_args.get(OVERRIDES)
    spec = lead.spec if lead else ModelSpec.read(job.model, overrides)
    states = States(tuple(job.states), spec.num_layers)
    mark = time.perf_counter()
    watch.enter("load")
    _together(world, JOIN, watch)
    # Not interruptible: the ranks wait for each other in C code, where no signal handler runs.
    world.join_replica(session.device)
    writing = _begin_writing(session, job, lead, spec, budget) if place.is_writer else None
    with watch.stop.interrupting():
        engine = session.backend.build(spec, states, place, session.engine_options(budget))
        loaded = time.perf_counter()
        proof = engine.self_check() if session.config.self_check else None
        checked = time.perf_counter()
        compared = engine.layer_proof() if session.config.layer_proof else None
        proved = time.perf_counter()
    _together(world, START, watch)
    watch.enter("run")
    if lead:
        lead.stages["load"] = loaded - mark
        lead.stages["self_check"] = checked - loaded
        lead.stages["layer_proof"] = proved - checked
        if compared:
            say(str(compared))
        lead.run = run_json.replace(
            lead.run,
            self_check=asdict(proof) if proof else None,
            layer_proof=asdict(compared) if compared else None,
            engine=engine.info.details,
        )
        run_json.write(lead.run_path, lead.run)
    if writing is None:
        follow(engine, world, watch)
        watch.stop.drained()
        return int(world.hear("answer", watch.check))
    mark = time.perf_counter()
    stopped, stats = write_batches(engine, world, watch, writing)
    world.tell(f"done/{place.replica}", {**stats, "stopped": stopped})
    if lead is None:
        return int(world.hear("answer", watch.check))
    results = [world.hear(f"done/{r}", watch.check) for r in range(place.replicas)]
    lead.stages["run"] = time.perf_counter() - mark
    lead.run = run_json.replace(lead.run, replicas=tuple(results))
    check_count(lead.plan, results)
    code = finish(lead, "stopped" if any(r["stopped"] for r in results) else "complete")
    world.tell("answer", code)
    return code


def _begin_writing(
    session: Session, job: Job, lead: Lead | None, spec: ModelSpec, budget: Budget
) -> Writing:
    """A writer's samples, batches, layout and buffers: rank 0 has them already, and a writer of
    another replica reads them from the paths in the job."""
    if lead is not None:
        store, batches, layout = lead.store, lead.plan, lead.layout
    else:
        store, batches = PreparedStore.open(Path(job.store)), read_plan(job.plan)
        layout = make_layout(session.config, spec, job.stored, job.dtype, store)
    return Writing.begin(store, batches, layout, budget, session.sink, session.device)


def _together(world: World, what: str, watch: Watch) -> None:
    """Wait until all ranks of the replica are here.

    Raises Stopped when one of them was asked to stop before that."""
    try:
        with watch.stop.interrupting():
            met = world.meet(what, watch.check)
    except Stopped:
        met = not world.call_off(what, world.place.replica)
    if not met:
        raise Stopped(what)
