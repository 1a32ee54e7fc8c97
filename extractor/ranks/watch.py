"""The watch: it ends a run in which a rank has failed, so that no rank waits for ever.

Every rank has a watch thread. It posts a heartbeat in torchrun's store, looks there for the failure or
the signal of another rank, checks the heartbeat of its neighbour (the next rank), and checks how long
this rank's own steps take. The main thread may be in a collective, in C code or in a read from a slow
disk, where it cannot react. The watch thread therefore ends the process itself when the main thread
does not.

Some long waits are normal and never end a run: rank 0 may read and tokenize for hours, weights may load
for an hour, and a disk may be slower than the model. These waits are outside of steps.
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

# How many of this rank's beats may pass without a new heartbeat of the neighbour, by the stage of its
# last one. Before the first forward pass a rank may import modules or map large files in C code that
# lets no other thread run.
SILENT_BEATS = {"prepare": 600, "load": 600, "run": 20}

# How many beats may pass before the first heartbeat of the neighbour, which may still import modules.
ABSENT_BEATS = 600

# From the news of a failure to the end by force, so that files being written are finished or removed.
GRACE_SECONDS = 5.0

# From a signal to the end by force; torchrun kills the ranks that are left 30 seconds after it. Rank 0
# has run.json to write and ends first; the others wait LATER_SECONDS more, because torchrun ends all
# ranks when one has left.
STOP_SECONDS = 23.0
LATER_SECONDS = 2.0

# How long a rank may take to say that it was asked to stop as well; it may still import modules.
EVERYONE_SECONDS = 15.0

# A rank that is stuck in a collective waits for another rank. It waits this much longer before it
# reports, so that the rank that causes the wait reports first.
WAITER_SECONDS = 6.0

# How long to wait, after a connection broke, for the note that says which rank failed and why.
REASON_SECONDS = 4.0
FIRST_STEP_SECONDS = 600.0  # the first step may compile kernels
SLOWER = 20.0  # see Pace
FAILED, STOP = "failed", "stop"


class Board(Protocol):
    """Where ranks leave notes for each other (see World.board()). Its methods raise RunError when the
    store does not answer."""

    def post(self, key: str, value: Any) -> None: ...
    def look(self, key: str) -> Any | None: ...
    def first(self, key: str) -> bool:
        """True for the first call with this key over all ranks, False for the others."""
        ...


@dataclass(slots=True)
class Pace:
    """How long a step may take.

    The limit is `floor` seconds, or SLOWER times the longest time per token so far, whichever is
    greater. The first step may take at least FIRST_STEP_SECONDS.

    Attributes:
        floor: in seconds.
        slowest: longest time per token of a step so far, in seconds; the first step does not count.
        steps: how many steps have ended.
    """

    floor: float
    slowest: float = 0.0
    steps: int = 0

    def limit(self, tokens: int) -> float:
        """Seconds that the next step, of so many tokens, may take."""
        if self.steps == 0:
            return max(self.floor, FIRST_STEP_SECONDS)
        return max(self.floor, SLOWER * self.slowest * tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Count a step that has ended."""
        self.steps += 1
        # The first step may compile kernels, so its time says nothing about the next ones.
        if self.steps > 1:
            self.slowest = max(self.slowest, seconds / max(tokens, 1))


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way: its name, its limit in seconds, its start on the watch's clock, its thread."""

    what: str
    limit: float
    begun: float
    thread: int


