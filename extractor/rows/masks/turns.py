"""Finds where each assistant turn begins and ends in a rendered conversation.

A turn is what the model itself generates when it is served with this template: everything after the
generation prompt, up to and including the end-of-turn token. Reasoning and tool calls that the
template prints belong to it, with the markers around them, because the model writes those too.
Headers, the text of other roles, tool results and the newline after the end-of-turn token do not. A
template with `{% generation %}` blocks marks the generated text itself, and those blocks are used.

The generation prompt and the end-of-turn tokens are a property of the template. They are learned
once from short built-in conversations (`TurnShape.learn`). In a row they are searched for only in
the template's own text next to the turn, never in the text of a message.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from extractor.rows.masks.render import NOBODY, ChatTemplate, Trace
from extractor.rows.normalise import Conversation
from extractor.rows.records import BadRow, Kind, Message, Supervise

WINDOW = 4096  # characters that a search examines at a time
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
    """The supervised characters [start, stop) of the rendered text, for message number `message`."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TurnShape:
    """How a template opens and closes an assistant turn.

    Attributes:
        header: the text before an answer: the generation prompt or, in a template that has none,
            the text that it prints between a question and an answer.
        prompts: by the role of the message before the answer: (the text that closes that message,
            the same text with the generation prompt).
        terminators: the texts that end a turn, mostly one special token.
        doubled: the terminators that the tokenizer's end token follows in the middle of a
            conversation, so that it belongs to the turn and does not only end the text.
        eos: the tokenizer's own end token, or "".
        ends: whether the template itself prints something that ends an answer. If not, the turn
            ends with the last character of the answer.
        unclear: text that the template prints after the last turn and that cannot be recognized
            as an end of turn, or "".
        openers: by the role of the message after a tool call: the text that opens that message. It
            is used for templates that do not end a turn with a token.
        special: matches any special token or terminator.
    """

    header: str
    prompts: Mapping[str, tuple[str, str]]
    terminators: frozenset[str]
    doubled: frozenset[str]
    eos: str
    ends: bool
    unclear: str
    openers: Mapping[str, str]
    special: "re.Pattern[str]" = field(repr=False)

    @classmethod
    def learn(
        cls,
        template: ChatTemplate,
        special_tokens: Collection[str],
        eos: str | None,
        added_tokens: Collection[str] = (),
    ) -> "TurnShape":
        """Learn the shape from renders of short conversations.

        Args:
            special_tokens: the tokenizer's special tokens, as text.
            eos: the tokenizer's end token, or None.
            added_tokens: all tokens that the tokenizer has beside its vocabulary, special or not.
        """
        special = _any_of(special_tokens)
        prompts = _prompts(template)
        closing, opening = prompts.get("user", ("", ""))
        header = opening[len(closing) :]
        if not header.strip():
            header = _lead(template, closing) or header
        ends = _Ends.learn(template, special, _any_of({*special_tokens, *added_tokens}))
        terminators = ends.terminators | ({eos} if eos else set[str]())
        return cls(
            header=header,
            prompts=prompts,
            terminators=frozenset(terminators),
            doubled=frozenset(t for t in terminators if eos and t + eos in ends.history),
            eos=eos or "",
            ends=bool(ends.terminators),
            unclear=ends.unclear,
            openers=_openers(template),
            special=_any_of({*special_tokens, *terminators}),
        )


def _tail(trace: Trace | None) -> str | None:
    """The template's text after the last character that comes from a message."""
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
            closed = _tail(template.attempt(*talk))
            opened = _tail(template.attempt(*talk, prompt=True))
            if closed is not None and opened is not None:
                shared = _shared(closed, opened)
                prompts[role] = (shared, opened)
                break
    return prompts


def _lead(template: ChatTemplate, closing: str) -> str:
    """The text that a template without a generation prompt prints before an answer, or ""."""
    trace = template.attempt(_USER, _ANSWER) or template.attempt(_SYSTEM, _USER, _ANSWER)
    if trace is None:
        return ""
    answer = np.flatnonzero(trace.message == trace.message.max())
    asked = np.flatnonzero((trace.origin >= 0) & (trace.message < trace.message.max()))
    if not len(answer) or not len(asked):
        return ""
    between = trace.text[int(asked[-1]) + 1 : int(answer[0])]
    lead = between.removeprefix(closing)
    return lead if lead.strip() else ""


