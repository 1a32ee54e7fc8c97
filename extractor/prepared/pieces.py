"""What the front end passes to the store: a prepared sample, or the reason why there is none."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a row (turn 0) or one turn of it is not prepared. The store returns it as a Reject."""

    row: int
    turn: int
    id: str
    file: str
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A prepared sample that is not in the store yet.

    Attributes:
        ids: int32 [T].
        mask: uint8 [T], 1 for supervised tokens.
        truncated: whether --max-length cut tokens off its end.
    """

    row: int
    turn: int
    id: str
    file: str
    line: int
    ids: np.ndarray
    mask: np.ndarray
    truncated: bool
