"""Brings an assistant's tool calls and a row's tools into the form that chat templates take."""

import json
import math
from typing import Any

from extractor.rows.records import BadRow, Message, kind_of

# The keys under which data sets put the values of a call. Templates read only the first one.
ARGUMENTS = ("arguments", "parameters", "args", "input", "params", "kwargs")

# The keys that a call may have beside its values. Another key may hold values that would be lost.
DETAILS = frozenset({"id", "type", "index", "name", "function", "call_id", "tool_call_id"})


def tool_calls(calls: Any) -> list[Message]:
    """The calls, each with a name and an object as `arguments`.

    Name and arguments stand inside a `function` object where the row has one, else beside `id` and
    `type`.

    Raises:
        BadRow: calls is not a list, or a call has no name or no readable values.
    """
    if not isinstance(calls, list):
        raise BadRow("bad_tool_calls", f"tool_calls is {kind_of(calls)}: wanted a list")
    return [_call(call, f"tool_calls[{number}]") for number, call in enumerate(calls)]


def _call(given: Any, place: str) -> Message:
    if not isinstance(given, dict):
        raise BadRow("bad_tool_calls", f"{place} is {kind_of(given)}: wanted an object")
    call = {key: value for key, value in given.items() if value is not None}
    wrapped = isinstance(call.get("function"), dict)
    function: Message = call
    if wrapped:
        function = {key: value for key, value in call["function"].items() if value is not None}
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("bad_tool_calls", f"{place} has no name")
    values = _values([function, call] if wrapped else [function], place)
    call, function = (_without_values(part) for part in (call, function))
    function["arguments"] = values
    return {**call, "function": function} if wrapped else function


def _without_values(part: Message) -> Message:
    """A part of a call without its values and without nulls, which some containers fill in."""
    return {key: without_nulls(value) for key, value in part.items() if key not in ARGUMENTS}


def _values(parts: list[Message], place: str) -> dict[str, Any]:
    """The object that holds the call's values; empty when the call has none.

    Raises:
        BadRow: two keys hold different values, or values may stand under an unknown key.
    """
    found = {key: part[key] for part in reversed(parts) for key in ARGUMENTS if key in part}
    read = {key: _object(value, f"{place}.{key}") for key, value in found.items()}
    if not read:
        others = sorted({key for part in parts for key in part} - DETAILS)
        if others:
            raise BadRow(
                "bad_tool_calls", f"{place} has no arguments; its keys are {', '.join(others)}"
            )
        return {}
    (first, values), *more = read.items()
    for key, other in more:
        if other != values:
            raise BadRow("bad_tool_calls", f"{place} has {first} and {key}, and they differ")
    if "arguments" not in read and {"type", "properties"} <= values.keys():
        raise BadRow("bad_tool_calls", f"{place}.{first} is a schema: wanted a call's values")
    return values


def _object(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_tool_calls", f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow("bad_tool_calls", f"{place} is {kind_of(value)}: wanted an object")
    if not _finite(value):
        raise BadRow("bad_tool_calls", f"{place} holds a number that JSON has not (NaN, infinity)")
    return value


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def tools(value: Any) -> list[dict[str, Any]] | None:
    """The row's tools as JSON schemas, or None.

    When the tools are a JSON text, a null in it is kept, because somebody wrote it. When they are
    objects, a null counts as an absent key, because Parquet and Arrow fill in missing keys.

    Raises:
        BadRow: the value is not a list of objects.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_tools", f"tools is not JSON: {error}") from None
    else:
        value = without_nulls(value)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("bad_tools", "tools: wanted a list of objects")
    return value


def without_nulls(value: Any) -> Any:
    """The value without the keys that hold null, at every depth. A null in a list is kept."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
