"""Values of a configuration, from the command line or a file, held to the types of its fields.

The field's type says everything: what kind of value it takes, its bounds (msgspec.Meta) and its
choices (Literal). A value of another type is never converted in silence.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from extractor.errors import UsageError
from extractor.printable import printable

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]

# A path, or a name on the hub.
Place = Annotated[str, msgspec.Meta(min_length=1, extra={"path": True})]
KeyValue = Annotated[str, msgspec.Meta(pattern=r"^\s*[^=\s][^=]*=", extra={"words": "KEY=VALUE"})]

# Decimal, without what YAML 1.1 reads in its own ways: no octal 012, no 1_000, no infinity.
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
FRACTION = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
DIGITS = 40  # of a number that is converted at all
LARGEST = 2**63 - 1  # what the arrays that count rows and tokens hold
SHOWN = 80  # characters of a wrong value


class WrongValue(Exception):
    """A value that its field cannot take; the text says what came and what was wanted."""


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    """A dataclass's field names to their types, with their metadata."""
    found = typing.get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(kind)}


def number(text: str) -> int | float | str:
    """A number as people write it, or the text itself when it is none."""
    if len(text) > DIGITS:
        return text
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if FRACTION.fullmatch(text) else text


def from_word(hint: Any, word: str) -> Any:
    """One word of the command line, as the value that a file would hold in its place."""
    kinds = bare(hint)
    if type(None) in kinds and word == "None":
        return None
    return number(word) if int in kinds or float in kinds else word


def decode(hint: Any, value: Any, shown: str | None = None) -> Any:
    """A field's value, held to its type. Only what is plainly meant is converted: a list to a tuple, a
    whole number to a float, text to a path, whose ~ is expanded.

    shown: the value as it was given, for the message. Raises WrongValue."""
    try:
        made = msgspec.convert(value, hint, strict=True, dec_hook=_to_path)
        good = _is_sound(made)
    except msgspec.ValidationError:
        made, good = None, False
    if good:
        return _expanded(made) if _is_place(hint) else made
    near = nearest(value, choices(hint)) if isinstance(value, str) else ""
    text = printable(str(value) if shown is None else shown) or "''"
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    raise WrongValue(f"{text}: wanted {wanted(hint)}{near}")


def check_fields(record: Any) -> None:
    """Raises UsageError, a line for each, where fields of a dataclass hold what their types forbid."""
    wrong: list[str] = []
    for name, hint in hints(type(record)).items():
        try:
            decode(hint, getattr(record, name))
        except WrongValue as error:
            wrong.append(f"{flag(name)} {error}")
    if wrong:
        raise UsageError("\n".join(wrong))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known word that this one is most like; "" when it is like none."""
    lowered = {item.lower(): item for item in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f"; did you mean {lowered[near[0]]}?" if near else ""


def wanted(hint: Any) -> str:
    """What a type takes, in words."""
    words = [_words(member) for member in _members(hint) if _bare(member) is not type(None)]
    return " or ".join(words)


def choices(hint: Any) -> tuple[str, ...]:
    """The words of a Literal, if it is one."""
    found = (_bare(member) for member in _members(hint))
    return next((typing.get_args(kind) for kind in found if _is_literal(kind)), ())


def bare(hint: Any) -> set[Any]:
    """The types that a value may have, without their metadata."""
    return {_bare(member) for member in _members(hint)}


def _words(member: Any) -> str:
    kind = _bare(member)
    if _is_literal(kind):
        *some, last = typing.get_args(kind)
        return f"{', '.join(some)} or {last}" if some else last
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return f"a {'whole ' if kind is int else ''}number{_bounds(member)}"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return _extra(item, "words") or f"a list, each {_words(item)}"
    return "a path" if kind is Path or _is_place(member) else "text"


def _bounds(member: Any) -> str:
    metas = _metas(member)
    words = [f"{meta.ge:,} or more" for meta in metas if meta.ge is not None]
    words += [f"above {meta.gt:,}" for meta in metas if meta.gt is not None]
    words += [f"at most {meta.le:,}" for meta in metas if meta.le is not None]
    return "".join(f", {word}" for word in words)


def _is_sound(value: Any) -> bool:
    """What a type cannot say: numbers are finite and fit their arrays, and no text has a NUL."""
    if isinstance(value, tuple):
        return all(map(_is_sound, typing.cast("tuple[Any, ...]", value)))
    if isinstance(value, str | Path):
        return "\0" not in str(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= LARGEST


def _to_path(kind: Any, value: Any) -> Any:
    if kind is Path and isinstance(value, Path):
        return value
    if kind is Path and isinstance(value, str) and value:
        return Path(os.path.expanduser(value))  # noqa: PTH111  (an unknown user's stays as it is)
    raise ValueError(kind)


def _expanded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_expanded, typing.cast("tuple[Any, ...]", value)))
    return os.path.expanduser(value) if isinstance(value, str) else value  # noqa: PTH111


def _is_place(hint: Any) -> bool:
    """Whether a type, or that of its items, is Place."""
    inner = [arg for member in _members(hint) for arg in typing.get_args(_bare(member))]
    return any(_extra(member, "path") for member in (*_members(hint), *inner))


def _members(hint: Any) -> Iterator[Any]:
    """Of a union, each with its metadata."""
    kind = _bare(hint)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        yield from typing.get_args(kind)
    else:
        yield hint


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _metas(hint: Any) -> list[msgspec.Meta]:
    return [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]


def _extra(hint: Any, key: str) -> Any:
    """What a type says of itself beyond msgspec's own bounds, or None."""
    found = (meta.extra[key] for meta in _metas(hint) if meta.extra and key in meta.extra)
    return next(found, None)


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal
