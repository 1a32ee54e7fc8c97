"""kill -9 and power cuts: finished samples stay as they are, the rest is done by the next start."""

import itertools
import json
import random
import shutil
import signal
import time
from collections.abc import Sequence

import pytest

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import PROCESSES, Fault, power_cut
from tests.support.ledger import Injection, Ledger

SLOW = Fault(kind="slow_pass", seconds=0.08, restart=None)


def kill_at_random(bench: Bench, rng: random.Random, by: Sequence[Fault]) -> str:
    """Start a run, kill something of it at some time; what was killed, or "" if it ended first."""
    tp = rng.choice([1, 2])
    faults = [SLOW, *by]
    inside = rng.random() < 0.4
    if inside:
        call, path = rng.choice(
            [("writev", "samples/"), ("write", "journal/"), ("rename", "samples/")]
        )
        at = rng.randint(0, 30)
        faults.append(Fault(kind="os_kill", rank=0, call=call, path=path, at=at))
    run = bench.start(f"--tp={tp}", f"--durability={rng.choice(MODES)}", ranks=2, faults=faults)
    what = f"rank 0 inside {faults[-1].call}" if inside else ""
    if not inside:
        time.sleep(rng.uniform(0.2, 1.8))
        if not run.alive():
            return ""
        what = rng.choice(["rank 0", "rank 1", "torchrun", "all"])
        if what == "all":
            run.kill_all()
        elif what == "torchrun":
            run.kill_agent()
        else:
            run.kill(int(what[-1]))
    code = run.wait(60)
    return what if code else ""


MODES = ("none", "file", "group")


def kill_many_times(bench: Bench, times: int, seed: int, ledger: Ledger) -> None:
    rng = random.Random(seed)
    killed: dict[str, int] = {}
    slowest = 0.0
    for turn in itertools.count():
        if sum(killed.values()) >= times:
            break
        before = folder.snapshot(bench.output)
        begun = time.monotonic()
        # Every other run writes through processes, as with a GPU.
        by = [PROCESSES] if turn % 2 else []
        what = kill_at_random(bench, rng, by)
        slowest = max(slowest, time.monotonic() - begun)
        print(f"{what or 'ended first'}: {time.monotonic() - begun:.1f} s")
        after = folder.snapshot(bench.output)
        assert {row: after.get(row) for row in before} == before, "a finished sample changed"
        folder.assert_whole(bench.output, bench.data, STATES)
        if what:
            killed[what] = killed.get(what, 0) + 1
        elif len(after) == len(folder.rows_of(bench.data)):
            folder.assert_complete(bench.output, bench.data, STATES)
            shutil.rmtree(bench.output)
    before = folder.snapshot(bench.output)
    assert bench.run(ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    assert len(killed) >= min(5, times // 4), f"too few kinds came up: {killed}"
    for what, count in killed.items():
        ledger.add(Injection(group="kill -9", fault=what, times=count, slowest=slowest))


def test_kills(bench: Bench, ledger: Ledger) -> None:
    bench.rows(400)
    kill_many_times(bench, 10, 1, ledger)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_kills(bench: Bench, ledger: Ledger) -> None:
    bench.rows(400)
    kill_many_times(bench, 100, 2, ledger)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["file", "group"])
def test_power_cuts(bench: Bench, durability: str, ledger: Ledger) -> None:
    """The disk forgets at random what was not forced to it; what the journal says is there, is."""
    bench.rows(240)
    rng = random.Random(3)
    cuts, changed = 0, 0
    for _ in range(8):
        faults = [Fault(kind="slow_pass", seconds=0.2), Fault(kind="log_fsync")]
        run = bench.start("--tp=1", f"--durability={durability}", ranks=2, faults=faults)
        time.sleep(rng.uniform(0.5, 1.5))
        alive = run.alive()
        run.kill_all()
        run.wait()
        if alive:
            cuts += 1
            log = bench.folder / "fsync.log"
            with log.open("a") as handle:
                for path in run.folder.glob("fsync.log"):
                    handle.write(path.read_text())
            changed += power_cut(bench.output, log, rng.random)
            for row, path in folder.samples(bench.output).items():
                if row in folder.snapshot(bench.output):
                    folder.assert_sample(path, folder.rows_of(bench.data)[row], STATES)
    assert cuts >= 3 and changed >= 1, "the interesting case did not come up"
    assert bench.run("--durability", durability).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="power cut", fault=f"--durability {durability}", times=cuts))


