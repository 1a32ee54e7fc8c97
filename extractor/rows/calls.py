"""An assistant's tool calls and a row's tools, as chat templates take them."""

import json
import math
from typing import Any

from extractor.rows.records import BadRow, Message, kind_of

# Under which writers of data put a call's values. Templates read the first name alone.
ARGUMENTS = ("arguments", "parameters", "args", "input", "params", "kwargs")

# What a call may have beside its name and its values.
DETAILS = frozenset({"id", "type", "index", "name", "function", "call_id", "tool_call_id"})


def tool_calls(calls: Any) -> list[Message]:
    """Each with a name and an object as `arguments`, beside `id` and `type` or inside a `function`
    as it came. Raises BadRow."""
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
    """Nulls inside are of a container that fills in missing keys, too."""
    return {key: without_nulls(value) for key, value in part.items() if key not in ARGUMENTS}


def _values(parts: list[Message], place: str) -> dict[str, Any]:
    """The one object that the call's values are. Raises BadRow where there are two, or where
    values may stand under a name that is not known here."""
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
    """JSON schemas, or None. In JSON text a null stands as it was written; in objects it is a
    missing key that Parquet or Arrow filled in. Raises BadRow."""
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
    """The value without the keys that hold null, however deep. An item of a list stays."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
