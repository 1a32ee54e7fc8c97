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
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jinja2.nodes
import numpy as np
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    render_jinja_template,
)

from extractor.data.normalise import REASONING_KEYS, Conversation
from extractor.data.rows import BadRow, Message
from extractor.data.taint import Tainted, concat, origins, taint_template

TOOLS = -2  # the "message" that a row's tools belong to
NOBODY = -1
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "conversation")


class Kind(IntEnum):
    """What a string of a message is. The first three are what an assistant generates."""

    CONTENT = 0
    REASONING = 1
    CALL = 2
    OTHER = 3


_PROBE: Message = {"role": "user", "content": "Is it?"}

# (text, number of its message, what it is, may the proof change it) -> text
Rewrite = Callable[[str, int, Kind, bool], str]


@dataclass(frozen=True, slots=True)
class CallText:
    """A string of a tool call. spoken: a name or a value among the arguments, and not an
    id or a key; printed: at least one of its characters is."""

    message: int
    text: str
    spoken: bool
    printed: bool


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
        calls: the strings of tool calls, with what became of them.
    """

    text: str
    origin: np.ndarray
    block: np.ndarray
    message: np.ndarray
    kind: np.ndarray
    copied: np.ndarray
    calls: tuple["CallText", ...]

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

    Raises:
        jinja2.TemplateSyntaxError: the template cannot be compiled.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.variables = dict(variables)
        compiled = _compile_jinja_template(source)
        self._tainted, self._reset = taint_template(compiled, source)
        tree = compiled.environment.parse(source)
        literals = {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
        ordered = sorted(filter(None, literals), key=len, reverse=True)
        # At every position, the longest that begins there: they may overlap.
        self._literals = re.compile(f"(?=({'|'.join(map(re.escape, ordered)) or '(?!)'}))")
        self._parts = False
        self._parts = not self._prints() and self._prints(parts=True)
        self.has_generation_blocks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))

    def _prints(self, parts: bool = False) -> bool:
        """Does it print a content given as a text, or as a list of parts?"""
        self._parts = parts
        for talk in ([_PROBE], [_PROBE, {"role": "assistant", "content": "Yes."}]):
            try:
                if (self.trace(Conversation(talk)).message == 0).any():
                    return True
            except Exception:  # it refuses, in whatever way
                continue
        return False

    def _form(self, conversation: Conversation) -> Conversation:
        """Templates of models that see want each content as a list of parts."""
        if not self._parts:
            return conversation
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in conversation.messages
        ]
        return Conversation(messages, conversation.tools, conversation.unweighted)

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

    def _trace(
        self, conversation: Conversation, generation_prompt: bool = False
    ) -> tuple[Trace, "_Sources"]:
        sources = _Sources()
        tainted = rewrite(self._form(conversation), sources.add)
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
            trace, sources = self._trace(conversation)
            if trace.text != text:  # a template that prints the time may have met a new second
                text = self.plain(conversation)
                trace, sources = self._trace(conversation)
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
        self, disguise: "Disguise", conversation: Conversation, trace: Trace, sources: "_Sources"
    ) -> bool:
        """Is the render of changed text the text with those characters changed?"""
        changed: list[str] = []

        def change(text: str, message: int, kind: Kind, free: bool) -> str:
            text = disguise(text, kind, self._literals) if free else text
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


def rewrite(conversation: Conversation, change: Rewrite) -> Conversation:
    """The conversation with every string of its messages and tools passed through `change`, always
    in the same order."""
    messages = [_rewrite_message(m, n, change) for n, m in enumerate(conversation.messages)]
    tools = _rewrite_value(conversation.tools, TOOLS, Kind.OTHER, False, change)
    return Conversation(messages, tools, conversation.unweighted)


def _rewrite_message(message: Message, number: int, change: Rewrite) -> Message:
    assistant = message["role"] == "assistant"
    new: Message = {}
    for key, value in message.items():
        if key == "role":
            new[key] = value
        elif key == "content":
            kind = Kind.CONTENT if assistant else Kind.OTHER
            if isinstance(value, list):  # the form with parts, which are all texts
                new[key] = [
                    {**part, "text": change(part["text"], number, kind, True)} for part in value
                ]
            else:
                new[key] = change(value, number, kind, True)
        elif assistant and key in REASONING_KEYS:
            new[key] = change(value, number, Kind.REASONING, True)
        elif assistant and key == "tool_calls":
            new[key] = [_rewrite_call(call, number, change) for call in value]
        else:
            new[key] = _rewrite_value(value, number, Kind.OTHER, False, change)
    return new


def _rewrite_call(call: Message, number: int, change: Rewrite) -> Message:
    """Names and values may change in the proof. Ids may not: a tool's result points at them. Keys
    of arguments may not: templates sort by them."""
    new: Message = {}
    for key, value in call.items():
        if key == "function" and isinstance(value, dict):
            new[key] = _rewrite_call(value, number, change)
        elif key == "name":
            new[key] = change(value, number, Kind.CALL, True)
        else:
            free = key == "arguments"
            new[key] = _rewrite_value(value, number, Kind.CALL, free, change, keys=free)
    return new


def _rewrite_value(
    value: Any, number: int, kind: Kind, free: bool, change: Rewrite, keys: bool = False
) -> Any:
    if isinstance(value, str):
        return change(value, number, kind, free)
    if isinstance(value, list):
        return [_rewrite_value(item, number, kind, free, change, keys) for item in value]
    if isinstance(value, dict):
        return {
            (change(key, number, kind, False) if keys else key): _rewrite_value(
                item, number, kind, free, change, keys
            )
            for key, item in value.items()
        }
    return value


class _Sources:
    """Gives addresses to strings, and remembers whose they are."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.messages: list[int] = []
        self.kinds: list[int] = []
        self.free: list[bool] = []
        self._next = 0

    def add(self, text: str, message: int, kind: Kind, free: bool) -> str:
        self.texts.append(text)
        self.messages.append(message)
        self.kinds.append(kind)
        self.free.append(free)
        address, self._next = self._next, self._next + len(text)
        return Tainted.at(text, address)


