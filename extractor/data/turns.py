"""Where each assistant turn begins and ends in a rendered conversation.

Supervised is what the model itself generates when it is served with this template: everything
after the generation prompt, to the end-of-turn token and with it. Reasoning and tool calls that the
template prints are in, with the markers around them, for the model writes those too; headers, other
roles' text, tool results and the newline after the end-of-turn token are not. A template with
`{% generation %}` blocks says so itself, and then it is believed.

The generation prompt and the end-of-turn tokens are a property of the template, learned once from
short conversations of our own (`TurnShape.learn`). In a row they are looked for only in the
template's own text next to the turn, never in what somebody wrote.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from extractor.data.normalise import Conversation
from extractor.data.render import NOBODY, ChatTemplate, Kind, Trace
from extractor.data.rows import BadRow, Message, Supervise

_USER: Message = {"role": "user", "content": "Where do geese go?"}
_AGAIN: Message = {"role": "user", "content": "And ducks?"}
_SYSTEM: Message = {"role": "system", "content": "Speak of birds."}
_ANSWER: Message = {"role": "assistant", "content": "South."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"bird": "goose"}},
        }
    ],
}
_RESULT: Message = {
    "role": "tool",
    "content": "Far.",
    "tool_call_id": "call00000",
    "name": "look_up",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, stop) that message `message` is supervised on."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TurnShape:
    """How a template opens and closes an assistant turn.

    Attributes:
        header: what stands before an answer: the generation prompt, or, in a template that has
            none, the text that it prints between a question and an answer.
        prompts: by the role of the message before, (what closes that message, that and the
            generation prompt).
        terminators: end-of-turn tokens.
        eos: the tokenizer's own end token, or "".
        openers: by the role of the message after a tool call, what opens that message; for
            templates that end a turn by no token.
        special: matches any special token.
    """

    header: str
    prompts: Mapping[str, tuple[str, str]]
    terminators: frozenset[str]
    eos: str
    openers: Mapping[str, str]
    special: "re.Pattern[str]" = field(repr=False)

    @classmethod
    def learn(
        cls, template: ChatTemplate, special_tokens: Collection[str], eos: str | None
    ) -> "TurnShape":
        ordered = sorted(filter(None, special_tokens), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        prompts = _prompts(template)
        closing, opening = prompts.get("user", ("", ""))
        header = opening[len(closing) :]
        if not header.strip():
            header = _lead(template, closing) or header
        terminators = _terminators(template, special) | ({eos} if eos else set())
        openers = _openers(template)
        return cls(header, prompts, frozenset(terminators), eos or "", openers, special)


def _try(template: ChatTemplate, *messages: Message, prompt: bool = False) -> Trace | None:
    """A trace, or None when the template refuses such a conversation, as some do."""
    try:
        return template.trace(Conversation(list(messages)), prompt)
    except Exception:
        return None


def _tail(trace: Trace | None) -> str | None:
    """The template's text after the last character that is somebody's."""
    if trace is None or not (trace.origin >= 0).any():
        return None
    return trace.text[int(np.flatnonzero(trace.origin >= 0)[-1]) + 1 :]


def _shared(one: str, other: str) -> str:
    """The longest common beginning."""
    pairs = zip(one, other, strict=False)
    return one[: next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _prompts(template: ChatTemplate) -> dict[str, tuple[str, str]]:
    prompts: dict[str, tuple[str, str]] = {}
    talks = {
        "user": ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _AGAIN]),
        "tool": ([_USER, _CALL, _RESULT], [_SYSTEM, _USER, _CALL, _RESULT]),
        "system": ([_SYSTEM],),
    }
    for role, attempts in talks.items():
        for talk in attempts:
            closed = _tail(_try(template, *talk))
            opened = _tail(_try(template, *talk, prompt=True))
            if closed is not None and opened is not None:
                shared = _shared(closed, opened)
                prompts[role] = (shared, opened)
                break
    return prompts


def _lead(template: ChatTemplate, closing: str) -> str:
    """What a template without a generation prompt prints between a question and an answer."""
    trace = _try(template, _USER, _ANSWER) or _try(template, _SYSTEM, _USER, _ANSWER)
    if trace is None:
        return ""
    answer = np.flatnonzero(trace.message == trace.message.max())
    asked = np.flatnonzero((trace.origin >= 0) & (trace.message < trace.message.max()))
    if not len(answer) or not len(asked):
        return ""
    between = trace.text[int(asked[-1]) + 1 : int(answer[0])]
    lead = between.removeprefix(closing)
    return lead if lead.strip() else ""


def _terminators(template: ChatTemplate, special: "re.Pattern[str]") -> set[str]:
    found: set[str] = set()
    final = _tail(_try(template, _USER, _ANSWER)) or ""
    first = special.search(final)
    if first:
        found.add(first[0])
        found |= _history_terminator(template, special, first[0])
    called = _try(template, _USER, _CALL)
    printed = called is not None and any(call.printed and call.spoken for call in called.calls)
    closers = special.findall(_tail(called) or "") if printed else []
    if closers and not found & set(closers):
        found.add(closers[-1])
    return found


def _openers(template: ChatTemplate) -> dict[str, str]:
    closed = _tail(_try(template, _USER, _CALL))
    openers: dict[str, str] = {}
    for message in (_RESULT, _AGAIN):
        trace = _try(template, _USER, _CALL, message)
        if trace is None or closed is None:
            continue
        said = np.flatnonzero((trace.message == 1) & ~trace.copied)
        after = np.flatnonzero((trace.message == 2) | trace.copied)
        after = after[after > said[-1]] if len(said) else after[:0]
        between = trace.text[int(said[-1]) + 1 : int(after[0])] if len(after) else ""
        if between.startswith(closed) and between != closed:
            openers[message["role"]] = between[len(closed) :]
    return openers


def _history_terminator(template: ChatTemplate, special: "re.Pattern[str]", final: str) -> set[str]:
    """The token that closes a turn in the middle, where a template has another than at the end."""
    trace = _try(template, _USER, _ANSWER, _AGAIN)
    alone = _try(template, _USER)
    if trace is None or alone is None:
        return set()
    answer = np.flatnonzero(trace.message == 1)
    after = np.flatnonzero(trace.message == 2)
    if not len(answer) or not len(after):
        return set()
    token = special.search(trace.text[int(answer[-1]) + 1 : int(after[0])])
    if token is None or token[0] == final:
        return set()
    # A token that opens the next message does not end this one, unless it ends messages elsewhere.
    closes_question = special.search(_tail(alone) or "")
    before = alone.text[: int(np.flatnonzero(alone.origin >= 0)[0])]
    if (closes_question and closes_question[0] == token[0]) or token[0] not in before:
        return {token[0]}
    return set()


def wanted_turns(conversation: Conversation, supervise: Supervise) -> list[int]:
    """Numbers of the assistant messages to supervise."""
    turns = conversation.assistant_turns
    if supervise == "last":
        turns = turns[-1:]
    return [turn for turn in turns if turn not in conversation.unweighted]


def spans(
    trace: Trace, conversation: Conversation, shape: TurnShape, wanted: list[int], blocks: bool
) -> list[Span]:
    """The spans of the wanted assistant messages, in order.

    Args:
        blocks: the template marks what is generated itself.

    Raises:
        BadRow: "not_rendered" when the template dropped something that was said, "empty_assistant"
            for a turn that says nothing, "mask_unproved" when a turn's place is not certain.
    """
    check_rendered(trace, conversation, wanted)
    if blocks:
        return _block_spans(trace, wanted)
    bones = trace.bones()
    somebody = np.flatnonzero(trace.origin >= 0)
    found: list[Span] = []
    for turn in wanted:
        span = _turn_span(trace, conversation, shape, turn, bones, somebody)
        if found and span.start < found[-1].stop:
            raise BadRow("mask_unproved", f"turns {found[-1].message} and {turn} overlap")
        found.append(span)
    return found


def _generated(trace: Trace, turn: int) -> np.ndarray:
    """Positions of what the assistant said in a turn, first prints only."""
    return np.flatnonzero((trace.message == turn) & (trace.kind < Kind.OTHER) & ~trace.copied)


def _turn_span(
    trace: Trace,
    conversation: Conversation,
    shape: TurnShape,
    turn: int,
    bones: str,
    somebody: np.ndarray,
) -> Span:
    said = _generated(trace, turn)
    first, last = int(said[0]), int(said[-1])
    inside = trace.message[first : last + 1]
    ours = (inside == turn) & (trace.kind[first : last + 1] < Kind.OTHER)
    if not (ours | (inside == NOBODY)).all():
        raise BadRow("mask_unproved", f"other text stands inside assistant turn {turn}")
    before = somebody[somebody < first]
    low = int(before[-1]) + 1 if len(before) else 0
    # Copies of the turn's own text may follow it, before its end (a closing tag that repeats a
    # name) or after (a tool result's header); whatever else follows is not the turn's.
    after = somebody[somebody > last]
    after = after[(trace.message[after] != turn) | ~trace.copied[after]]
    high = int(after[0]) if len(after) else len(bones)
    is_call = "tool_calls" in conversation.messages[turn]
    start = low + _begin(bones[low:first], conversation, shape, turn, trace.kind[first])
    following = conversation.messages[turn + 1]["role"] if high < len(bones) else ""
    stop = last + 1 + _end(bones[last + 1 : high], shape, turn, is_call, following)
    return Span(turn, start, stop)


def _begin(lead: str, conversation: Conversation, shape: TurnShape, turn: int, kind: int) -> int:
    """Where the turn begins within the template's text that leads to its first character."""
    header = shape.header
    if header and (found := lead.rfind(header)) >= 0:
        return found + len(header)
    previous = conversation.messages[turn - 1]["role"] if turn else ""
    closing, opening = shape.prompts.get(previous, ("", ""))
    if opening and lead.startswith(closing):
        shared = len(_shared(lead, opening))
        if shared < len(opening):
            shared = _whole(opening, shared, shape, at_least=len(closing))
        if not header and kind != Kind.CALL and not lead[shared:].strip():
            return len(lead)  # a space that the template prints before an answer
        if shared > len(closing) or not header:
            return shared
        if shared == len(opening):
            return shared
    for length in range(len(header) - 1, 0, -1):
        if _whole(header, length, shape, at_least=0) != length:
            continue
        if (found := lead.rfind(header[:length])) >= 0 and header[:length].strip():
            return found + length
    if kind == Kind.CALL:
        raise BadRow("mask_unproved", f"where the tool calls of turn {turn} begin is not certain")
    return len(lead)


