"""A record of any accepted shape to one of three things: a conversation, ids with a mask, or text.

Shapes, in the order in which they are looked for:

1. `input_ids`, with `loss_mask` (0/1) or `labels` (-100 where not supervised).
2. `messages` (`role`/`content`) or `conversations` (`from`/`value`); a message may use either pair
   of keys. `tools` beside them; a `system` text beside them becomes the first message.
3. `prompt` and `response` (or `completion`).
4. `text`, already rendered.

A key that holds null is a key that is not there. Two answers to one question (both `messages` and
`conversations`, say) are refused, never chosen between.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from extractor.data.rows import BadRow, Message

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them.

    Attributes:
        messages: each with `role` and a text `content`; an assistant's `tool_calls` have objects
            as arguments.
        tools: JSON schemas, or None.
        unweighted: numbers of the messages that carry `weight: 0`, which are not supervised.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unweighted: frozenset[int] = field(default_factory=frozenset)

    @property
    def assistant_turns(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclass(frozen=True, slots=True, eq=False)
class Pretokenized:
    """ids int64 [T], and mask uint8 [T] or None when the record has none."""

    ids: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class PlainText:
    text: str


Normalised = Conversation | Pretokenized | PlainText


def record_id(record: Mapping[str, Any], number: int) -> str:
    """The record's own `id` or `conversation_id` as text; its number when it has none."""
    for key in ("id", "conversation_id"):
        value = record.get(key)
        if isinstance(value, str | int | float) and value != "":
            return str(value)
    return str(number)


def normalise(record: Mapping[str, Any]) -> Normalised:
    """Raises BadRow."""
    given = {key for key, value in record.items() if value is not None}
    talk = sorted(given & {"messages", "conversations"})
    if "input_ids" in given:
        if talk:
            raise BadRow("ambiguous", f"has both input_ids and {talk[0]}: wanted one of them")
        return _pretokenized(record)
    if len(talk) == 2:
        raise BadRow("ambiguous", "has both messages and conversations: wanted one of them")
    if talk:
        return _conversation(record, record[talk[0]], talk[0])
    if "prompt" in given:
        return _prompt_response(record, given)
    if "text" in given:
        text = record["text"]
        if not isinstance(text, str) or not text:
            raise BadRow("bad_text", f"text is {_kind(text)}: wanted a text that is not empty")
        return PlainText(text)
    shown = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise BadRow(
        "unknown_shape",
        "wanted messages, conversations, prompt and response, input_ids or text that is not null; "
        f"the keys are {shown}",
    )


def _pretokenized(record: Mapping[str, Any]) -> Pretokenized:
    ids = _integers(record["input_ids"], "input_ids")
    if not ids:
        raise BadRow("empty", "input_ids is empty")
    padding = record.get("attention_mask")
    if padding is not None and not all(value == 1 for value in _listed(padding, "attention_mask")):
        raise BadRow("padded", "attention_mask has zeros: wanted ids without padding")
    masks: list[list[int]] = []
    if record.get("loss_mask") is not None:
        masks.append(_mask_values(record["loss_mask"], len(ids)))
    if record.get("labels") is not None:
        masks.append(_mask_of_labels(record["labels"], ids))
    if len(masks) == 2 and masks[0] != masks[1]:
        raise BadRow("ambiguous", "loss_mask and labels mark different tokens")
    try:
        array = np.array(ids, np.int64)
    except OverflowError:
        raise BadRow("id_out_of_range", f"input_ids holds {max(ids, key=abs)}") from None
    return Pretokenized(array, np.array(masks[0], np.uint8) if masks else None)


def _integers(value: Any, key: str) -> list[int]:
    values = _listed(value, key)
    for position, item in enumerate(values):
        if type(item) is not int:  # bool is an int to Python, and 6.0 equals 6: neither is an id
            raise BadRow(
                "bad_ids", f"{key}[{position}] is {_kind(item)} {_short(item)}: wanted an integer"
            )
    return values


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow("bad_ids", f"{key} is {_kind(value)}: wanted a list of integers")
    return value


def _mask_values(value: Any, length: int) -> list[int]:
    values = _listed(value, "loss_mask")
    for position, item in enumerate(values):
        if type(item) not in (int, bool) or item not in (0, 1):
            raise BadRow("bad_mask", f"loss_mask[{position}] is {_short(item)}: wanted 0 or 1")
    if len(values) != length:
        raise BadRow("bad_mask", f"loss_mask has {len(values)} entries, input_ids {length}")
    return [int(item) for item in values]


def _mask_of_labels(value: Any, ids: list[int]) -> list[int]:
    labels = _integers(value, "labels")
    if len(labels) != len(ids):
        raise BadRow("bad_mask", f"labels has {len(labels)} entries, input_ids {len(ids)}")
    for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORED_LABEL, token):
            raise BadRow(
                "bad_mask",
                f"labels[{position}] is {label} and input_ids[{position}] is {token}: "
                "wanted -100 or the same id (labels must not be shifted)",
            )
    return [int(label != IGNORED_LABEL) for label in labels]


def _prompt_response(record: Mapping[str, Any], given: set[str]) -> Conversation:
    answers = sorted(given & {"response", "completion"})
    if len(answers) != 1:
        raise BadRow(
            "ambiguous" if answers else "unknown_shape",
            f"has prompt and {' and '.join(answers) or 'no response'}: wanted prompt and response",
        )
    prompt, answer = record["prompt"], record[answers[0]]
    messages: list[Any] = []
    for value, role in ((prompt, "user"), (answer, "assistant")):
        messages += value if isinstance(value, list) else [{"role": role, "content": value}]
    return _conversation(record, messages, "prompt")


def _conversation(record: Mapping[str, Any], messages: Any, key: str) -> Conversation:
    if not isinstance(messages, list):
        raise BadRow("bad_messages", f"{key} is {_kind(messages)}: wanted a list of messages")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("bad_messages", f"system is {_kind(system)}: wanted a text")
    if not messages:
        raise BadRow("empty", f"{key} is empty")
    unweighted: set[int] = set()
    normal: list[Message] = []
    if system:
        normal.append({"role": "system", "content": system})
    for number, message in enumerate(messages):
        try:
            clean, weight = _message(message)
        except BadRow as bad:
            raise BadRow(bad.reason, f"{key}[{number}]: {bad.detail}") from None
        if weight == 0:
            unweighted.add(len(normal))
        normal.append(clean)
    if system and normal[1]["role"] == "system":
        raise BadRow("ambiguous", f"has a system text and a system message in {key}")
    if not any(message["role"] == "assistant" for message in normal):
        raise BadRow("no_assistant", f"{key} has no assistant turn: there is nothing to supervise")
    return Conversation(normal, _tools(record.get("tools")), frozenset(unweighted))


def _message(message: Any) -> tuple[Message, int]:
    """(the message with `role`, `content` and no nulls, its weight)."""
    if not isinstance(message, dict):
        raise BadRow("bad_messages", f"is {_kind(message)}: wanted an object")
    clean: Message = {str(key): value for key, value in message.items() if value is not None}
    role = _either(clean, "role", "from")
    if not isinstance(role, str):
        raise BadRow("bad_messages", "has no role")
    known = ROLES.get(role.strip().lower())
    if known is None:
        raise BadRow("unknown_role", f"unknown role {role!r}")
    content = _text(_either(clean, "content", "value"), "content")
    for key in REASONING_KEYS:
        if key in clean:
            clean[key] = _text(clean[key], key)
    weight = clean.pop("weight", 1)
    if weight not in (0, 1):
        raise BadRow("bad_messages", f"weight is {_short(weight)}: wanted 0 or 1")
    calls = clean.pop("tool_calls", None)
    if clean.get("function_call"):
        raise BadRow("bad_tool_calls", "function_call is not read: wanted tool_calls")
    clean = {"role": known, "content": content, **clean}
    if calls:
        if known != "assistant":
            raise BadRow("bad_tool_calls", f"a {known} message has tool_calls")
        clean["tool_calls"] = _tool_calls(calls)
    return clean, int(weight)


def _either(message: Message, first: str, second: str) -> Any:
    one, other = message.pop(first, None), message.pop(second, None)
    if one is not None and other is not None and one != other:
        raise BadRow("ambiguous", f"{first} and {second} differ")
    return other if one is None else one


def _text(value: Any, key: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRow("bad_content", f"{key} is {_kind(value)}: wanted a text")
    texts: list[str] = []
    for number, part in enumerate(value):
        if isinstance(part, dict):
            kind, part = part.get("type", "text"), part.get("text")
            if kind not in TEXT_PARTS:
                raise BadRow("bad_content", f"{key}[{number}] is of type {kind!r}: wanted text")
        if not isinstance(part, str):
            raise BadRow("bad_content", f"{key}[{number}] is {_kind(part)}: wanted a text part")
        texts.append(part)
    return "".join(texts)


def _tool_calls(calls: Any) -> list[Message]:
    if not isinstance(calls, list):
        raise BadRow("bad_tool_calls", f"tool_calls is {_kind(calls)}: wanted a list")
    clean: list[Message] = []
    for number, call in enumerate(calls):
        if not isinstance(call, dict):
            raise BadRow("bad_tool_calls", f"tool_calls[{number}] is {_kind(call)}")
        call = {key: value for key, value in call.items() if value is not None}
        wrapped = isinstance(call.get("function"), dict)
        function: Message = dict(call["function"]) if wrapped else dict(call)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow("bad_tool_calls", f"tool_calls[{number}] has no name")
        function["arguments"] = _arguments(function.get("arguments"), number)
        clean.append({**call, "function": function} if wrapped else function)
    return clean


def _arguments(value: Any, number: int) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(
                "bad_tool_calls", f"tool_calls[{number}].arguments is not JSON: {error}"
            ) from None
    if not isinstance(value, dict):
        raise BadRow(
            "bad_tool_calls", f"tool_calls[{number}].arguments is {_kind(value)}: wanted an object"
        )
    return value


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_tools", f"tools is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("bad_tools", "tools: wanted a list of objects")
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null",
        int: "an integer", float: "a fraction",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
