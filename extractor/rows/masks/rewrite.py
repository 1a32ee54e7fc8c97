"""Passes every string of a conversation, with its message and its kind, through a function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from extractor.rows.normalise import REASONING, Conversation
from extractor.rows.records import Kind, Message

TOOLS = -2  # stands for a message number in strings of the row's tools


@dataclass(frozen=True, slots=True)
class Whose:
    """Which part of a conversation a string belongs to.

    Attributes:
        message: number of the message, or TOOLS.
        kind: what the string is.
        call: number of the tool call in the message.
    """

    message: int
    kind: Kind
    call: int = 0


# (text, which part it belongs to, whether the proof may change it) -> text
Rewrite = Callable[[str, Whose, bool], str]


def rewrite(conversation: Conversation, change: Rewrite) -> Conversation:
    """The conversation after `change` is applied to every string of its messages and tools.

    The order of the strings is always the same. Roles are not passed.
    """
    messages = [_rewrite_message(m, n, change) for n, m in enumerate(conversation.messages)]
    tools = _rewrite_value(conversation.tools, Whose(TOOLS, Kind.OTHER), False, change)
    return replace(conversation, messages=messages, tools=tools)


def _rewrite_message(message: Message, number: int, change: Rewrite) -> Message:
    assistant = message["role"] == "assistant"
    new: Message = {}
    for key, value in message.items():
        if key == "role":
            new[key] = value
        elif key == "content":
            kind = Kind.CONTENT if assistant else Kind.OTHER
            new[key] = change(value, Whose(number, kind), True)
        elif assistant and key == REASONING:
            new[key] = change(value, Whose(number, Kind.REASONING), True)
        elif assistant and key == "tool_calls":
            new[key] = [
                _rewrite_call(call, Whose(number, Kind.CALL, place), change)
                for place, call in enumerate(value)
            ]
        else:
            new[key] = _rewrite_value(value, Whose(number, Kind.OTHER), False, change)
    return new


def _rewrite_call(call: Message, whose: Whose, change: Rewrite) -> Message:
    """A tool call after `change`. In the proof, names and values of arguments may change.

    Ids may not change, because the result of a tool refers to them. Keys of arguments may not change,
    because templates sort by them.
    """
    new: Message = {}
    for key, value in call.items():
        if key == "function" and isinstance(value, dict):
            new[key] = _rewrite_call(value, whose, change)
        elif key == "name":
            new[key] = change(value, whose, True)
        elif key == "arguments":
            new[key] = _rewrite_value(value, whose, True, change, keys=True)
        else:
            new[key] = _rewrite_value(value, replace(whose, kind=Kind.LABEL), False, change)
    return new


def _rewrite_value(
    value: Any, whose: Whose, free: bool, change: Rewrite, keys: bool = False
) -> Any:
    if isinstance(value, str):
        return change(value, whose, free)
    if isinstance(value, list):
        return [_rewrite_value(item, whose, free, change, keys) for item in value]
    if isinstance(value, dict):
        return {
            (change(key, whose, False) if keys else key): _rewrite_value(
                item, whose, free, change, keys
            )
            for key, item in value.items()
        }
    return value