def _whole(text: str, length: int, shape: TurnShape, at_least: int) -> int:
    """The longest part of text[:length] that ends with a whole line or a whole special token, so
    that no marker is cut in two; at_least when there is none."""
    ends = [found.end() for found in shape.special.finditer(text)]
    ends += [found.end() for found in re.finditer(r"\n|>|\]", text)]
    return max((end for end in ends if at_least <= end <= length), default=at_least)


def _end(tail: str, shape: TurnShape, turn: int, is_call: bool, following: str) -> int:
    """How much of the template's text after the turn's last character is still the turn's.

    Args:
        following: the role of the next message, when more of the conversation follows.
    """
    for found in shape.special.finditer(tail):
        if found[0] in shape.terminators:
            # Some close an answer with a token of its own and then the turn with another.
            closed = shape.eos and tail.startswith(shape.eos, found.end())
            return found.end() + (len(shape.eos) if closed else 0)
        if not is_call:
            return 0
    if not is_call:
        return 0
    opener = shape.openers.get(following, "")
    if not following:
        return len(tail.rstrip())
    if opener and tail.endswith(opener):
        return len(tail) - len(opener)
    raise BadRow("mask_unproved", f"where the tool calls of turn {turn} end is not certain")


def _block_spans(trace: Trace, wanted: list[int]) -> list[Span]:
    found: list[Span] = []
    for turn in wanted:
        said = _generated(trace, turn)
        numbers = np.unique(trace.block[said])
        numbers = numbers[numbers > 0]
        if not len(numbers):
            raise BadRow("mask_unproved", f"turn {turn} is in no generation block of the template")
        for number in numbers:
            place = np.flatnonzero(trace.block == number)
            start, stop = int(place[0]), int(place[-1]) + 1
            owners = trace.message[start:stop]
            mine = (owners == turn) | (owners == NOBODY) | trace.copied[start:stop]
            if stop - start != len(place) or not mine.all():
                raise BadRow("mask_unproved", f"a generation block holds more than turn {turn}")
            found.append(Span(turn, start, stop))
    return sorted(found, key=lambda span: span.start)


