"""The watch with a clock and a board of the test's own: who ends, when, and with whose words."""

import json
from typing import Any

import pytest

from extractor.errors import PeerError, RunError, UsageError
from extractor.ranks import watch as module
from extractor.ranks.life import Life
from extractor.ranks.watch import Pace, Watch
from tests.support.faults import Clock


class Board:
    """Notes shared by the ranks of a test, through JSON as in a run."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def post(self, key: str, value: Any) -> None:
        self.notes[key] = json.dumps(value)

    def look(self, key: str) -> Any | None:
        return json.loads(self.notes[key]) if key in self.notes else None

    def first(self, key: str) -> bool:
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key] == 1


class Stop:
    """StopSignals without a signal handler."""

    def __init__(self, clock: Clock) -> None:
        self.asked: str | None = None
        self.in_c: str | None = None  # reached the process, and no handler could run yet
        self.at = 0.0
        self._clock = clock

    def delivered(self) -> str | None:
        return self.in_c

    def relay(self, name: str) -> None:
        self.asked, self.at = name, self._clock.now


class Ranks:
    """A world of watches without threads; left holds (rank, exit code)."""

    def __init__(self, count: int, stuck_after: float = 40.0) -> None:
        self.board, self.clock = Board(), Clock()
        self.left: list[tuple[int, int]] = []
        self.stops = [Stop(self.clock) for _ in range(count)]
        self.watches = [
            Watch(
                self.board,
                rank,
                count,
                self.stops[rank],  # pyright: ignore[reportArgumentType]
                stuck_after=stuck_after,
                leave=lambda code, rank=rank: self.left.append((rank, code)),
                clock=self.clock,
                life=Life([f"machine {rank}", 1, 1]),  # not to be seen from each other
            )
            for rank in range(count)
        ]
        for watch in self.watches:
            watch.enter("run")

    def tick(self, *but: int, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(module.BEAT_SECONDS)
            for rank, watch in enumerate(self.watches):
                if rank not in but and all(rank != left for left, _ in self.left):
                    watch.tick()


def test_all_live() -> None:
    ranks = Ranks(3)
    ranks.tick(times=700)
    for watch in ranks.watches:
        watch.check()
    assert not ranks.left


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_rank_ends_all(silent: int) -> None:
    ranks = Ranks(3)
    ranks.tick(silent, times=module.SILENT_BEATS["run"])
    for watch in ranks.watches:
        watch.check()
    ranks.tick(silent, times=3)
    before = (silent - 1) % 3
    with pytest.raises(RunError, match=f"rank {silent} has given no sign of life") as found:
        ranks.watches[before].check()
    assert not isinstance(found.value, PeerError), "the one that found it shows it"
    with pytest.raises(PeerError):
        ranks.watches[(silent + 1) % 3].check()
    ranks.tick(silent, times=int(module.GRACE_SECONDS) + 2)
    assert sorted(ranks.left) == sorted((r, 1) for r in range(3) if r != silent)


@pytest.mark.parametrize("stage", ["prepare", "load"])
def test_silence_is_long_before_the_first_batch(stage: str) -> None:
    ranks = Ranks(2)
    ranks.watches[1].enter(stage)
    ranks.tick(1, times=500)
    ranks.watches[0].check()
    ranks.tick(1, times=200)
    with pytest.raises(RunError, match="no sign of life"):
        ranks.watches[0].check()


def test_a_rank_that_has_ended_is_not_missed() -> None:
    ranks = Ranks(2)
    ranks.watches[1].close()
    ranks.tick(1, times=1000)
    ranks.watches[0].check()


def test_time_in_which_all_stood_still_is_nobodys_silence() -> None:
    ranks = Ranks(2)
    ranks.tick(times=3)
    ranks.clock.advance(3600)
    ranks.tick(times=3)
    ranks.watches[0].check()


def test_a_stuck_step() -> None:
    ranks = Ranks(2)
    for _ in range(3):
        with ranks.watches[1].step("pass", "batch 1", 100):
            ranks.clock.advance(0.1)
    with ranks.watches[1].step("pass", "batch 2", 100):
        ranks.tick(times=39)
        assert not ranks.left
        ranks.tick(times=2)
        assert ranks.left == [(1, 1)]
    with pytest.raises(PeerError, match=r"rank 1 is stuck: batch 2 has taken 4. s of at most 40"):
        ranks.tick()
        ranks.watches[0].check()


def test_pace() -> None:
    pace = Pace(40)
    assert pace.limit(10) == module.FIRST_STEP_SECONDS
    pace.took(100, 300)  # kernels were compiled
    assert pace.limit(100) == 40
    pace.took(100, 10)
    assert pace.limit(100) == 20 * 10 and pace.limit(1000) == 20 * 100
    assert pace.limit(1) == 40


def test_no_limit_when_asked() -> None:
    ranks = Ranks(1, stuck_after=0)
    with ranks.watches[0].step("pass", "batch", 1):
        ranks.tick(times=100_000)
    assert not ranks.left


def test_a_failure_is_heard_and_the_first_counts() -> None:
    ranks = Ranks(3)
    ranks.watches[2].fail(RunError("disk full"))
    ranks.watches[1].fail(RunError("connection lost"))
    ranks.tick()
    with pytest.raises(PeerError, match=r"^rank 2: disk full$"):
        ranks.watches[0].check()


def test_a_signal_is_passed_on() -> None:
    ranks = Ranks(3)
    ranks.stops[1].asked, ranks.stops[1].at = "SIGTERM", ranks.clock.now
    ranks.tick(times=3)
    assert [stop.asked for stop in ranks.stops] == ["SIGTERM"] * 3
    ranks.watches[0].check_everyone_stops()


def test_what_is_not_drained_is_left() -> None:
    ranks = Ranks(2)
    words: list[str] = []
    ranks.watches[0].last_words = lambda status, reason: words.append(status)
    for stop in ranks.stops:
        stop.asked, stop.at = "SIGTERM", ranks.clock.now
    ranks.tick(times=int(module.STOP_SECONDS) + 2)
    assert ranks.left == [(0, 75)] and words == ["stopped"], "rank 0 has the last word"
    ranks.tick(times=int(module.LATER_SECONDS))
    assert ranks.left == [(0, 75), (1, 75)]


def test_a_signal_that_the_main_thread_cannot_see() -> None:
    """It is in C code: the watch passes the signal on, and leaves in time in its place."""
    ranks = Ranks(2)
    ranks.stops[1].in_c = "SIGUSR2"
    ranks.tick(times=2)
    assert ranks.stops[0].asked == "SIGUSR2" and ranks.stops[1].asked is None
    ranks.watches[0].check_everyone_stops()
    ranks.tick(0, times=int(module.STOP_SECONDS + module.LATER_SECONDS) + 2)
    assert (1, 75) in ranks.left


def test_a_death_is_no_stop() -> None:
    """One rank was asked (torchrun ends it), the other is dead: not "start me again"."""
    ranks = Ranks(2)
    words: list[str] = []
    ranks.watches[0].last_words = lambda status, reason: words.append(status)
    ranks.stops[0].asked, ranks.stops[0].at = "SIGTERM", ranks.clock.now
    ranks.watches[1].enter("load")
    ranks.tick(1, times=int(module.STOP_SECONDS) + 2)
    assert ranks.left == [(0, 1)] and words == ["failed"]


def test_a_store_that_is_gone() -> None:
    ranks = Ranks(1)

    def gone(*_: object) -> None:
        raise RunError("torchrun's store does not answer")

    ranks.board.post = gone  # pyright: ignore
    ranks.watches[0].tick()
    assert ranks.left == [(0, 1)]


def test_a_neighbour_that_never_comes() -> None:
    """Its first sign of life has a limit too: a world started by hand may lack a rank."""
    ranks = Ranks(2)
    del ranks.board.notes["beat/1"]
    ranks.tick(1, times=module.ABSENT_BEATS)
    assert ranks.left == []
    ranks.watches[0].check()
    ranks.tick(1, times=2)
    with pytest.raises(RunError, match="rank 1 has not come in 600 s: start all 2 ranks"):
        ranks.watches[0].check()


def test_what_two_ranks_refuse_is_said_once() -> None:
    ranks = Ranks(3)
    first, second = UsageError("no such field"), UsageError("no such field")
    assert ranks.watches[0].fail(first) is first
    heard = ranks.watches[1].fail(second)
    assert isinstance(heard, PeerError) and str(heard) == "no such field" and heard.code == 2
    other = UsageError("rank 1 has no GPU")  # another mistake is said as well
    assert ranks.watches[2].fail(other) is other
