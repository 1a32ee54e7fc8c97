"""A chat template that says, of every character it prints, whose it is.

One conversation is rendered three times: by transformers, as a server would; with strings that
carry their origins (taint.py), which must print the same text; and by transformers again with
everybody's letters changed, which must differ exactly where the origins say that a letter of theirs
stands. A template that loses an origin, copies text by some way not known here, or decides by what
a message says, fails the third render, and the row is rejected: nothing is searched for and nothing
is guessed.
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
    """Characters of a string, from `start` on, that are printed nowhere; spaces at the edges are
    not among them."""

    start: int
    text: str


@dataclass(frozen=True, slots=True)
class Saying:
    """A string of what an assistant says. printed: at least one of its characters is."""

    whose: Whose
    text: str
    printed: bool
    lost: tuple[Lost, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A rendered conversation.

    Attributes:
        text: what transformers renders.
        origin: int64 [n], each character's address among the sources, -1 for the template's own.
        block: int32 [n], number of the `{% generation %}` block that printed it, or 0.
        message: int64 [n], whose text it is: a message's number, TOOLS or NOBODY.
        kind: int8 [n], a Kind; meaningless where nobody's.
        copied: bool [n], the second and later prints of a character that was printed before.
        said: the strings of what assistants say, with what became of them.
    """

    text: str
    origin: np.ndarray
    block: np.ndarray
    message: np.ndarray
    kind: np.ndarray
    copied: np.ndarray
    said: tuple[Saying, ...]

    def bones(self) -> str:
        """The text with a NUL for every character that is somebody's: searches for a header or an
        end-of-turn token look here, and so never inside what somebody wrote."""
        codes = _codes(self.text)
        codes[self.origin >= 0] = 0
        return codes.tobytes().decode("utf-32-le", "surrogatepass")


class ChatTemplate:
    """One template with one set of arguments.

    Args:
        source: the Jinja text.
        variables: what transformers adds for every render: the special tokens, and the user's
            --template-arg values over them.
        most: bytes that a render may have.
        guard: bounds the CPU seconds of each attempt to learn something of the template.

    Attributes:
        names: of keys and variables that the template reads, and all its other short texts.
        own: texts that it names or prints itself, the longest first: its string literals, and
            markers such as <think>.
        reasoning: the keys of a message under which it prints reasoning in the last turn, found
            by trying them.

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
        with guard(PROBE_SECONDS):  # the compiler works out what is constant
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
        # At every position, the longest that begins there: they may overlap.
        self._literals = re.compile(f"(?=({'|'.join(map(re.escape, ordered)) or '(?!)'}))")
        self.reasoning: tuple[str, ...] = ()
        self._parts = False
        self._parts = not self._prints() and self._prints(parts=True)
        self.has_generation_blocks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))
        self.reasoning = tuple(filter(self._prints_reasoning, self._reasoning_names()))

    def _prints(self, parts: bool = False) -> bool:
        """Does it print a content given as a text, or as a list of parts?"""
        self._parts = parts
        traces = (self.attempt(_PROBE), self.attempt(_PROBE, _YES))
        return any(trace is not None and (trace.message == 0).any() for trace in traces)

    def _reasoning_names(self) -> list[str]:
        own = sorted(name for name in self.names if _THOUGHT.search(name) and name.isidentifier())
        return list(dict.fromkeys((*REASONING_KEYS, *own)))

    def _prints_reasoning(self, name: str) -> bool:
        """Does it print what the last turn has under this key?"""
        self.reasoning = (name,)
        for answer in (_YES, _PROBE_CALL):
            trace = self.attempt(_PROBE, {**answer, REASONING: "Because."})
            if trace is not None and (trace.kind == Kind.REASONING).any():
                return True
        return False

    def _form(self, conversation: Conversation) -> Conversation:
        """The messages as this template reads them: reasoning under its own name for it, and each
        content as a list of parts where it wants that, as those of models that see do."""
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
        """transformers' own render. Raises whatever the template raises."""
        rendered, _ = render_jinja_template(
            conversations=[self._form(conversation).messages],
            tools=conversation.tools,  # pyright: ignore[reportArgumentType]
            chat_template=self.source,
            add_generation_prompt=generation_prompt,
            **self.variables,
        )
        return rendered[0]

    def trace(self, conversation: Conversation, generation_prompt: bool = False) -> Trace:
        """Render with origins; not yet proved. Raises whatever the template raises."""
        return self._trace(conversation, generation_prompt)[0]

    def attempt(self, *messages: Message, prompt: bool = False) -> Trace | None:
        """A trace, or None when the template refuses such a conversation, as some do.

        Raises:
            BadRow: it does not come to an end ("too_slow", "too_large"). With a tool call in the
                conversation that is taken for a refusal, for no row may have one.
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
                except Exception:  # whatever a template raises
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
        """Render a conversation and prove whose each character is.

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
        except Exception as error:  # templates raise what they like, KeyError to ZeroDivisionError
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
        """Is the render of changed text the text with those characters changed?"""
        changed: list[str] = []

        def change(text: str, whose: Whose, free: bool) -> str:
            text = disguise(text, whose.kind, self._literals) if free else text
            changed.append(text)
            return text

        other = rewrite(conversation, change)
        try:
            rendered = _codes(self.plain(other))
        except Exception:  # the template refused the changed text: this attempt proves nothing
            return False
        expected = _codes(trace.text)
        if len(rendered) != len(expected):
            return False
        before, after = _codes("".join(sources.texts)), _codes("".join(changed))
        here = np.flatnonzero(trace.origin >= 0)
        source = trace.origin[here]
        as_is = expected[here] == before[source]
        expected[here[as_is]] = after[source[as_is]]
        recased = here[
            ~as_is
        ]  # upper, lower, the letter of an escape: only that it changes is known
        moved = after[source[~as_is]] != before[source[~as_is]]
        if not (rendered[recased[moved]] != expected[recased[moved]]).all():
            return False
        rendered[recased[moved]] = expected[recased[moved]]
        return bool((rendered == expected).all())


class _Sources:
    """Gives addresses to strings, and remembers whose they are."""

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
    copied = np.zeros(len(origin), bool)
    if len(here):
        _, first = np.unique(origin[here], return_index=True)
        copied[here] = True
        copied[here[first]] = False
    plain = "".join([rendered])
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
    """uint32 [n] code points; writable."""
    return np.frombuffer(bytearray(text.encode("utf-32-le", "surrogatepass")), np.uint32)


def _message_of(error: Exception) -> str:
    said = getattr(error, "message", None) or str(error) or type(error).__name__
    return f"the chat template refused it: {said}"[:300]


def parse_argument(value: str) -> Any:
    """A --template-arg value: JSON where it is JSON (false, 3, "x"), else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value
