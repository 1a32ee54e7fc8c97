"""SIGTERM, SIGINT and SIGUSR2: drain and 75, from whichever stage and whichever rank."""

import json
import signal
import time

import pytest

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import PROCESSES, Fault
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import Run

IN_TIME = 30.0
SLOW = Fault(kind="slow_pass", rank=None, seconds=0.2)


def until(run: Run, words: str, rank: int = 0) -> None:
    end = time.monotonic() + 30
    while words not in run.output(rank):
        assert time.monotonic() < end and run.alive(), run.output()
        time.sleep(0.02)


def stopped_in_time(bench: Bench, run: Run, begun: float) -> float:
    """Seconds from begun until the last rank has left, each to be started again."""
    run.wait(IN_TIME)
    seconds = time.monotonic() - begun
    assert set(run.codes().values()) == {75}, run.output()
    assert status(bench) == "stopped", run.output()
    return seconds


def until_samples(bench: Bench, run: Run, writers: int = 1) -> None:
    """Until every replica's writer has finished a sample."""

    def started() -> int:
        journals = (bench.output / "journal").glob("*.jsonl")
        return sum(path.stat().st_size > 0 for path in journals)

    while started() < writers or not folder.samples(bench.output):
        assert run.alive(), run.output()
        time.sleep(0.02)


def status(bench: Bench) -> str:
    return json.loads((bench.output / "run.json").read_text())["status"]


