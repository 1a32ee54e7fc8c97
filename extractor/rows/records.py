"""The small records that the stages of the front end pass to each other.

Every worker process imports this module first, so it imports nothing heavy.
"""

import reprlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from extractor.printable import printable

Supervise = Literal["assistant", "last", "all"]
Turns = Literal["whole", "each"]
Message = dict[str, Any]


class Kind(IntEnum):
    """What a string of a message is.

    An assistant generates all kinds except OTHER. LABEL is the id or the type of a tool call, which
    a template may leave out.
    """

    CONTENT = 0
    REASONING = 1
    CALL = 2
    LABEL = 3
    OTHER = 4


# Reasons for which the user's limits, or the row's own switch, reject a row. A row that is rejected
# for any other reason is a bad row, and --bad-rows decides what happens.
FILTERS = frozenset(
    {
        "too_long", "too_short", "too_few_supervised", "nothing_supervised_after_truncation",
        "switched_off",
    }
)  # fmt: skip


class BadRow(Exception):
    """A row, or one turn of it, cannot become a sample.

    Args:
        reason: a short code that can be counted, such as "not_json".
        detail: a sentence for a person: what came, and what was wanted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = printable(detail)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One record as its container holds it.

    Attributes:
        number: counts the records of the whole input, from 0. A broken line counts as a record, a
            blank line does not.
        file, line: where the record stands. In a container without lines, line counts records
            from 1.
        data: the bytes of a record that is not parsed yet, a parsed record, or the reason why there
            is no record.
        size: approximate number of bytes of a parsed record; 0 for bytes.
    """

    number: int
    file: str
    line: int
    data: bytes | dict[str, Any] | BadRow
    size: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Which lengths a sample may have, in tokens, and what happens to a sample of another length.

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
    """The JSON type of a value of a record, in words for a message."""
    names = {
        dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null",
        int: "an integer", float: "a fraction",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def short(value: Any) -> str:
    """A value of a record, shortened for a message."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 40
