"""What was done to the program and what came of it, for the table in docs/reliability.md."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """
    Attributes:
        group, fault: what was done, in words.
        times: how often it really happened (a run that ended first does not count).
        lost: samples missing or wrong in the end, or finished ones written again.
        hung: runs that did not end in time.
        slowest: seconds from the fault to the end of the last rank, the worst; None if not measured.
    """

    group: str
    fault: str
    times: int = 1
    lost: int = 0
    hung: int = 0
    slowest: float | None = None


class Ledger:
    def __init__(self, path: Path | None, test: str) -> None:
        self._path, self._test = path, test

    def add(self, injection: Injection) -> None:
        if self._path is not None:
            with self._path.open("a") as handle:
                handle.write(json.dumps({**asdict(injection), "test": self._test}) + "\n")
