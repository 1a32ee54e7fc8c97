"""Signals that ask for an end: the first drains, a second one exits at once."""

import os
import signal
import time
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# One Ctrl-C reaches a worker twice: from the terminal, and from torchrun, which passes it on.
ECHO_SECONDS = 1.0


class StopSignals:
    """Installs handlers; `asked` names the first signal that came."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._at = 0.0
        for number in ASKING:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._at = signal.Signals(number).name, now
        elif now - self._at > ECHO_SECONDS:
            os._exit(128 + number)
