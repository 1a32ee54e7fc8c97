"""What the front end hands to the store: a prepared sample, or why there is none."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a row (turn 0) or one turn of it was not prepared; becomes a Reject in the store."""

    row: int
    turn: int
    id: str
    file: str
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A prepared sample on its way to the store.

    Attributes:
        ids: int32 [T].
        mask: uint8 [T].
        truncated: --max-length cut tokens off its end.
    """

    row: int
    turn: int
    id: str
    file: str
    line: int
    ids: np.ndarray
    mask: np.ndarray
    truncated: bool
