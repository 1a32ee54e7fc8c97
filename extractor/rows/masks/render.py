"""Renders a chat template and tells, for every character, which message it comes from.

One conversation is rendered three times:

1. by transformers, as a server renders it;
2. with strings that carry their origins (taint.py); the text must be the same;
3. by transformers again, with the characters of the messages changed (disguise.py); the text must
   differ exactly at the characters whose origin is a changed character.

A template that loses an origin, copies text in a way that taint.py does not know, or decides by the
content of a message fails the third render, and the row is rejected. The place of a message is never
found by a search for its text, which would be a guess.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jinja2.nodes
import numpy as np
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    render_jinja_template,
)

from extractor.rows.bounds import (
    PROBE_SECONDS,
    TEXT_BYTES,
    Guard,
    check_length,
    too_much_memory,
    unbounded,
)
from extractor.rows.masks.disguise import DISGUISES, Disguise
from extractor.rows.masks.rewrite import Whose, rewrite
from extractor.rows.masks.taint import Tainted, concat, origins, taint_template
from extractor.rows.normalise import REASONING, REASONING_KEYS, Conversation
from extractor.rows.records import BadRow, Kind, Message

NOBODY = -1
_PROBE: Message = {"role": "user", "content": "Is it?"}
_YES: Message = {"role": "assistant", "content": "Yes."}
_PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    ],
}
_THOUGHT = re.compile(r"reason|think|thought", re.IGNORECASE)
_MARKER = re.compile(r"<[^<>\s]{1,30}>|\[[^\[\]\s]{1,30}\]")


@dataclass(frozen=True, slots=True)
class Lost:
    """A part of a string that is printed nowhere, without the spaces at its edges.

    Attributes:
        start: index of its first character in the string.
    """

    start: int
    text: str


@dataclass(frozen=True, slots=True)
class Saying:
    """A string that an assistant says, and what is printed of it.

    Attributes:
        printed: at least one of its characters is printed.
        lost: the parts that are not printed.
    """

    whose: Whose
    text: str
    printed: bool
    lost: tuple[Lost, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A rendered conversation.

    Attributes:
        text: the rendered text, n characters.
        origin: int64 [n], the address of each character among the sources; -1 for the template's
            own text.
        block: int32 [n], number of the `{% generation %}` block that printed the character, or 0.
        message: int64 [n], number of the message that the character belongs to, TOOLS, or NOBODY
            for the template's own text.
        kind: int8 [n], a Kind; without meaning where message is NOBODY.
        copied: bool [n], whether the same source character is printed earlier in the text too.
        said: the strings that assistants say, and what is printed of them.
    """

    text: str
    origin: np.ndarray
    block: np.ndarray
    message: np.ndarray
    kind: np.ndarray
    copied: np.ndarray
    said: tuple[Saying, ...]

    def bones(self) -> str:
        """The text with a NUL in place of every character that comes from the row.

        Headers and end-of-turn tokens are searched for here, so that they are never found inside a
        message.
        """
        codes = _codes(self.text)
        codes[self.origin >= 0] = 0
        return codes.tobytes().decode("utf-32-le", "surrogatepass")


