"""The small records that the stages of the front end hand to each other. Nothing heavy is imported:
worker processes start with these."""

import reprlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from extractor.printable import printable

Supervise = Literal["assistant", "last", "all"]
Turns = Literal["whole", "each"]
Message = dict[str, Any]


class Kind(IntEnum):
    """What a string of a message is. All but the last are what an assistant generates; a label is
    an id or a type of a call, which a template may leave out."""

    CONTENT = 0
    REASONING = 1
    CALL = 2
    LABEL = 3
    OTHER = 4


# Rejections that the user's own limits ask for, or the row itself. Everything else is a bad row.
FILTERS = frozenset(
    {
        "too_long", "too_short", "too_few_supervised", "nothing_supervised_after_truncation",
        "switched_off",
    }
)  # fmt: skip


class BadRow(Exception):
    """A row, or one turn of it, that cannot become a sample.

    Args:
        reason: a short code that can be counted, such as "not_json".
        detail: a sentence for a person: what came, what was wanted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = printable(detail)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One record as its container gave it.

    Attributes:
        number: counts the records of the whole input, from 0; blank lines are not records, broken
            lines are.
        file, line: where it came from; in a container without lines, line counts records from 1.
        data: a line's bytes that nobody has parsed, a parsed record, or why there is none.
        size: bytes that it takes, about.
    """

    number: int
    file: str
    line: int
    data: bytes | dict[str, Any] | BadRow
    size: int = 0


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


def kind_of(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {
        dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null",
        int: "an integer", float: "a fraction",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def short(value: Any) -> str:
    """A value of a record, in a few characters."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 40
