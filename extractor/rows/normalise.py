"""Turns a record of any accepted shape into a conversation, ids with a mask, or text.

The shapes, in the order in which they are looked for:

1. `input_ids`, with `loss_mask` (0/1) or `labels` (-100 where not supervised).
2. `messages` (`role`/`content`) or `conversations` (`from`/`value`); a message may use either pair
   of keys. `tools` beside them; a `system` text beside them becomes the first message.
3. `prompt` and `response` (or `completion`).
4. `text`, already rendered.

A key that holds null counts as absent. The reasoning of a message is moved to one key, REASONING,
whatever its key is in the record. Keys that nothing reads are listed in `unread`. A record that
gives the same thing twice (both `messages` and `conversations`, for example) is refused, because a
choice between the two would be a guess.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from extractor.rows.calls import tool_calls, tools
from extractor.rows.records import BadRow, Message, kind_of, short
from extractor.rows.switches import row_switches, take_switch

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
REASONING = "reasoning_content"
REASONING_KEYS = (
    REASONING, "reasoning", "thinking", "thought", "thoughts", "thinking_content",
    "reasoning_text", "think", "chain_of_thought", "cot",
)  # fmt: skip
REASONING_PARTS = ("thinking", "reasoning", "thought")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "conversation")
IDS = ("id", "conversation_id")
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that a chat template takes.

    Attributes:
        messages: each with `role` and a text `content`; the `tool_calls` of an assistant have
            objects as arguments.
        tools: JSON schemas, or None.
        unweighted: numbers of the messages whose own switch says that they are not supervised.
        variables: the row's `chat_template_kwargs`, which the template is given.
        unread: keys of the row that nothing in this module reads, and switches that cannot be
            obeyed.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unweighted: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unread: tuple[str, ...] = ()

    @property
    def assistant_turns(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclass(frozen=True, slots=True, eq=False)
class Pretokenized:
    """A record that is tokenized already.

    Attributes:
        ids: int64 [T].
        mask: uint8 [T], or None when the record has no mask.
    """

    ids: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class PlainText:
    text: str


Normalised = Conversation | Pretokenized | PlainText


def record_id(record: Mapping[str, Any], number: int) -> str:
    """The record's own `id` or `conversation_id` as text, or its number when it has neither."""
    for key in IDS:
        value = record.get(key)
        if isinstance(value, str | int | float) and value != "":
            return str(value)
    return str(number)


def normalise(record: Mapping[str, Any]) -> Normalised:
    """The record as one of the three things above. Raises BadRow for a record of no known shape."""
    given = {key for key, value in record.items() if value is not None}
    given -= row_switches(record)
    talk = sorted(given & {"messages", "conversations"})
    if "input_ids" in given:
        if talk:
            raise BadRow("ambiguous", f"has both input_ids and {talk[0]}: wanted one of them")
        return _pretokenized(record)
    if len(talk) == 2:
        raise BadRow("ambiguous", "has both messages and conversations: wanted one of them")
    if talk:
        return _conversation(record, record[talk[0]], talk[0], given - {talk[0]})
    if "prompt" in given:
        return _prompt_response(record, given)
    if "text" in given:
        text = record["text"]
        if not isinstance(text, str) or not text:
            raise BadRow("bad_text", f"text is {kind_of(text)}: wanted a text that is not empty")
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
        if type(item) is not int:  # in Python True is an int and 6.0 == 6; neither is an id
            raise BadRow(
                "bad_ids", f"{key}[{position}] is {kind_of(item)} {short(item)}: wanted an integer"
            )
    return values


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow("bad_ids", f"{key} is {kind_of(value)}: wanted a list of integers")
    return value


def _mask_values(value: Any, length: int) -> list[int]:
    values = _listed(value, "loss_mask")
    for position, item in enumerate(values):
        if type(item) not in (int, bool) or item not in (0, 1):
            raise BadRow("bad_mask", f"loss_mask[{position}] is {short(item)}: wanted 0 or 1")
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
    return _conversation(record, messages, "prompt", given - {"prompt", answers[0]})


