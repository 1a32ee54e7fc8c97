"""Signals that ask for an end: the first one makes the run drain, a second one exits at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from functools import partial
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

# One Ctrl-C reaches a worker twice: from the terminal, and from torchrun, which passes it on.
ECHO_SECONDS = 1.0

# The signal that the watch sends to this process's main thread when another rank was asked to stop.
RELAY = signal.SIGUSR2


class Stopped(BaseException):
    """Raised in the main thread by the first signal, while there is nothing to drain yet."""


class StopSignals:
    """Installs the signal handlers and keeps what they got.

    Attributes:
        asked: name of the first signal that came, to this rank or to another; None before that.
        at: when it was handled, on the clock of time.monotonic.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.at = 0.0
        self._owner = os.getpid()
        self._own = False
        self._relayed: str | None = None
        self._interrupting = False
        self._drained = False
        self._delivered: str | None = None
        # Python's C handler writes the number of each signal to this pipe at once, also while the main
        # thread is in C code and cannot run the Python handler (signal.set_wakeup_fd).
        self._wakeup, write = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # The signals of a forked process must not be written to this process's pipe.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        for number in ASKING:
            signal.signal(number, self._on_signal)

    def delivered(self) -> str | None:
        """Name of the first signal that has reached this process, or None.

        While the main thread is in C code (a collective, a large read) no Python handler runs, and this
        knows of the signal before `asked` is set. Only one thread may call it."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if self._delivered is None and number in ASKING:
                    self._delivered = self._relayed or signal.Signals(number).name
        return self._delivered

    def relay(self, name: str) -> None:
        """Ask this rank to stop because another rank was asked. Any thread may call it.

        It does not count as a signal to this rank: the next signal does not exit at once.

        name: of the signal that the other rank got."""
        if self.asked is None and self._relayed is None:
            self._relayed = name
            signal.pthread_kill(threading.main_thread().ident or 0, RELAY)

    @contextlib.contextmanager
    def interrupting(self) -> Generator[None]:
        """Within this scope a signal raises Stopped in the main thread. A signal that came before the
        scope raises it at the start."""
        self._interrupting = True
        try:
            if self.asked is not None:
                raise Stopped(self.asked)
            yield
        finally:
            self._interrupting = False

    def drained(self) -> None:
        """Say that nothing of this rank is in flight. A second signal then does nothing.

        torchrun sends SIGTERM to the other ranks as soon as the first one has left, which must not end
        a rank that is about to leave in order."""
        self._drained = True

    def settle(self) -> None:
        """Ignore signals from here on: the run has its result and is about to exit."""
        for number in ASKING:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked process inherits this handler. It must end on SIGTERM, and leave Ctrl-C, which
            # reaches every process of the terminal, to its parent.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        now = time.monotonic()
        if self._relayed is not None and self.asked is None:
            self._ask(self._relayed, now)
        elif not self._own:
            self._own = True
            if self.asked is None:
                self._ask(signal.Signals(number).name, now)
        elif now - self.at > ECHO_SECONDS and not self._drained:
            os._exit(128 + number)

    def _ask(self, name: str, now: float) -> None:
        self.asked, self.at = name, now
        if self._interrupting:
            self._interrupting = False
            raise Stopped(name)