class ChatTemplate:
    """One template with one set of arguments.

    Args:
        source: the Jinja text.
        variables: what transformers adds for every render: the special tokens, and the user's
            --template-arg values over them.
        most: bytes of UTF-8 that a rendered text may have.
        guard: bounds the CPU seconds of each attempt to learn something about the template.

    Attributes:
        names: the names of attributes and variables that the template reads, and all its string
            literals.
        own: texts that the template itself holds, the longest first: its string literals, and
            markers such as <think>.
        reasoning: the keys of a message whose value the template prints as reasoning in the last
            turn. They are found by rendering each candidate.

    Raises:
        jinja2.TemplateSyntaxError: the template cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        most: int = TEXT_BYTES,
        guard: Guard = unbounded,
    ) -> None:
        self.source = source
        self.most, self._guard = most, guard
        self._calls_are_slow = False
        self.variables = dict(variables)
        with guard(PROBE_SECONDS):  # Jinja's compiler computes constant expressions
            compiled = _compile_jinja_template(source)
            self._tainted, self._reset = taint_template(compiled, source)
        tree = compiled.environment.parse(source)
        literals = {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
        attributes = {n.attr for n in tree.find_all(jinja2.nodes.Getattr)}
        self.names = frozenset(
            literals | attributes | {n.name for n in tree.find_all(jinja2.nodes.Name)}
        )
        ordered = sorted(filter(None, literals), key=len, reverse=True)
        own = {*filter(str.strip, literals), *_MARKER.findall(source)}
        self.own = tuple(sorted(own, key=len, reverse=True))
        # The lookahead finds, at every position, the longest literal that begins there. Literals may
        # overlap.
        self._literals = re.compile(f"(?=({'|'.join(map(re.escape, ordered)) or '(?!)'}))")
        self.reasoning: tuple[str, ...] = ()
        self._parts = False
        self._parts = not self._prints() and self._prints(parts=True)
        self.has_generation_blocks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))
        self.reasoning = tuple(filter(self._prints_reasoning, self._reasoning_names()))

    def _prints(self, parts: bool = False) -> bool:
        """Whether the template prints a content that is a text or, with parts, a list of parts."""
        self._parts = parts
        traces = (self.attempt(_PROBE), self.attempt(_PROBE, _YES))
        return any(trace is not None and (trace.message == 0).any() for trace in traces)

    def _reasoning_names(self) -> list[str]:
        own = sorted(name for name in self.names if _THOUGHT.search(name) and name.isidentifier())
        return list(dict.fromkeys((*REASONING_KEYS, *own)))

    def _prints_reasoning(self, name: str) -> bool:
        """Whether the template prints what the last turn has under this key."""
        self.reasoning = (name,)
        for answer in (_YES, _PROBE_CALL):
            trace = self.attempt(_PROBE, {**answer, REASONING: "Because."})
            if trace is not None and (trace.kind == Kind.REASONING).any():
                return True
        return False

    def _form(self, conversation: Conversation) -> Conversation:
        """The messages in the form that this template reads.

        Reasoning stands under the template's own key for it. Each content is a list of parts where
        the template wants that, as templates of multimodal models do.
        """
        if not self._parts and self.reasoning[:1] in ((), (REASONING,)):
            return conversation
        messages = [self._message_form(message) for message in conversation.messages]
        return replace(conversation, messages=messages)

    def _message_form(self, message: Message) -> Message:
        name = self.reasoning[0] if self.reasoning and message["role"] == "assistant" else REASONING
        form = {(name if key == REASONING else key): value for key, value in message.items()}
        if self._parts:
            form["content"] = [{"type": "text", "text": message["content"]}]
        return form

    def plain(self, conversation: Conversation, generation_prompt: bool = False) -> str:
        """The text that transformers renders. Raises whatever the template raises."""
        rendered, _ = render_jinja_template(
            conversations=[self._form(conversation).messages],
            tools=conversation.tools,  # pyright: ignore[reportArgumentType]
            chat_template=self.source,
            add_generation_prompt=generation_prompt,
            **self.variables,
        )
        return rendered[0]

    def trace(self, conversation: Conversation, generation_prompt: bool = False) -> Trace:
        """Render with origins, without the proof. Raises whatever the template raises."""
        return self._trace(conversation, generation_prompt)[0]

    def attempt(self, *messages: Message, prompt: bool = False) -> Trace | None:
        """A trace, or None when the template refuses such a conversation, as some templates do.

        Raises:
            BadRow: the render does not end ("too_slow", "too_large"). When the conversation has a
                tool call, that counts as a refusal instead: perhaps no row has a tool call.
        """
        has_call = any("tool_calls" in message for message in messages)
        if has_call and self._calls_are_slow:
            return None
        try:
            with self._guard(PROBE_SECONDS):
                try:
                    return self.trace(Conversation(list(messages)), prompt)
                except (BadRow, MemoryError):
                    raise
                except Exception:  # a template may raise anything
                    return None
        except BadRow:
            if not has_call:
                raise
            self._calls_are_slow = True
            return None

    def _trace(
        self, conversation: Conversation, generation_prompt: bool = False
    ) -> tuple[Trace, "_Sources"]:
        sources = _Sources()
        tainted = self._form(rewrite(conversation, sources.add))
        self._reset()
        pieces = self._tainted.generate(
            messages=tainted.messages,
            tools=tainted.tools,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self.variables,
        )
        return _trace(concat(pieces), sources), sources

    def prove(self, conversation: Conversation) -> Trace:
        """Render a conversation and prove which message each character comes from.

        Raises:
            BadRow: the template refuses the conversation ("template_error"), or the proof fails
                ("mask_unproved").
        """
        try:
            text = self.plain(conversation)
            check_length(text, self.most)
            trace, sources = self._trace(conversation)
        except BadRow:
            raise
        except MemoryError:
            raise too_much_memory() from None
        except Exception as error:  # a template may raise anything
            raise BadRow("template_error", _message_of(error)) from None
        if trace.text != text:
            raise BadRow(
                "mask_unproved", "the render that follows characters differs from the plain one"
            )
        if not any(self._holds(attempt, conversation, trace, sources) for attempt in DISGUISES):
            raise BadRow(
                "mask_unproved",
                "the template moves the messages' text in a way that cannot be followed",
            )
        return trace

    def _holds(
        self, disguise: Disguise, conversation: Conversation, trace: Trace, sources: "_Sources"
    ) -> bool:
        """Whether a render of the disguised conversation differs exactly where the trace says."""
        changed: list[str] = []

        def change(text: str, whose: Whose, free: bool) -> str:
            text = disguise(text, whose.kind, self._literals) if free else text
            changed.append(text)
            return text

        other = rewrite(conversation, change)
        try:
            rendered = _codes(self.plain(other))
        except Exception:  # the template refuses the changed text, so this disguise proves nothing
            return False
        expected = _codes(trace.text)
        if len(rendered) != len(expected):
            return False
        before, after = _codes("".join(sources.texts)), _codes("".join(changed))
        # A character that is printed as it is must become its disguised form. One that is printed
        # in another form (another case, or the letter of an escape) must only change when its
        # source changes.
        here = np.flatnonzero(trace.origin >= 0)
        source = trace.origin[here]
        as_is = expected[here] == before[source]
        expected[here[as_is]] = after[source[as_is]]
        recased = here[~as_is]
        moved = after[source[~as_is]] != before[source[~as_is]]
        if not (rendered[recased[moved]] != expected[recased[moved]]).all():
            return False
        rendered[recased[moved]] = expected[recased[moved]]
        return bool((rendered == expected).all())


class _Sources:
    """Gives an address to each string, and keeps which part of the conversation it belongs to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.whose: list[Whose] = []
        self._next = 0

    def add(self, text: str, whose: Whose, free: bool) -> str:
        self.texts.append(text)
        self.whose.append(whose)
        address, self._next = self._next, self._next + len(text)
        return Tainted.at(text, address)