def check_rendered(trace: Trace, conversation: Conversation, wanted: Collection[int]) -> None:
    """Nothing that the row says may be dropped in silence.

    What may be: reasoning in earlier turns, which templates strip (a reasoning field, or what
    stands before `</think>` in a content).

    Raises:
        BadRow: "not_rendered", "tool_calls_not_rendered", "tools_not_rendered", "empty_assistant".
    """
    shown = _distinct(trace)
    printed = {message for message, _ in shown}
    if conversation.tools and not any(message < NOBODY for message in printed):
        raise BadRow("tools_not_rendered", "the chat template does not print the row's tools")
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message["content"]
        if role != "assistant":
            if content.strip() and (number, Kind.OTHER) not in shown:
                raise BadRow("not_rendered", f"the chat template drops message {number} ({role})")
            continue
        visible = content.rpartition("</think>")[2]
        if visible.strip() and (number, Kind.CONTENT) not in shown:
            raise BadRow(
                "not_rendered", f"the chat template drops what the assistant says in turn {number}"
            )
        if lost := _lost_in_calls(trace, number):
            raise BadRow(
                "tool_calls_not_rendered",
                f"the chat template does not print the tool calls of turn {number} ({lost[:60]!r})",
            )
        if number in wanted and not any((number, kind) in shown for kind in list(Kind)[:3]):
            raise BadRow(
                "empty_assistant", f"assistant turn {number} has no text when it is rendered"
            )


def _lost_in_calls(trace: Trace, turn: int) -> str:
    """A name or an argument that is not printed, or "". (A name that an id repeats, as in
    functions.look_up:0, is printed with that.)"""
    calls = [call for call in trace.calls if call.message == turn]
    printed = [call.text for call in calls if call.printed and not call.spoken]
    for call in calls:
        lost = call.spoken and not call.printed and call.text.strip()
        if lost and not any(call.text in text for text in printed):
            return call.text
    return ""


def _distinct(trace: Trace) -> set[tuple[int, int]]:
    """Pairs (message, kind) that print at least one character of their own."""
    here = (trace.origin >= 0) & ~trace.copied
    codes = np.unique((trace.message[here] << 3) | trace.kind[here])
    return {(code >> 3, code & 7) for code in codes.tolist()}