def _conversation(
    record: Mapping[str, Any], messages: Any, key: str, beside: set[str]
) -> Conversation:
    if not isinstance(messages, list):
        raise BadRow("bad_messages", f"{key} is {kind_of(messages)}: wanted a list of messages")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("bad_messages", f"system is {kind_of(system)}: wanted a text")
    if not messages:
        raise BadRow("empty", f"{key} is empty")
    if "functions" in beside:
        raise BadRow("bad_tools", "functions is not read: wanted tools")
    unread = [f"row key {key}" for key in beside.difference(IDS, READ_BESIDE)]
    unweighted: set[int] = set()
    normal: list[Message] = []
    if system:
        normal.append({"role": "system", "content": system})
    for number, message in enumerate(messages):
        try:
            clean, learned = _message(message)
        except BadRow as bad:
            raise BadRow(bad.reason, f"{key}[{number}]: {bad.detail}") from None
        if learned is False:
            unweighted.add(len(normal))
        elif learned and clean["role"] != "assistant":
            unread.append(f"a switch to learn from a {clean['role']} message")
        normal.append(clean)
    if system and normal[1]["role"] == "system":
        raise BadRow("ambiguous", f"has a system text and a system message in {key}")
    if not any(message["role"] == "assistant" for message in normal):
        raise BadRow("no_assistant", f"{key} has no assistant turn: there is nothing to supervise")
    return Conversation(
        normal,
        tools(record.get("tools")),
        frozenset(unweighted),
        _variables(record.get("chat_template_kwargs")),
        tuple(dict.fromkeys(unread)),
    )


READ_BESIDE = ("system", "tools", "chat_template_kwargs")


def _variables(value: Any) -> dict[str, Any]:
    """The row's chat_template_kwargs as an object, the way TRL and model servers read them.

    Raises:
        BadRow: they are not an object, or hold something that the row itself gives.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_messages", f"chat_template_kwargs is not JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow("bad_messages", f"chat_template_kwargs is {kind_of(value)}: wanted an object")
    if taken := sorted(value.keys() & {*RESERVED}):
        raise BadRow(
            "bad_messages", f"chat_template_kwargs has {taken[0]}, which the row itself is"
        )
    return {key: item for key, item in value.items() if item is not None}


def _message(message: Any) -> tuple[Message, bool | None]:
    """(the message with `role`, `content` and no nulls, the value of its own switch or None)."""
    if not isinstance(message, dict):
        raise BadRow("bad_messages", f"is {kind_of(message)}: wanted an object")
    clean: Message = {str(key): value for key, value in message.items() if value is not None}
    role = _either(clean, "role", "from")
    if not isinstance(role, str):
        raise BadRow("bad_messages", "has no role")
    known = ROLES.get(role.strip().lower())
    if known is None:
        raise BadRow("unknown_role", f"unknown role {role!r}")
    content = _either(clean, "content", "value")
    if known == "assistant":
        content = _thought_parts(clean, content)
        _one_reasoning(clean)
    learned = take_switch(clean)
    calls = clean.pop("tool_calls", None)
    if clean.get("function_call"):
        raise BadRow("bad_tool_calls", "function_call is not read: wanted tool_calls")
    clean = {"role": known, "content": _text(content, "content"), **clean}
    if calls:
        if known != "assistant":
            raise BadRow("bad_tool_calls", f"a {known} message has tool_calls")
        clean["tool_calls"] = tool_calls(calls)
    return clean, learned


def _one_reasoning(message: Message) -> None:
    """Move an assistant's reasoning to the key REASONING. Raises BadRow for two that differ."""
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        if key in message:
            found[key] = _text(message.pop(key), key)
    said = {text for text in found.values() if text.strip()}
    if len(said) > 1:
        raise BadRow("ambiguous", f"{' and '.join(found)} differ")
    if message.pop("reasoning_details", None) and not said:
        raise BadRow("bad_content", f"reasoning_details is not read: wanted {REASONING}")
    if found:
        message[REASONING] = next(iter(said), "")


def _thought_parts(message: Message, content: Any) -> Any:
    """Content without the reasoning parts at its beginning, which move to the key REASONING."""
    if not isinstance(content, list):
        return content
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in REASONING_PARTS:
            break
        thought = part.get(kind) or part.get("text")
        if not thought:
            raise BadRow("bad_content", f"a content part of type {kind} has no text")
        thoughts.append(_text(thought, kind))
    if not thoughts:
        return content
    if any(key in message for key in REASONING_KEYS):
        raise BadRow("ambiguous", "has reasoning and content parts with thoughts")
    message[REASONING] = "".join(thoughts)
    return content[len(thoughts) :]


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
        raise BadRow("bad_content", f"{key} is {kind_of(value)}: wanted a text")
    texts: list[str] = []
    for number, part in enumerate(value):
        if isinstance(part, dict):
            kind, part = part.get("type", "text"), part.get("text")
            if kind not in TEXT_PARTS:
                raise BadRow("bad_content", f"{key}[{number}] is of type {kind!r}: wanted text")
        if not isinstance(part, str):
            raise BadRow("bad_content", f"{key}[{number}] is {kind_of(part)}: wanted a text part")
        texts.append(part)
    return "".join(texts)