class Watch:
    """One rank's watch.

    Args:
        board: where ranks leave notes.
        rank, world_size: as in Place.
        stop: this rank's signals.
        stuck_after: the floor of Pace, in seconds; 0 for no limit.
        record: called with an error before the end by force, to write torchrun's error file.
        leave: ends the process with an exit code, from any thread; tests replace it.
        clock: returns seconds; tests replace it.
        life: identifies this process to other ranks; tests replace it.
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
        # Called with (status, reason) before an end by force. Rank 0 records these in run.json.
        self.last_words: Callable[[str, str], None] = lambda status, reason: None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enter(self, stage: str) -> None:
        """Set the stage of this rank: "prepare", "load" or "run".

        It is posted at once, so that the rank is not judged by the limit of the stage before."""
        with self._beating:
            self._stage = stage
            self._beat()

    def close(self) -> None:
        """Stop watching: this rank's part is over, and its heartbeat ends without being a failure."""
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
        """Like check(), but it reads the board instead of what the watch thread has read.

        torchrun sends SIGTERM after a rank has failed, and the watch thread may not know of the failure
        yet."""
        if failure := self._board.look(FAILED):
            raise self._heard(failure)

    def _heard(self, failure: dict[str, Any]) -> RunError:
        if failure["rank"] == self._rank:
            return RunError(failure["text"])
        return PeerError(failure["text"], elsewhere=failure["host"] != socket.gethostname())

    def reason_for(self, error: BaseException) -> RunError:
        """The error that says why a connection to another rank broke.

        Waits up to REASON_SECONDS for a failure that a rank reports, which may be that another one has
        died. When none comes, the returned error has the text of `error`."""
        end = time.monotonic() + REASON_SECONDS
        while time.monotonic() < end and not self._closed.is_set():
            if self._failure is not None:
                return self._heard(self._failure)
            time.sleep(0.05)
        return RunError(f"the connection to another rank broke: {error}")

    @contextlib.contextmanager
    def step(self, kind: str, what: str, tokens: int) -> Generator[None]:
        """A scope that must end in time: a pass through the model, or the copy of its states.

        kind: steps of one kind share a Pace; only one of a kind may be under way at a time.
        what: names the step in messages. tokens: of its batch."""
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
        """Tell the other ranks that this one cannot go on. Only the first failure of a run is posted.

        Returns the error that this rank ends with. That is `error`, or a PeerError when another rank has
        posted the same UsageError before, so that an error that all ranks find is shown once."""
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
        """Post that this rank was asked to stop."""
        self._board.post(f"{STOP}/{self._rank}", True)

    def check_everyone_stops(self) -> None:
        """Wait until every rank has said that it was asked to stop.

        torchrun sends SIGTERM for a preemption, which reaches every rank, and also when a rank has
        died, which then says nothing. Raises RunError when a rank says nothing in EVERYONE_SECONDS, and
        what check() raises."""
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
        """One beat: post the heartbeat and look at everything. Tests call it without the thread."""
        try:
            self._tick()
        except RunError as error:  # the store does not answer
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
            # This thread posts it, because the main thread may be in C code where no handler runs.
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
        # The silence is counted in this rank's own beats, not in seconds. Time in which this rank does
        # not run either (a suspended machine, a store that does not answer) then does not count.
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
            # A process that hangs like this may not react to torchrun's SIGTERM, and torchrun would wait
            # 30 seconds for it, so it is killed here.
            self._life.end(note)
        else:
            return
        # The main thread and the writer get the failure from check() and have GRACE_SECONDS to finish
        # what they write.
        self._publish(text, stuck=True)

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
        """Post a failure, unless a rank has posted one before. Returns whether this one was the first.

        stuck: whether the other ranks are to say where their main threads are."""
        note = {"rank": self._rank, "host": socket.gethostname(), "text": text, "stuck": stuck}
        self._failure, self._failed_at = note, self._clock()
        first = self._board.first(f"{FAILED}/count")
        if first:
            self._board.post(FAILED, note)
        return first

    def _end(self, code: int, error: RunError | None) -> None:
        """End the process from this thread, because the main thread may not be able to."""
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
    """The innermost three stack frames of a thread as text, the innermost first."""
    frame = sys._current_frames().get(thread or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "a thread that has ended"
    stack = traceback.extract_stack(frame)[-3:]
    return " < ".join(f"{entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(stack))
