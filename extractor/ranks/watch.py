"""No rank waits for one that will not come.

A thread in every rank says "I live" on torchrun's store, listens for the failure or the signal of
another rank, looks at its neighbour's sign of life, and at how long this rank's own step through the
model has taken. What it may take for granted is little: a rank can be in a collective, in C code or
in a read of a slow disk, so the thread ends the process itself when the main thread does not.

What is never a reason to end: rank 0 reading and tokenizing for hours, weights loading for an hour,
a disk slower than the model. Those wait outside of steps.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from extractor.errors import EXIT_AGAIN, EXIT_FAILED, EXIT_USAGE, PeerError, RunError, UsageError
from extractor.progress import say
from extractor.ranks.life import Life
from extractor.ranks.signals import StopSignals
from extractor.terminal import complain

BEAT_SECONDS = 1.0

# Beats without a sign of life of the neighbour, by the stage it was last seen in. Before the first
# forward a rank may import or map large files in C code that lets no thread run.
SILENT_BEATS = {"prepare": 600, "load": 600, "run": 20}

# Beats until a neighbour has come at all: it may still be importing.
ABSENT_BEATS = 600

# From hearing of a failure to leaving, for what is being written to be finished or removed.
GRACE_SECONDS = 5.0

# From a signal to leaving by force. torchrun kills what is left after 30. Rank 0 goes first, for it
# has run.json to write, and when one rank has left torchrun ends the others.
STOP_SECONDS = 23.0
LATER_SECONDS = 2.0

# For a rank to say that it was asked to stop as well: it may still be importing.
EVERYONE_SECONDS = 15.0

# A rank inside a collective waits for another: that one has the first word.
WAITER_SECONDS = 6.0

# From a broken connection to knowing whose end broke it.
REASON_SECONDS = 4.0
FIRST_STEP_SECONDS = 600.0  # kernels are compiled in it
SLOWER = 20.0
FAILED, STOP = "failed", "stop"


class Board(Protocol):
    """Where ranks leave notes for each other: World.board(). Raises RunError when it is gone."""

    def post(self, key: str, value: Any) -> None: ...
    def look(self, key: str) -> Any | None: ...
    def first(self, key: str) -> bool:
        """True to the first caller of all ranks."""
        ...


@dataclass(slots=True)
class Pace:
    """How long a step may take: `floor` seconds, or SLOWER times the slowest token so far."""

    floor: float
    slowest: float = 0.0
    steps: int = 0

    def limit(self, tokens: int) -> float:
        if self.steps == 0:
            return max(self.floor, FIRST_STEP_SECONDS)
        return max(self.floor, SLOWER * self.slowest * tokens)

    def took(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        # The first step compiles kernels: what it took says nothing about the next ones.
        if self.steps > 1:
            self.slowest = max(self.slowest, seconds / max(tokens, 1))


@dataclass(frozen=True, slots=True)
class Step:
    what: str
    limit: float
    begun: float
    thread: int


class Watch:
    """One rank's watch.

    Args:
        board: where ranks leave notes.
        rank, world_size: as torchrun counts.
        stop: this rank's signals.
        stuck_after: seconds that a step may take (see Pace); 0 for as long as it likes.
        record: called with an error before leaving by force, for torchrun's error file.
        leave: ends the process with an exit code, from any thread; tests put their own.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        stop: StopSignals,
        *,
        stuck_after: float,
        record: Callable[[BaseException], None] = lambda _: None,
        leave: Callable[[int], Any] = os._exit,
        clock: Callable[[], float] = time.monotonic,
        life: "Life | None" = None,
    ) -> None:
        self._board, self._rank, self.stop = board, rank, stop
        self._world_size = world_size
        self._neighbour = (rank + 1) % world_size
        self._stuck_after, self._record, self._leave, self._clock = (
            stuck_after,
            record,
            leave,
            clock,
        )
        self._paces: dict[str, Pace] = {}
        self._steps: dict[str, Step] = {}
        self._beats = self._unchanged = 0
        self._life = life or Life.own()
        self._seen: Any = None
        self._failure: dict[str, Any] | None = None
        self._failed_at = 0.0
        self._stop_since: float | None = None
        self._closed = threading.Event()
        self._beating = threading.Lock()
        self._stage = "prepare"
        # What is left to do for a rank that must leave in a hurry: (status, reason).
        self.last_words: Callable[[str, str], None] = lambda status, reason: None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enter(self, stage: str) -> None:
        """From now on in this stage ("prepare", "load", "run"); said at once, so that what happens in
        the next second is not judged by the last one's measure."""
        with self._beating:
            self._stage = stage
            self._beat()

    def close(self) -> None:
        """This rank's part is over: what happens to others is no matter, nor is its own end."""
        with self._beating:
            self._closed.set()
            self._stage = "end"
            with contextlib.suppress(RunError):
                self._beat()

    # For the threads that work ----------------------------------------------------------------

    def check(self) -> None:
        """Raises PeerError when another rank has failed, RunError when this one has found it dead."""
        if self._failure is not None:
            raise self._heard(self._failure)

    def check_board(self) -> None:
        """check(), with a look at the board first: torchrun sends SIGTERM after a rank has failed."""
        if failure := self._board.look(FAILED):
            raise self._heard(failure)

    def _heard(self, failure: dict[str, Any]) -> RunError:
        if failure["rank"] == self._rank:
            return RunError(failure["text"])
        return PeerError(failure["text"], elsewhere=failure["host"] != socket.gethostname())

    def reason_for(self, error: BaseException) -> RunError:
        """Why a connection to another rank broke: what that rank said, or that it died without a
        word, once this is known; else the error itself."""
        end = time.monotonic() + REASON_SECONDS
        while time.monotonic() < end and not self._closed.is_set():
            if self._failure is not None:
                return self._heard(self._failure)
            time.sleep(0.05)
        return RunError(f"the connection to another rank broke: {error}")

    @contextlib.contextmanager
    def step(self, kind: str, what: str, tokens: int) -> Generator[None]:
        """What must end in time: a pass through the model, or its copy to the host.

        kind: steps of a kind share a pace, and one of a kind is under way at a time."""
        if not self._stuck_after:
            yield
            return
        pace = self._paces.setdefault(kind, Pace(self._stuck_after))
        begun = self._clock()
        self._steps[kind] = Step(what, pace.limit(tokens), begun, threading.get_ident())
        try:
            yield
        finally:
            del self._steps[kind]
        pace.took(tokens, self._clock() - begun)

    def fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this one cannot go on. The first rank's word counts.

        Returns what this rank ends with: the error, or a PeerError when another rank has refused the
        same before, so that ranks which all find it say it once."""
        if isinstance(error, PeerError) or self._failure is not None:
            return error
        text = str(error) or repr(error)
        with contextlib.suppress(RunError):  # the store may be what failed
            first = self._publish(f"rank {self._rank}: {text}", stuck=False)
            if not first and isinstance(error, UsageError):
                return self._said_before(text) or error
        return error

    def _said_before(self, text: str) -> PeerError | None:
        failure = self._board.look(FAILED)
        if not failure or failure["text"] != f"rank {failure['rank']}: {text}":
            return None
        elsewhere = failure["host"] != socket.gethostname()
        return PeerError(text, elsewhere=elsewhere, code=EXIT_USAGE)

    def say_stopping(self) -> None:
        self._board.post(f"{STOP}/{self._rank}", True)

    def check_everyone_stops(self) -> None:
        """torchrun sends the same signal for a preemption, which reaches every rank, and because a
        rank has died. Raises RunError when a rank does not say that it was asked to stop too."""
        end = time.monotonic() + EVERYONE_SECONDS
        while silent := self._silent_about_stop():
            if time.monotonic() > end:
                raise _no_word(silent) or AssertionError
            self.check()
            time.sleep(0.1)

    def _silent_about_stop(self) -> list[int]:
        ranks = range(self._world_size)
        return [rank for rank in ranks if self._board.look(f"{STOP}/{rank}") is None]

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._beating:
                if not self._closed.is_set():
                    self.tick()
            self._closed.wait(BEAT_SECONDS)

    def tick(self) -> None:
        """One beat."""
        try:
            self._tick()
        except RunError as error:  # the store is gone
            self._end(EXIT_FAILED, error)

    def _tick(self) -> None:
        self._beat()
        self._hear_failure()
        self._pass_on_stop()
        self._look_at_neighbour()
        self._look_at_own_steps()

    def _beat(self) -> None:
        self._beats += 1
        self._board.post(f"beat/{self._rank}", [self._beats, self._stage, self._life.note])

    def _hear_failure(self) -> None:
        if self._failure is None:
            self._failure = self._board.look(FAILED)
            self._failed_at = self._clock()
            if self._failure and self._failure["stuck"]:
                say(f"rank {self._rank} is in {_where(threading.main_thread().ident)}")
        elif self._clock() - self._failed_at > GRACE_SECONDS:
            self._end(EXIT_FAILED, self._heard(self._failure))

    def _pass_on_stop(self) -> None:
        if self._stop_since is None:
            name = self.stop.asked or self.stop.delivered()
            if name is None and (name := self._board.look(STOP)):
                self.stop.relay(name)
            if name is None:
                return
            # Said from here, because the main thread may be where no handler runs.
            self._stop_since = self._clock()
            self._board.post(STOP, name)
            self.say_stopping()
        limit = STOP_SECONDS + (LATER_SECONDS if self._rank else 0.0)
        if self._clock() - self._stop_since > limit:
            say(
                f"rank {self._rank}: not drained {limit:.0f} s after a signal; "
                "leaving what is in flight to the next start"
            )
            silent = self._silent_about_stop()
            self._end(EXIT_AGAIN if not silent else EXIT_FAILED, _no_word(silent))

    def _look_at_neighbour(self) -> None:
        if self._neighbour == self._rank or self._failure is not None:
            return
        # Counted in this rank's own beats, not in seconds: time in which everything stood still
        # (a suspended machine, a store that does not answer) is nobody's silence.
        beat = self._board.look(f"beat/{self._neighbour}")
        if beat != self._seen:
            self._seen, self._unchanged = beat, 0
            return
        self._unchanged += 1
        if beat is None:
            self._look_for_absent()
            return
        _, stage, note = beat
        if stage == "end":
            return
        if self._life.is_over(note):
            text = f"rank {self._neighbour} (process {note[1]}) has died; see its own output"
        elif self._unchanged > SILENT_BEATS[stage]:
            seconds = self._unchanged * BEAT_SECONDS
            text = f"rank {self._neighbour} has given no sign of life for {seconds:.0f} s"
            # It does not hear torchrun's SIGTERM either, which waits 30 seconds for it.
            self._life.end(note)
        else:
            return
        self._publish(text, stuck=True)
        # The threads that work hear of it, and have a moment to finish what they write.

    def _look_for_absent(self) -> None:
        if self._unchanged > ABSENT_BEATS:
            self._publish(
                f"rank {self._neighbour} has not come in {ABSENT_BEATS * BEAT_SECONDS:.0f} s: start "
                f"all {self._world_size} ranks, as torchrun does",
                stuck=True,
            )

    def _look_at_own_steps(self) -> None:
        for step in list(self._steps.values()):
            seconds, where = self._clock() - step.begun, _where(step.thread)
            patience = WAITER_SECONDS if "torch/distributed" in where else 0.0
            if seconds < step.limit + patience:
                continue
            text = (
                f"rank {self._rank} is stuck: {step.what} has taken {seconds:.0f} s of at most "
                f"{step.limit:.0f} (--stuck-after); it is in {where}"
            )
            self._publish(text, stuck=True)
            self._end(EXIT_FAILED, RunError(text))

    def _publish(self, text: str, stuck: bool) -> bool:
        """Returns whether this is the first failure of any rank."""
        note = {"rank": self._rank, "host": socket.gethostname(), "text": text, "stuck": stuck}
        self._failure, self._failed_at = note, self._clock()
        first = self._board.first(f"{FAILED}/count")
        if first:
            self._board.post(FAILED, note)
        return first

    def _end(self, code: int, error: RunError | None) -> None:
        """Leave at once: the main thread cannot."""
        if error is not None and not (isinstance(error, PeerError) and not error.elsewhere):
            complain(str(error))
        if error is not None:
            self._record(error)
        self.last_words("stopped" if code == EXIT_AGAIN else "failed", str(error or ""))
        self._closed.set()
        self._leave(code)


def _no_word(silent: list[int]) -> RunError | None:
    if not silent:
        return None
    return RunError(f"rank {', '.join(map(str, silent))} ended without a word; see its own output")


def _where(thread: int | None) -> str:
    """A thread's innermost three places, the innermost first."""
    frame = sys._current_frames().get(thread or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "a thread that has ended"
    stack = traceback.extract_stack(frame)[-3:]
    return " < ".join(f"{entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(stack))