def _trace(rendered: str, sources: _Sources) -> Trace:
    origin, block = origins(rendered)
    lengths = [len(text) for text in sources.texts]
    message = np.full(len(origin), NOBODY, np.int64)
    kind = np.full(len(origin), Kind.OTHER, np.int8)
    here = np.flatnonzero(origin >= 0)
    messages = np.array([whose.message for whose in sources.whose], np.int64)
    kinds = np.array([whose.kind for whose in sources.whose], np.int8)
    message[here] = np.repeat(messages, lengths)[origin[here]]
    kind[here] = np.repeat(kinds, lengths)[origin[here]]
    # The first print of each address is the original; all later prints are copies.
    copied = np.zeros(len(origin), bool)
    if len(here):
        _, first = np.unique(origin[here], return_index=True)
        copied[here] = True
        copied[here[first]] = False
    plain = "".join([rendered])  # a plain str, without the origins
    said = tuple(_sayings(sources, lengths, origin[here]))
    return Trace(plain, origin, block, message, kind, copied, said)


def _sayings(sources: _Sources, lengths: list[int], printed: np.ndarray) -> Iterator[Saying]:
    ends = np.cumsum(lengths)
    seen = np.zeros(int(ends[-1]) if lengths else 0, bool)
    seen[printed] = True
    for whose, text, end in zip(sources.whose, sources.texts, ends.tolist(), strict=True):
        if whose.kind < Kind.OTHER:
            here = seen[end - len(text) : end]
            yield Saying(whose, text, bool(here.any()), tuple(_lost(text, here)))


def _lost(text: str, seen: np.ndarray) -> Iterator[Lost]:
    if seen.all():
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[True], seen, [True]]))).tolist()
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        run = text[start:stop]
        if bare := run.strip():
            yield Lost(start + len(run) - len(run.lstrip()), bare)


def _codes(text: str) -> np.ndarray:
    """The code points of a text, uint32 [n]; a copy that may be written to."""
    return np.frombuffer(bytearray(text.encode("utf-32-le", "surrogatepass")), np.uint32)


def _message_of(error: Exception) -> str:
    said = getattr(error, "message", None) or str(error) or type(error).__name__
    return f"the chat template refused it: {said}"[:300]


def parse_argument(value: str) -> Any:
    """The value of a --template-arg: parsed where it is JSON (false, 3, "x"), else the text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
