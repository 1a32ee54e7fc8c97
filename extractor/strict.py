"""JSON of files that may be damaged, as typed records: one decoder, and one line for what is wrong."""

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes, kind: type[T]) -> T:
    """The record in data; nothing is converted, so that "1" is no number and 1 no text.

    Raises ValueError with one line: what is wrong and where. That covers text that is no JSON, is cut
    or nested without end, numbers beyond all bounds, and values of another type."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Python writes half a surrogate pair and NaN, which msgspec does not read.
            return msgspec.convert(json.loads(data, parse_float=_finite), kind)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _finite(text: str) -> float:
    """Raises ValueError for a number that a float cannot hold."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is out of range")
    return value


def builtins(record: msgspec.Struct) -> dict[str, Any]:
    """A record as what json writes."""
    value: dict[str, Any] = msgspec.to_builtins(record)
    return value