def test_a_cut_journal_line_is_dropped(bench: Bench) -> None:
    assert bench.run().code == 0
    journal = bench.output / "journal" / "0000.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) - 20])
    before = folder.snapshot(bench.output)
    assert len(before) == 39
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    for line in journal.read_bytes().splitlines():
        json.loads(line)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before


def test_damaged_files_are_done_again(bench: Bench) -> None:
    """Case 27: half a file, an empty one, a header alone, a text, none, and a stray temporary."""
    assert bench.run().code == 0
    before = folder.snapshot(bench.output)
    files = folder.samples(bench.output)
    half, header = files[0].read_bytes(), files[2].read_bytes()
    files[0].write_bytes(half[: len(half) // 2])
    files[1].write_bytes(b"")
    files[2].write_bytes(header[: 8 + int.from_bytes(header[:8], "little")])
    files[3].write_text("not a tensor file\n")
    files[4].unlink()
    stray = files[5].with_name(files[5].name + ".tmp")
    stray.write_bytes(b"x" * 100)
    run = bench.run()
    assert run.code == 0
    assert "35 done, 5 to do" in run.output(0)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in range(5, 40)} == {row: before[row] for row in range(5, 40)}
    stray.unlink()
    folder.assert_complete(bench.output, bench.data, STATES)


def test_a_batch_missing(bench: Bench) -> None:
    """Case 28: all files of one batch."""
    assert bench.run().code == 0
    files = folder.samples(bench.output)
    for row in range(8, 16):
        files[row].unlink()
    run = bench.run("--batch-tokens=512", ranks=2)
    assert run.code == 0 and "32 done, 8 to do" in run.output(0)
    folder.assert_complete(bench.output, bench.data, STATES)


def test_one_file_missing_of_a_batch(bench: Bench) -> None:
    """Case 28."""
    assert bench.run().code == 0
    files = folder.samples(bench.output)
    files[7].unlink()
    run = bench.run("--batch-tokens=512")
    assert run.code == 0 and "39 done, 1 to do" in run.output(0)
    folder.assert_complete(bench.output, bench.data, STATES)


def test_restarts_go_on_by_themselves(bench: Bench, ledger: Ledger) -> None:
    faults = [
        Fault(kind="kill", rank=1, at=2, restart=0),
        Fault(kind="raise", rank=0, at=1, restart=1),
    ]
    begun = time.monotonic()
    run = bench.start("--tp=1", ranks=2, faults=faults, max_restarts=2)
    assert run.wait() == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(
        Injection(
            group="--max-restarts",
            fault="a rank dies, then one raises",
            times=2,
            slowest=time.monotonic() - begun,
        )
    )


@pytest.mark.slow
def test_restarts_of_two_nodes(bench: Bench, ledger: Ledger) -> None:
    """A node's agent does not count the restarts that another's failure made: ranks that went by
    those counts would wait for each other for ever, or read what an earlier life has left."""
    faults = [Fault(kind="kill", rank=3, at=1, restart=0), SLOW]
    begun = time.monotonic()
    bench.rows(200)
    run = bench.start("--tp=2", ranks=4, faults=faults, max_restarts=1, nodes=2)
    assert run.wait(60) == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    seconds = time.monotonic() - begun
    ledger.add(Injection(group="--max-restarts", fault="two nodes, a rank dies", slowest=seconds))


@pytest.mark.slow
def test_torchrun_is_gone_before_its_ranks_have_begun(bench: Bench, ledger: Ledger) -> None:
    """They find no store at the address that they were given, and do not try for long."""
    run = bench.start("--tp=1", ranks=2)
    end = time.monotonic() + 20
    while not (run.folder / "out-1").exists():
        assert time.monotonic() < end
    run.kill_agent()
    begun = time.monotonic()
    run.wait(60)
    seconds = time.monotonic() - begun
    ledger.add(Injection(group="kill -9", fault="torchrun, before its ranks meet", slowest=seconds))


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_torchrun_alone_is_killed(bench: Bench, number: int, ledger: Ledger) -> None:
    """Its ranks are orphans then: they must not go on for a folder that others may start on."""
    slow = Fault(kind="slow_pass", seconds=1.0)
    run = bench.start("--tp=1", ranks=2, faults=[slow])
    while not folder.samples(bench.output):
        time.sleep(0.05)
    run.kill_agent(number)
    begun = time.monotonic()
    run.wait(30)
    assert "gone" in run.output()
    ledger.add(Injection(group="kill -9", fault="torchrun alone", slowest=time.monotonic() - begun))
