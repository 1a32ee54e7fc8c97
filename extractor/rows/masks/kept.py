"""Nothing that a row says may be dropped in silence by its chat template.

Every string that an assistant says is looked for, character by character, in what was rendered.
What may be missing: spaces; markers such as <think> that the template knows itself; the ids and
types of tool calls; and, in every turn but the last, reasoning, which templates strip from a
conversation's history as the model is served.
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
    """Args:
        wanted: the messages that are supervised.
        own: the template's own texts (ChatTemplate.own): one of them, in a message, it may leave
            out, replace, or print itself.
        empty: a wanted turn may say nothing.

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
    """The last assistant message, unless another question follows it: then it is history, too."""
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
    """Each name, each key and each value of the arguments. (A name that the call's own id repeats,
    as in functions.look_up:0, is printed with that.)"""
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
    """Pairs (message, kind) that print at least one character of their own."""
    here = (trace.origin >= 0) & ~trace.copied
    codes = np.unique((trace.message[here] << 3) | trace.kind[here])
    return {(code >> 3, code & 7) for code in codes.tolist()}