@dataclass(frozen=True, slots=True)
class _Ends:
    """How a template ends an answer.

    Attributes:
        terminators, unclear: as in TurnShape, without the tokenizer's end token.
        history: what the template prints between an answer and the next question, a NUL, and what
            it prints between a tool call and its result.
    """

    terminators: set[str]
    history: str
    unclear: str

    @classmethod
    def learn(
        cls, template: ChatTemplate, special: "re.Pattern[str]", added: "re.Pattern[str]"
    ) -> "_Ends":
        final = _tail(template.attempt(_USER, _ANSWER)) or ""
        between = _between(template.attempt(_USER, _ANSWER, _AGAIN))
        found, unclear = _closings(final, between, special, added)
        for tokens in (special, added):
            if between is not None and not any(end in between for end in found):
                found |= _history_terminator(template, tokens, between)
        called = template.attempt(_USER, _CALL)
        printed = called is not None and any(
            saying.printed and saying.whose.kind == Kind.CALL for saying in called.said
        )
        closers = special.findall(_tail(called) or "") if printed else []
        if closers and not found & set(closers):
            found.add(closers[-1])
        after_call = _between(template.attempt(_USER, _CALL, _RESULT)) or ""
        return cls(found, f"{between or ''}\0{after_call}", unclear)


def _openers(template: ChatTemplate) -> dict[str, str]:
    closed = _tail(template.attempt(_USER, _CALL))
    openers: dict[str, str] = {}
    for message in (_RESULT, _AGAIN):
        trace = template.attempt(_USER, _CALL, message)
        if trace is None or closed is None:
            continue
        said = np.flatnonzero((trace.message == 1) & ~trace.copied)
        after = np.flatnonzero((trace.message == 2) | trace.copied)
        after = after[after > said[-1]] if len(said) else after[:0]
        between = trace.text[int(said[-1]) + 1 : int(after[0])] if len(after) else ""
        if between.startswith(closed) and between != closed:
            openers[message["role"]] = between[len(closed) :]
    return openers


def _closings(
    final: str, between: str | None, special: "re.Pattern[str]", added: "re.Pattern[str]"
) -> tuple[set[str], str]:
    """(the texts that end an answer, unclear text as in TurnShape).

    `final` is the template's text after the last answer, `between` its text between an answer and
    the next question. Mostly a special token is in both. An ordinary text that is in both ends the
    turn as well, and a special token after it in `final` then ends the whole conversation.
    """
    first = special.search(final)
    head = final[: first.start()] if first else final
    if first and (between is None or first[0] in between or not head.strip()):
        return {first[0]}, ""
    if not head.strip():
        return set(), ""
    if between is None or between.startswith(head.rstrip()):
        plain = added.search(head)
        return {plain[0] if plain else head.strip()}, ""
    if first:
        return {first[0]}, ""
    return set(), head.strip()  # a footer, or a generation prompt that is always printed


def _between(trace: Trace | None) -> str | None:
    """The template's text between the second message and the third."""
    if trace is None:
        return None
    answer = np.flatnonzero((trace.message == 1) & ~trace.copied)
    after = np.flatnonzero(trace.message == 2)
    if not len(answer) or not len(after):
        return None
    return trace.text[int(answer[-1]) + 1 : int(after[0])]


def _history_terminator(
    template: ChatTemplate, tokens: "re.Pattern[str]", between: str
) -> set[str]:
    """The token that ends a turn in the middle, in a template that ends the last turn differently."""
    alone = template.attempt(_USER)
    token = tokens.search(between)
    if alone is None or token is None:
        return set()
    # A token that opens the next message does not end this one, unless it ends messages elsewhere.
    closes_question = tokens.search(_tail(alone) or "")
    before = alone.text[: int(np.flatnonzero(alone.origin >= 0)[0])]
    if (closes_question and closes_question[0] == token[0]) or token[0] not in before:
        return {token[0]}
    return set()


def _any_of(texts: Collection[str]) -> "re.Pattern[str]":
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


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
        blocks: the template has `{% generation %}` blocks, which give the spans.

    Raises:
        BadRow: "mask_unproved" when the place of a turn is not certain.
    """
    generated = _generated(trace)
    if blocks:
        return _block_spans(trace, wanted, generated)
    bones = trace.bones()
    somebody = np.flatnonzero(trace.origin >= 0)
    found: list[Span] = []
    for turn in wanted:
        span = _turn_span(trace, conversation, shape, turn, generated[turn], bones, somebody)
        if found and span.start < found[-1].stop:
            raise BadRow("mask_unproved", f"turns {found[-1].message} and {turn} overlap")
        found.append(span)
    return found


def _generated(trace: Trace) -> dict[int, np.ndarray]:
    """By turn, the positions of the assistant's characters in it, without copies."""
    here = np.flatnonzero((trace.message >= 0) & (trace.kind < Kind.OTHER) & ~trace.copied)
    here = here[np.argsort(trace.message[here], kind="stable")]
    turns, firsts = np.unique(trace.message[here], return_index=True)
    return dict(zip(turns.tolist(), np.split(here, firsts[1:]), strict=True)) if len(here) else {}


