"""Replicas, shards and changes between runs: every sample once, nothing lost, nobody else let in."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.together import Together, together
from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import Fault
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import Run

SLOW = Fault(kind="slow_pass", rank=None, seconds=0.1, restart=None)


def journal_lines(bench: Bench) -> list[int]:
    return [
        json.loads(line)["row"]
        for path in (bench.output / "journal").iterdir()
        for line in path.read_text().splitlines()
    ]


def replicas_of(bench: Bench) -> list[dict[str, Any]]:
    return json.loads((bench.output / "run.json").read_text())["replicas"]


def test_two_replicas_share_the_work(bench: Bench) -> None:
    bench.rows(200)
    assert bench.run("--tp=1", ranks=2, faults=[SLOW]).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    assert sorted(journal_lines(bench)) == list(range(200)), "a sample twice"
    sizes = [len(path.read_text()) for path in (bench.output / "journal").iterdir()]
    assert len(sizes) == 2 and min(sizes) > 0.2 * max(sizes)


def test_a_slow_replica_does_not_hold_the_other(bench: Bench) -> None:
    bench.rows(200)
    slow = Fault(kind="slow_pass", rank=1, seconds=1.0)
    assert bench.run("--tp=1", ranks=2, faults=[slow]).code == 0
    results = replicas_of(bench)
    assert results[0]["samples"] > 3 * results[1]["samples"]


def test_two_replicas_are_twice_as_fast(bench: Bench) -> None:
    """On passes that take time and no CPU, as a GPU's do, after imports that take long."""
    bench.rows(300)
    faults = [SLOW, Fault(kind="slow_import", rank=None, seconds=1.5)]
    found: list[Together] = []
    for ranks in (1, 2):
        assert (
            bench.run("--tp=1", f"--output={bench.output}-{ranks}", ranks=ranks, faults=faults).code
            == 0
        )
        run = json.loads(Path(f"{bench.output}-{ranks}", "run.json").read_text())
        found.append(together(run["replicas"]))
    alone, two = found
    assert two.share > 0.6, "one came much later than the other"
    assert 1.7 < two.rate / alone.rate < 2.3


@pytest.mark.parametrize("again", [False, True], ids=["new folder", "second start"])
def test_no_replica_is_an_import_behind(bench: Bench, again: bool) -> None:
    """Rank 0 imports SGLang before it tells the others what is to be done, and they do meanwhile: on
    a GPU, what one replica had done before the other came was a quarter of a minute's work."""
    bench.rows(200)
    if again:
        kill = Fault(kind="kill", rank=0, at=2)
        assert bench.run(faults=[SLOW, kill]).code == 1
    seconds = 1.5
    slow = Fault(kind="slow_import", rank=None, seconds=seconds)
    assert bench.run("--tp=1", ranks=2, faults=[slow, SLOW]).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    began = [replica["began"] for replica in replicas_of(bench)]
    assert abs(began[1] - began[0]) < seconds / 2


def test_a_refusal_does_not_wait_for_imports(bench: Bench) -> None:
    """Rank 0 finds nothing to do while the others would import for long."""
    assert bench.run().code == 0
    slow = Fault(kind="slow_import", rank=1, seconds=60.0)
    begun = time.monotonic()
    assert bench.run("--tp=1", ranks=2, faults=[slow]).code == 0  # all is written
    assert bench.run("--tp=1", "--layers=1,2", ranks=2, faults=[slow]).codes()[0] == 2
    assert time.monotonic() - begun < 30


@pytest.mark.slow
def test_everything_may_change_between_runs(bench: Bench, ledger: Ledger) -> None:
    bench.rows(600)
    kill = Fault(kind="kill", rank=0, at=2)
    changes: list[tuple[int, tuple[str, ...]]] = [
        (1, ()),
        (2, ("--tp=2",)),
        (2, ("--tp=1", "--batch-tokens=128")),
        (4, ("--tp=2", "--durability=group")),
        (1, ("--shard=0/3",)),
        (2, ("--shard=1/2", "--tp=1")),
    ]
    for ranks, flags in changes:
        before = folder.snapshot(bench.output)
        run = bench.run(*flags, ranks=ranks, faults=[SLOW, kill])
        assert run.code == 1
        after = folder.snapshot(bench.output)
        assert {row: after.get(row) for row in before} == before and len(after) > len(before)
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(
        Injection(
            group="replicas", fault="killed, then other world, tp or shards", times=len(changes)
        )
    )


def test_an_array_of_four_at_once(bench: Bench, ledger: Ledger) -> None:
    bench.rows(200)
    runs = [bench.start(f"--shard={index}/4") for index in range(4)]
    for run in runs:
        assert run.wait(60) == 0, run.output()
    assert sorted(journal_lines(bench)) == list(range(200))
    folder.assert_whole(bench.output, bench.data, STATES)
    assert sorted(folder.samples(bench.output)) == list(range(200))
    names = {path.name for path in bench.output.glob("run*.json")}
    assert names == {f"run-{index}-of-4.json" for index in range(4)}
    ledger.add(Injection(group="replicas", fault="an array of four on one folder", times=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second, refused",
    [
        ((), (), True),
        (("--shard=0/2",), (), True),
        ((), ("--shard=1/2",), True),
        (("--shard=0/2",), ("--shard=0/3",), True),
        (("--shard=0/2",), ("--shard=1/2",), False),
    ],
    ids=["same", "whole after shard", "shard after whole", "shards overlap", "shards apart"],
)
def test_two_at_once(
    bench: Bench, first: tuple[str, ...], second: tuple[str, ...], refused: bool, ledger: Ledger
) -> None:
    bench.rows(200)
    slower = Fault(kind="slow_pass", rank=None, seconds=0.6)
    one = bench.start(*first, faults=[slower])
    wait_for_samples(bench, one)
    other = bench.run(*second)
    assert one.alive()
    assert other.codes() == {0: 2 if refused else 0}, other.output()
    if refused:
        lines = [line for line in other.output().splitlines() if "extractor: " in line]
        assert len(lines) == 1 and "another run is writing it now" in lines[0]
    assert one.wait(60) == 0
    folder.assert_whole(bench.output, bench.data, STATES)
    ledger.add(Injection(group="replicas", fault="two runs on one folder at once"))


def test_a_killed_run_holds_nobody_up(bench: Bench) -> None:
    bench.rows(200)
    run = bench.start("--tp=1", ranks=2, faults=[SLOW])
    wait_for_samples(bench, run)
    run.kill_all()
    assert bench.run("--tp=1", ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)


def test_a_rank_with_a_stale_view_does_no_harm(bench: Bench, ledger: Ledger) -> None:
    """As over NFS: the folder looks empty to rank 1, and rank 0 alone decides what is left."""
    bench.rows(200)
    run = bench.start("--tp=1", ranks=2, faults=[SLOW])
    wait_for_samples(bench, run)
    run.kill_all()
    before = folder.snapshot(bench.output)
    stale = Fault(kind="stale", rank=1, path=str(bench.output))
    assert bench.run("--tp=1", ranks=2, faults=[stale, SLOW]).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    assert len(list((bench.output / "prepared").glob("plan-*"))) == 1, "a plan that could be stale"
    results = replicas_of(bench)
    assert all(result["samples"] for result in results), "rank 1 had nothing to do"
    ledger.add(Injection(group="ranks", fault="one sees an empty folder"))


def wait_for_samples(bench: Bench, run: Run) -> None:
    end = time.monotonic() + 30
    while not folder.samples(bench.output):
        assert run.alive() and time.monotonic() < end, run.output()
        time.sleep(0.02)
