"""Signals that ask for an end: the first drains, a second one exits at once."""

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

# How another rank's request is brought to this process's main thread.
RELAY = signal.SIGUSR2


class Stopped(BaseException):
    """Raised in the main thread by the first signal while there is nothing to drain yet."""


class StopSignals:
    """Installs handlers; `asked` names the first signal that came, to this rank or to another."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.at = 0.0
        self._owner = os.getpid()
        self._own = False
        self._relayed: str | None = None
        self._interrupting = False
        self._drained = False
        self._delivered: str | None = None
        # The system's own handler writes each signal's number here, whatever the main thread is in.
        self._wakeup, write = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # A forked helper's signals are its own.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        for number in ASKING:
            signal.signal(number, self._on_signal)

    def delivered(self) -> str | None:
        """The first signal that has reached this process. Known before `asked` is while the main
        thread is in C code (a collective, a large read), where no handler runs. For one thread."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if self._delivered is None and number in ASKING:
                    self._delivered = self._relayed or signal.Signals(number).name
        return self._delivered

    def relay(self, name: str) -> None:
        """Another rank was asked to stop: so is this one. From any thread; does not count as a
        signal, so that one which follows does not exit at once."""
        if self.asked is None and self._relayed is None:
            self._relayed = name
            signal.pthread_kill(threading.main_thread().ident or 0, RELAY)

    @contextlib.contextmanager
    def interrupting(self) -> Generator[None]:
        """Within, a signal raises Stopped in the main thread; also one that came before."""
        self._interrupting = True
        try:
            if self.asked is not None:
                raise Stopped(self.asked)
            yield
        finally:
            self._interrupting = False

    def drained(self) -> None:
        """Nothing of this rank is in flight any more: a second signal has nothing to cut short.
        torchrun sends one to the others as soon as the first rank has left."""
        self._drained = True

    def settle(self) -> None:
        """The end is known and near: no signal changes it."""
        for number in ASKING:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked helper inherits this handler: it must die when told to, and leave Ctrl-C,
            # which reaches the whole terminal, to its parent.
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
