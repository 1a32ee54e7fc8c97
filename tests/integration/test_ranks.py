"""Ranks that die, raise, stand still or hang: all end in time, and the reason is the one shown."""

import time

import pytest

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import Fault
from tests.support.ledger import Injection, Ledger

IN_TIME = 60.0
WORLDS = [(2, 2), (2, 1), (4, 2)]
SLOW = Fault(kind="slow_pass", rank=None, seconds=0.1)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("ranks, tp", [(2, 2), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_one_rank_ends(
    bench: Bench, kind: str, ranks: int, tp: int, victim: int, ledger: Ledger
) -> None:
    fault = Fault(kind=kind, rank=victim, at=2)  # pyright: ignore[reportArgumentType]
    bench.rows(600)
    begun = time.monotonic()
    run = bench.start(f"--tp={tp}", ranks=ranks, faults=[SLOW, fault])
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    codes = run.codes()
    assert codes.pop(victim) == {"raise": 1, "kill": 137}[kind]
    assert set(codes.values()) == {1}, (run.codes(), run.output())
    first = min(run.error_times(), key=run.error_times().__getitem__, default=None)
    if kind == "raise":
        assert "injected at pass 2" in run.errors()[victim]
        assert "injected at pass 2" in run.errors()[first], "another rank's error is on top"
    else:
        assert any(f"rank {victim} (process" in text for text in run.errors().values())
    assert bench.run(f"--tp={tp}", ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="ranks", fault=f"one of {ranks}: {kind}", slowest=seconds))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tp", WORLDS)
def test_one_rank_hangs(bench: Bench, ranks: int, tp: int, ledger: Ledger) -> None:
    victim = ranks - 1
    fault = Fault(kind="hang", rank=victim, at=2)
    bench.rows(600)
    begun = time.monotonic()
    run = bench.start(f"--tp={tp}", "--stuck-after=5", ranks=ranks, faults=[SLOW, fault])
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    assert f"rank {victim} is stuck" in run.errors()[victim]
    assert "faults.py" in run.errors()[victim], "the message does not say where it is"
    for rank in range(ranks):
        assert run.errors()[rank].count(f"rank {victim} is stuck") == 1
    assert bench.run(f"--tp={tp}", ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="ranks", fault=f"one of {ranks}: hangs", slowest=seconds))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tp", [(2, 2), (2, 1)])
def test_one_rank_stands_still(bench: Bench, ranks: int, tp: int, ledger: Ledger) -> None:
    """SIGSTOP, as a debugger or a frozen cgroup does: not one of its threads can say anything."""
    bench.rows(600)
    begun = time.monotonic()
    fault = Fault(kind="stop", rank=1, at=1)
    run = bench.start(f"--tp={tp}", ranks=ranks, faults=[SLOW, fault])
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    assert "no sign of life" in run.errors()[0]
    assert bench.run(f"--tp={tp}", ranks=ranks).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="ranks", fault=f"one of {ranks}: stands still", slowest=seconds))


@pytest.mark.slow
def test_slow_preparation_and_load_are_only_slow(bench: Bench, ledger: Ledger) -> None:
    """Case 32: far longer than --stuck-after, and nobody minds."""
    faults = [
        Fault(kind="slow_prepare", rank=0, seconds=8),
        Fault(kind="slow_load", rank=1, seconds=8),
    ]
    run = bench.start("--stuck-after=1", ranks=2, faults=faults)
    assert run.wait(60) == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="ranks", fault="rank 0 tokenizes, another loads, for long"))