@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_drains(bench: Bench, number: signal.Signals, ranks: int, tp: int, ledger: Ledger) -> None:
    bench.rows(200)
    run = bench.start(f"--tp={tp}", ranks=ranks, faults=[SLOW])
    until_samples(bench, run, writers=ranks // tp)
    begun = time.monotonic()
    for rank in range(ranks):
        run.kill(rank, number)
    run.wait(IN_TIME)
    seconds = time.monotonic() - begun
    assert set(run.codes().values()) == {75}, run.output()
    assert status(bench) == "stopped" and f"stopped: {len(folder.samples(bench.output))}" in (
        run.output(0)
    )
    before = folder.snapshot(bench.output)
    assert set(before) == set(folder.samples(bench.output)), "a finished file without its line"
    assert 0 < len(before) < 200
    assert bench.run(f"--tp={tp}", ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    ledger.add(Injection(group="signals", fault=f"{number.name} to all ranks", slowest=seconds))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_one_rank_is_asked(bench: Bench, tp: int, victim: int, ledger: Ledger) -> None:
    """The others hear of it: with many nodes a signal may reach one."""
    bench.rows(400)
    run = bench.start(f"--tp={tp}", ranks=2, faults=[SLOW])
    until_samples(bench, run)
    begun = time.monotonic()
    time.sleep(0.5)  # the other rank has its handlers, and has loaded or not
    run.kill(victim, signal.SIGUSR2)
    run.wait(IN_TIME)
    assert set(run.codes().values()) == {75}, run.output()
    assert status(bench) == "stopped"
    assert bench.run(ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    seconds = time.monotonic() - begun
    ledger.add(Injection(group="signals", fault="SIGUSR2 to one rank", slowest=seconds))


def test_torchrun_is_asked(bench: Bench, ledger: Ledger) -> None:
    """Case 42 (a): what scancel does."""
    bench.rows(200)
    run = bench.start("--tp=1", ranks=2, faults=[SLOW])
    until_samples(bench, run)
    begun = time.monotonic()
    run.kill_agent(signal.SIGTERM)
    assert run.wait(IN_TIME) == 1
    assert set(run.codes().values()) == {75} and status(bench) == "stopped"
    ledger.add(
        Injection(group="signals", fault="SIGTERM to torchrun", slowest=time.monotonic() - begun)
    )
    assert bench.run(ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)


@pytest.mark.parametrize(
    "fault, words",
    [
        (Fault(kind="slow_prepare", rank=0, seconds=300), "states 1, 2, 4"),
        (Fault(kind="slow_load", rank=None, seconds=300), "batches of at most"),
    ],
    ids=["tokenizing", "loading"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_batch(
    bench: Bench, fault: Fault, words: str, ranks: int, ledger: Ledger
) -> None:
    run = bench.start(ranks=ranks, faults=[fault])
    until(run, words)
    time.sleep(0.3)
    begun = time.monotonic()
    run.kill_agent(signal.SIGTERM)
    seconds = stopped_in_time(bench, run, begun)
    assert bench.run(ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="signals", fault=f"SIGTERM while {fault.kind}", slowest=seconds))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind, words", [("slow_prepare", "states 1"), ("slow_load", "batches of")])
def test_one_rank_is_asked_before_the_first_batch(
    bench: Bench, kind: str, words: str, victim: int, ledger: Ledger
) -> None:
    fault = Fault(kind=kind, rank=None, seconds=300)  # pyright: ignore[reportArgumentType]
    run = bench.start(ranks=2, faults=[fault])
    until(run, words)
    time.sleep(0.5)
    begun = time.monotonic()
    run.kill(victim, signal.SIGUSR2)
    seconds = stopped_in_time(bench, run, begun)
    ledger.add(Injection(group="signals", fault=f"SIGUSR2 to one while {kind}", slowest=seconds))


@pytest.mark.parametrize(
    "ranks, tp, loading, whom",
    [
        (2, 1, 0, "torchrun"),
        (2, 1, 1, "one that loads"),
        (4, 2, 1, "every rank"),
        (4, 2, 2, "one that runs"),
        pytest.param(2, 1, 0, "every rank", marks=pytest.mark.slow),
        pytest.param(2, 1, 0, "one that loads", marks=pytest.mark.slow),
        pytest.param(2, 1, 1, "torchrun", marks=pytest.mark.slow),
        pytest.param(4, 2, 1, "torchrun", marks=pytest.mark.slow),
        pytest.param(4, 2, 1, "one that loads", marks=pytest.mark.slow),
        pytest.param(4, 2, 2, "torchrun", marks=pytest.mark.slow),
    ],
)
def test_one_replica_still_loads(
    bench: Bench, ranks: int, tp: int, loading: int, whom: str, ledger: Ledger
) -> None:
    """The other drains, the one that loads has nothing to drain, and neither waits for the other for
    longer than that. `loading` is the one rank that is slow; its replica waits for it."""
    bench.rows(200)
    slow = Fault(kind="slow_load", rank=loading, seconds=300)
    run = bench.start(f"--tp={tp}", ranks=ranks, faults=[SLOW, slow])
    until_samples(bench, run)
    begun = time.monotonic()
    if whom == "torchrun":
        run.kill_agent(signal.SIGTERM)
    elif whom == "every rank":
        for rank in range(ranks):
            run.kill(rank, signal.SIGUSR2)
    else:
        ahead = 0 if loading // tp else tp
        run.kill(loading if whom == "one that loads" else ahead, signal.SIGUSR2)
    run.wait(IN_TIME)
    seconds = time.monotonic() - begun
    assert set(run.codes().values()) == {75}, run.output()
    assert "not drained" not in run.output() and seconds < 15, run.output()
    written = folder.samples(bench.output)
    assert status(bench) == "stopped" and f"stopped: {len(written)} of 200" in run.output(0)
    before = folder.snapshot(bench.output)
    assert set(before) == set(written) and 0 < len(before) < 200
    assert bench.run(f"--tp={tp}", ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    ledger.add(Injection(group="signals", fault="signal while one replica loads", slowest=seconds))


@pytest.mark.slow  # 25 s: that is what it is about
@pytest.mark.parametrize("ranks, tp, loading", [(1, 1, 0), (2, 1, 1), (2, 2, 1)])
def test_loading_in_c_code(bench: Bench, ranks: int, tp: int, loading: int, ledger: Ledger) -> None:
    """Where no handler of Python's runs, the watch leaves in the main thread's place."""
    stuck = Fault(kind="load_in_c", rank=loading)
    run = bench.start(f"--tp={tp}", ranks=ranks, faults=[SLOW, stuck])
    until(run, "batches of at most")
    time.sleep(0.5)
    begun = time.monotonic()
    run.kill_agent(signal.SIGTERM)
    seconds = stopped_in_time(bench, run, begun)
    assert bench.run(ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="signals", fault="SIGTERM while loading in C", slowest=seconds))


@pytest.mark.parametrize("by", [[], [PROCESSES]], ids=["threads", "processes"])
def test_a_second_one_exits_at_once(bench: Bench, by: list[Fault], ledger: Ledger) -> None:
    bench.rows(200)
    stuck = Fault(kind="slow_os", rank=0, call="writev", path="samples/", seconds=5)
    run = bench.start(faults=[stuck, *by])
    until(run, "batches of at most")
    time.sleep(1)
    run.kill(0, signal.SIGTERM)
    time.sleep(1.3)
    assert run.alive()
    begun = time.monotonic()
    run.kill(0, signal.SIGTERM)
    run.wait(3)
    assert run.codes() == {0: 128 + signal.SIGTERM}
    folder.assert_whole(bench.output, bench.data, STATES)
    seconds = time.monotonic() - begun
    ledger.add(Injection(group="signals", fault="a second SIGTERM", slowest=seconds))


@pytest.mark.slow  # the same
def test_a_disk_too_slow_to_drain(bench: Bench, ledger: Ledger) -> None:
    """What does not get to disk in time is left to the next start; 75 and "stopped" all the same."""
    bench.rows(200)
    slow = Fault(kind="slow_os", rank=0, call="writev", path="samples/", seconds=8)
    run = bench.start("--writers=1", faults=[slow])
    until(run, "batches of at most")
    time.sleep(1)
    begun = time.monotonic()
    run.kill_agent(signal.SIGTERM)
    run.wait(IN_TIME)
    assert run.codes() == {0: 75} and status(bench) == "stopped", run.output()
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    seconds = time.monotonic() - begun
    ledger.add(Injection(group="signals", fault="SIGTERM, disk slow", slowest=seconds))


def test_a_death_is_no_preemption(bench: Bench) -> None:
    """torchrun sends SIGTERM to the others when a rank dies: that is not "start me again"."""
    run = bench.start(ranks=2, faults=[Fault(kind="slow_load", rank=None, seconds=60)])
    until(run, "batches of at most")
    run.kill(1, signal.SIGKILL)
    assert run.wait(IN_TIME) == 1
    assert run.codes()[0] == 1 and status(bench) == "failed", run.output()
