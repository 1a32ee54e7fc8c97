"""Tries the forms in which templates take a conversation; uses the first that is printed whole."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from extractor.rows.masks.kept import check_rendered
from extractor.rows.masks.render import ChatTemplate, Trace
from extractor.rows.normalise import REASONING, Conversation
from extractor.rows.records import BadRow, Message

# The reasons of a rejection after which another form of the same conversation is tried.
_OF_THE_FORM = ("template_error", "not_rendered", "tool_calls_not_rendered", "tools_not_rendered")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def render(
    template: ChatTemplate, talk: Conversation, wanted: Collection[int], *, empty: bool
) -> Trace:
    """Render a conversation with a template, prove it, and check that nothing is dropped.

    Some templates refuse tools or arguments in the usual form, or do not print all of them. They are
    given the other form that is in use (SGLang does so for tools). Some templates cut a thought out
    of the content and read a key of its own for it. They are given that key.

    Args:
        wanted, empty: as for check_rendered.

    Raises:
        BadRow: the template prints the whole conversation in none of the forms. It says what is wrong
            with the usual form.
    """
    first: BadRow | None = None
    for form in _forms(template, talk):
        try:
            trace = template.prove(form)
            check_rendered(trace, form, wanted, template.own, empty=empty)
            return trace
        except BadRow as bad:
            first = first or bad
            if bad.reason not in _OF_THE_FORM:
                break
    assert first is not None
    raise first


def _forms(template: ChatTemplate, talk: Conversation) -> Iterator[Conversation]:
    yield talk
    if talk.tools and any(isinstance(tool.get("function"), dict) for tool in talk.tools):
        yield replace(talk, tools=[tool.get("function", tool) for tool in talk.tools])
    if any("tool_calls" in message for message in talk.messages):
        yield replace(talk, messages=[_with_text_arguments(message) for message in talk.messages])
    if template.reasoning and any(map(_has_inline_thought, talk.messages)):
        yield replace(talk, messages=[_with_reasoning_key(message) for message in talk.messages])


def _with_text_arguments(message: Message) -> Message:
    """The message with arguments as JSON text, for templates that print them without tojson."""
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function = {**function, "arguments": text}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _has_inline_thought(message: Message) -> bool:
    return (
        message["role"] == "assistant"
        and not message.get(REASONING)
        and bool(_THOUGHT.match(message["content"]))
    )


def _with_reasoning_key(message: Message) -> Message:
    found = _THOUGHT.match(message["content"])
    if found is None or not _has_inline_thought(message):
        return message
    return {**message, "content": found[2].lstrip("\n"), REASONING: found[1].strip("\n")}