def _next_other(trace: Trace, somebody: np.ndarray, place: int, turn: int) -> int:
    """The first position from somebody[place] on that is not a copy of the turn's own text."""
    for begin in range(place, len(somebody), WINDOW):
        after = somebody[begin : begin + WINDOW]
        others = np.flatnonzero((trace.message[after] != turn) | ~trace.copied[after])
        if len(others):
            return int(after[others[0]])
    return len(trace.text)


def _turn_span(
    trace: Trace,
    conversation: Conversation,
    shape: TurnShape,
    turn: int,
    said: np.ndarray,
    bones: str,
    somebody: np.ndarray,
) -> Span:
    first, last = int(said[0]), int(said[-1])
    # Between the first and the last character there may only be this turn's and the template's text.
    inside = trace.message[first : last + 1]
    ours = (inside == turn) & (trace.kind[first : last + 1] < Kind.OTHER)
    if not (ours | (inside == NOBODY)).all():
        raise BadRow("mask_unproved", f"other text stands inside assistant turn {turn}")
    before = int(np.searchsorted(somebody, first))
    low = int(somebody[before - 1]) + 1 if before else 0
    # The template may copy the turn's own text behind it, before the end of the turn (a closing tag
    # that repeats a name) or after it (the header of a tool result). The first character of any other
    # message is beyond the turn.
    high = _next_other(trace, somebody, int(np.searchsorted(somebody, last, "right")), turn)
    is_call = "tool_calls" in conversation.messages[turn]
    start = low + _begin(bones[low:first], conversation, shape, turn, trace.kind[first])
    following = conversation.messages[turn + 1]["role"] if high < len(bones) else ""
    stop = last + 1 + _end(bones[last + 1 : high], shape, turn, is_call, following)
    return Span(turn, start, stop)


def _begin(lead: str, conversation: Conversation, shape: TurnShape, turn: int, kind: int) -> int:
    """The index in `lead` at which the turn begins.

    `lead` is the template's text before the first character of the turn. It is compared with the
    whole header, then with the generation prompt after a message of the previous role, and at last
    with the beginnings of the header, the longest first.

    Raises:
        BadRow: the beginning of tool calls is not certain.
    """
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
            return len(lead)  # only spaces, which the template prints before an answer
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
    """The length of the longest beginning of text[:length] that ends with a whole line, a whole
    special token or a closing bracket, so that no marker is cut in two; at_least without one."""
    ends = [found.end() for found in shape.special.finditer(text)]
    ends += [found.end() for found in re.finditer(r"\n|>|\]", text)]
    return max((end for end in ends if at_least <= end <= length), default=at_least)


def _end(tail: str, shape: TurnShape, turn: int, is_call: bool, following: str) -> int:
    """How many characters of `tail` still belong to the turn.

    `tail` is the template's text after the last character of the turn, and `following` is the role
    of the next message, or "" when none is printed.

    Raises:
        BadRow: the end of the turn is not certain.
    """
    for found in shape.special.finditer(tail):
        if found[0] in shape.terminators:
            # Some templates print one token after the answer and then the end token.
            closed = found[0] in shape.doubled and tail.startswith(shape.eos, found.end())
            return found.end() + (len(shape.eos) if closed else 0)
        if not is_call:
            return 0
    if shape.unclear:
        raise BadRow(
            "mask_unproved",
            f"the chat template ends turn {turn} with no token that could be told; after the last "
            f"turn it prints {shape.unclear[:60]!r}",
        )
    if not is_call:
        return 0
    opener = shape.openers.get(following, "")
    if not following:
        return len(tail.rstrip())
    if opener and tail.endswith(opener):
        return len(tail) - len(opener)
    raise BadRow("mask_unproved", f"where the tool calls of turn {turn} end is not certain")


def _block_spans(
    trace: Trace, wanted: list[int], generated: Mapping[int, np.ndarray]
) -> list[Span]:
    found: list[Span] = []
    for turn in wanted:
        numbers = np.unique(trace.block[generated[turn]])
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
