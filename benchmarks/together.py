"""How fast replicas were together: from run.json's timelines, on one clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Together:
    """The time in which all replicas of a run were at work.

    Attributes:
        begin, end: of time.time(). From the moment at which the last of them had done a tenth of its
            tokens (what the first batches set up is start-up) to that at which the first was done.
        rates: tokens/s of each in it.
        share: of the time from the first one's start to the last one's end.
    """

    begin: float
    end: float
    rates: tuple[float, ...]
    share: float

    @property
    def rate(self) -> float:
        return sum(self.rates)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def together(replicas: Sequence[dict[str, Any]]) -> Together:
    """replicas: of run.json. Rates are 0 when there is no time in which all were at work: each one's own
    rate would say nothing of what the machine did."""
    warm: list[float] = []
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for replica in replicas:
        points = np.array(replica["timeline"], np.float64)
        times, tokens = replica["began"] + points[:, 0], points[:, 1]
        warm.append(float(times[np.argmax(tokens >= tokens[-1] / 10)]))
        curves.append((times, tokens))
    begin, end = max(warm), min(float(times[-1]) for times, _ in curves)
    first = min(replica["began"] for replica in replicas)
    last = max(float(times[-1]) for times, _ in curves)
    if end <= begin:
        return Together(begin, begin, (0.0,) * len(curves), 0.0)
    rates = tuple(
        float(np.diff(np.interp([begin, end], times, tokens))[0]) / (end - begin)
        for times, tokens in curves
    )
    return Together(begin, end, rates, (end - begin) / (last - first))
