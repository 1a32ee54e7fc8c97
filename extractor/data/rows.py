"""The small records that the stages of the front end hand to each other. Nothing heavy is imported:
worker processes start with these."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Supervise = Literal["assistant", "last", "all"]
Turns = Literal["whole", "each"]
Message = dict[str, Any]

# Rejections that the user's own limits ask for. Everything else is a bad row.
FILTERS = frozenset(
    {"too_long", "too_short", "too_few_supervised", "nothing_supervised_after_truncation"}
)


class BadRow(Exception):
    """A row, or one turn of it, that cannot become a sample.

    Args:
        reason: a short code that can be counted, such as "not_json".
        detail: a sentence for a person: what came, what was wanted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class RawRow:
    """One record as its container gave it.

    Attributes:
        number: counts the records of the whole input, from 0; blank lines are not records, broken
            lines are.
        file, line: where it came from; in a container without lines, line counts records from 1.
        data: a line's bytes that nobody has parsed, a parsed record, or why there is none.
    """

    number: int
    file: str
    line: int
    data: bytes | dict[str, Any] | BadRow


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sample's length may be, and what happens when it is not.

    Attributes:
        vocab_size: every id must be in [0, vocab_size).
        context_length: a longer sample is a bad row when no max_length is given.
    """

    vocab_size: int
    context_length: int
    max_length: int | None
    overlong: Literal["truncate", "skip"]
    min_length: int
    min_supervised: int