def _trace(rendered: str, sources: _Sources) -> Trace:
    origin, block = origins(rendered)
    lengths = [len(text) for text in sources.texts]
    message = np.full(len(origin), NOBODY, np.int64)
    kind = np.full(len(origin), Kind.OTHER, np.int8)
    here = np.flatnonzero(origin >= 0)
    message[here] = np.repeat(np.array(sources.messages, np.int64), lengths)[origin[here]]
    kind[here] = np.repeat(np.array(sources.kinds, np.int8), lengths)[origin[here]]
    copied = np.zeros(len(origin), bool)
    if len(here):
        _, first = np.unique(origin[here], return_index=True)
        copied[here] = True
        copied[here[first]] = False
    plain = "".join([rendered])
    calls = _call_texts(sources, lengths, origin[here])
    return Trace(plain, origin, block, message, kind, copied, calls)


def _call_texts(sources: _Sources, lengths: list[int], printed: np.ndarray) -> tuple[CallText, ...]:
    ends = np.cumsum(lengths)
    seen = np.zeros(int(ends[-1]) if lengths else 0, bool)
    seen[printed] = True
    return tuple(
        CallText(
            sources.messages[number],
            text,
            sources.free[number],
            bool(seen[ends[number] - lengths[number] : ends[number]].any()),
        )
        for number, text in enumerate(sources.texts)
        if sources.kinds[number] == Kind.CALL
    )


# ---- the disguise that the proof puts on text: the same length, other characters

Disguise = Callable[[str, Kind, "re.Pattern[str]"], str]
_WHEELS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    ".,;:!?",
    "+-*/=",
)


class _Shift(dict[int, int]):
    """A table for str.translate: each character of a wheel to a later one of it, and each other
    letter or symbol outside ASCII to its neighbour where that is of the same category."""

    def __init__(self, steps: int, wheels: tuple[str, ...]) -> None:
        super().__init__()
        for wheel in wheels:
            for place, letter in enumerate(wheel):
                self[ord(letter)] = ord(wheel[(place + steps) % len(wheel)])

    def __missing__(self, code: int) -> int:
        other = code ^ 1
        category = unicodedata.category(chr(code))
        same = code > 127 and category[0] in "LNS" and unicodedata.category(chr(other)) == category
        self[code] = other if same else code
        return self[code]


def _disguise(table: dict[int, int], kinds: frozenset[Kind]) -> Disguise:
    def disguise(text: str, kind: Kind, literals: "re.Pattern[str]") -> str:
        """Change what may change, but keep whatever the template itself could be looking for."""
        if kind not in kinds:
            return text
        changed = text.translate(table)
        pieces: list[str] = []
        position = 0
        for found in literals.finditer(text):
            start, stop = max(found.start(1), position), found.end(1)
            if stop > position:
                pieces += (changed[position:start], text[start:stop])
                position = stop
        return "".join([*pieces, changed[position:]])

    return disguise


_ALL = frozenset(Kind)
_SAID = frozenset({Kind.CONTENT, Kind.REASONING, Kind.OTHER})
# One that holds is a proof. The later ones change less: a template may lower-case a name, say.
DISGUISES: tuple[Disguise, ...] = (
    _disguise(_Shift(1, _WHEELS), _ALL),
    _disguise(_Shift(13, _WHEELS[:3]), _ALL),
    _disguise(_Shift(5, _WHEELS[:2]), _SAID),
)


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
