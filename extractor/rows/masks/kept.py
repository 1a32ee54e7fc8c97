"""Checks that a chat template drops nothing that a row says.

For every string that an assistant says, each character is looked up in the trace of the render. Four
things may be missing: spaces; markers such as <think> that the template itself holds; the ids and
types of tool calls; and reasoning in every turn but the last, which templates strip from the history
of a conversation when the model is served.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from extractor.rows.masks.render import NOBODY, Saying, Trace
from extractor.rows.normalise import Conversation
from extractor.rows.records import BadRow, Kind, short

THOUGHT_END = "</think>"


def check_rendered(
    trace: Trace,
    conversation: Conversation,
    wanted: Collection[int],
    own: Sequence[str],
    *,
    empty: bool = False,
) -> None:
    """Check that a trace holds all that the conversation says.

    Args:
        wanted: numbers of the messages that are supervised.
        own: the template's own texts (ChatTemplate.own). Where a message holds one of them, the
            template may leave it out, replace it, or print its own.
        empty: whether a wanted turn may have no text.

    Raises:
        BadRow: "not_rendered", "tool_calls_not_rendered", "tools_not_rendered", "empty_assistant".
    """
    shown = _distinct(trace)
    if conversation.tools and not any(message < NOBODY for message, _ in shown):
        raise BadRow("tools_not_rendered", "the chat template does not print the row's tools")
    last = last_turn(conversation)
    sayings: defaultdict[int, list[Saying]] = defaultdict(list)
    for saying in trace.said:
        sayings[saying.whose.message].append(saying)
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            if message["content"].strip() and (number, Kind.OTHER) not in shown:
                raise BadRow(
                    "not_rendered",
                    f"the chat template drops message {number} ({message['role']})",
                )
            continue
        said = sayings[number]
        for saying in said:
            _check_words(saying, number, own, all_of_it=number == last and number in wanted)
        _check_calls(said, number)
        spoken = any((number, kind) in shown for kind in Kind if kind < Kind.OTHER)
        if number in wanted and not spoken and not empty:
            raise BadRow(
                "empty_assistant", f"assistant turn {number} has no text when it is rendered"
            )


def last_turn(conversation: Conversation) -> int | None:
    """The number of the last assistant message, if only tool results follow it; else None.

    When another question follows, all assistant messages are history.
    """
    for number in range(len(conversation.messages) - 1, -1, -1):
        role = conversation.messages[number]["role"]
        if role != "tool":
            return number if role == "assistant" else None
    return None


def _check_words(saying: Saying, turn: int, own: Sequence[str], *, all_of_it: bool) -> None:
    kind, text = saying.whose.kind, saying.text
    if kind not in (Kind.CONTENT, Kind.REASONING) or (kind == Kind.REASONING and not all_of_it):
        return
    cut = text.rfind(THOUGHT_END)
    begin = 0 if all_of_it or cut < 0 else cut + len(THOUGHT_END)
    for lost in saying.lost:
        if words := _without(lost.text[max(begin - lost.start, 0) :], own):
            what = "reasoning" if kind == Kind.REASONING or THOUGHT_END in text else "words"
            raise BadRow(
                "not_rendered",
                f"the chat template drops {what} of the assistant in turn {turn}: {short(words)}",
            )


def _without(text: str, own: Sequence[str]) -> str:
    text = text.strip()
    if text in own:
        return ""
    for literal in own:
        if not (len(literal) == 1 and literal.isalnum()):
            text = text.replace(literal, " ")
    return text.strip()


def _check_calls(said: Iterable[Saying], turn: int) -> None:
    """Check the name of each tool call, and each key and value of its arguments.

    Some templates print the id of a call in place of its name, when the id contains the name as in
    functions.look_up:0. That counts as printed.
    """
    calls = [saying for saying in said if saying.whose.kind in (Kind.CALL, Kind.LABEL)]
    for saying in calls:
        if saying.whose.kind == Kind.LABEL or not saying.lost:
            continue
        labels = (other for other in calls if other.whose.kind == Kind.LABEL)
        same = (label for label in labels if label.whose.call == saying.whose.call)
        if any(label.printed and saying.text in label.text for label in same):
            continue
        raise BadRow(
            "tool_calls_not_rendered",
            f"the chat template does not print the tool calls of turn {turn}: "
            f"{short(saying.lost[0].text)}",
        )


def _distinct(trace: Trace) -> set[tuple[int, int]]:
    """Pairs (message, kind) of which at least one character is printed."""
    here = (trace.origin >= 0) & ~trace.copied
    # One integer per pair, so that one np.unique finds all pairs: a Kind takes three bits.
    codes = np.unique((trace.message[here] << 3) | trace.kind[here])
    return {(code >> 3, code & 7) for code in codes.tolist()}
