"""A few records to samples and refusals: what one worker does with one chunk.

Everything here can run in a spawned process, is given plain values, and holds no file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from extractor.data.encode import Encoded, Encoder, FastEncoder, PythonEncoder, token_mask
from extractor.data.normalise import Conversation, PlainText, Pretokenized, normalise, record_id
from extractor.data.render import ChatTemplate, Trace
from extractor.data.rows import (
    BadRow,
    Limits,
    Piece,
    RawRow,
    Refusal,
    Supervise,
    Turns,
)
from extractor.data.turns import TurnShape, check_rendered, spans, wanted_turns


@dataclass(frozen=True, slots=True)
class Rules:
    """All that turns a record into samples. Travels to the workers as it is.

    Attributes:
        tokenizer: a fast tokenizer, serialized; None for one that only Python can run.
        tokenizer_path: where to load that one from.
        templates: chat templates by name: "default", and "tool_use" for rows with tools.
        variables: what a template is given besides the row.
        special_tokens, eos: the tokenizer's special tokens, as text.
    """

    tokenizer: str | None = field(repr=False)
    tokenizer_path: str
    trust_remote_code: bool
    templates: Mapping[str, str] = field(repr=False)
    variables: Mapping[str, Any]
    special_tokens: tuple[str, ...] = field(repr=False)
    eos: str | None
    supervise: Supervise
    turns: Turns
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk of records: every one is in at least one of the two lists."""

    rows: int
    pieces: list[Piece]
    refusals: list[Refusal]


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A text on its way to the tokenizer; marked: bool [n] characters, or None for all."""

    raw: RawRow
    id: str
    turn: int
    text: str
    marked: np.ndarray | None


class Converter:
    """Applies Rules to records. Raises jinja2.TemplateSyntaxError for a template that is none."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._encoder = _encoder(rules)
        self._templates: dict[str, tuple[ChatTemplate, TurnShape]] = {}
        for name, source in rules.templates.items():
            template = ChatTemplate(source, rules.variables)
            shape = TurnShape.learn(template, rules.special_tokens, rules.eos)
            self._templates[name] = (template, shape)

    def shape(self, name: str = "default") -> TurnShape:
        return self._templates[name][1]

    def convert(self, rows: Sequence[RawRow]) -> Outcome:
        pieces: list[Piece] = []
        refusals: list[Refusal] = []
        drafts: list[_Draft] = []

        def refuse(raw: RawRow, row_id: str, turn: int, bad: BadRow) -> None:
            place = (raw.number, turn, row_id, raw.file, raw.line)
            refusals.append(Refusal(*place, bad.reason, bad.detail))

        for raw in rows:
            row_id = str(raw.number)
            try:
                record = _parse(raw.data)
                row_id = record_id(record, raw.number)
                found = normalise(record)
                if isinstance(found, Pretokenized):
                    mask = self._given_mask(found)
                    pieces.append(self._piece(raw, row_id, 0, found.ids, mask))
                elif isinstance(found, PlainText):
                    drafts.append(self._text_draft(raw, row_id, found))
                else:
                    for turn, cut, wanted in self._cuts(found):
                        try:
                            drafts.append(self._chat_draft(raw, row_id, turn, cut, wanted))
                        except BadRow as bad:
                            refuse(raw, row_id, turn, bad)
            except BadRow as bad:
                refuse(raw, row_id, 0, bad)
            except RecursionError:
                refuse(raw, row_id, 0, BadRow("too_deep", "objects are nested too deeply"))
        for draft, encoded in self._encode(drafts):
            try:
                if isinstance(encoded, BadRow):
                    raise encoded
                mask = np.ones(len(encoded.ids), np.uint8)
                if draft.marked is not None:
                    mask = token_mask(draft.text, draft.marked, encoded)
                pieces.append(self._piece(draft.raw, draft.id, draft.turn, encoded.ids, mask))
            except BadRow as bad:
                refuse(draft.raw, draft.id, draft.turn, bad)
        pieces.sort(key=lambda piece: (piece.row, piece.turn))
        refusals.sort(key=lambda refusal: (refusal.row, refusal.turn))
        return Outcome(len(rows), pieces, refusals)

    def _given_mask(self, found: Pretokenized) -> np.ndarray:
        if self.rules.supervise == "all":
            return np.ones(len(found.ids), np.uint8)
        if self.rules.supervise == "last":
            raise BadRow("mask_unknown", "ids do not say which turn is the last: --supervise last")
        if found.mask is None:
            raise BadRow(
                "mask_unknown",
                "input_ids without loss_mask or labels: what is supervised is not known "
                "(--supervise all marks every token)",
            )
        return found.mask

    def _text_draft(self, raw: RawRow, row_id: str, found: PlainText) -> _Draft:
        if self.rules.supervise != "all":
            raise BadRow(
                "mask_unknown",
                "text that is already rendered does not say what the assistant said "
                "(--supervise all marks every token)",
            )
        return _Draft(raw, row_id, 0, _encodable(found.text), None)

    def _cuts(self, talk: Conversation) -> Iterable[tuple[int, Conversation, list[int]]]:
        """(turn, conversation, messages to supervise) of each sample of a conversation."""
        if self.rules.turns == "whole":
            yield 0, talk, wanted_turns(talk, self.rules.supervise)
            return
        if talk.unweighted.issuperset(talk.assistant_turns):
            raise BadRow("nothing_supervised", "every assistant turn has weight 0")
        for turn, last in enumerate(talk.assistant_turns, 1):
            if last not in talk.unweighted:
                cut = Conversation(talk.messages[: last + 1], talk.tools, talk.unweighted)
                yield turn, cut, [last]

    def _chat_draft(
        self, raw: RawRow, row_id: str, turn: int, talk: Conversation, wanted: list[int]
    ) -> _Draft:
        template, shape = self._template(talk)
        trace = _first_that_renders(template, talk)
        text = _encodable(trace.text)
        if self.rules.supervise == "all":
            check_rendered(trace, talk, ())
            return _Draft(raw, row_id, turn, text, None)
        marked = np.zeros(len(text), bool)
        for span in spans(trace, talk, shape, wanted, template.has_generation_blocks):
            marked[span.start : span.stop] = True
        return _Draft(raw, row_id, turn, text, marked)

    def _template(self, talk: Conversation) -> tuple[ChatTemplate, TurnShape]:
        name = "tool_use" if talk.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRow(
                "no_chat_template", "the tokenizer has no chat template: wanted --chat-template"
            )
        return self._templates[name]

    def _encode(self, drafts: list[_Draft]) -> Iterable[tuple[_Draft, Encoded | BadRow]]:
        try:
            found = self._encoder.encode([draft.text for draft in drafts])
            yield from zip(drafts, found, strict=True)
        except BadRow:
            for draft in drafts:  # one of them: say which
                try:
                    yield draft, self._encoder.encode([draft.text])[0]
                except BadRow as bad:
                    yield draft, bad

    def _piece(
        self, raw: RawRow, row_id: str, turn: int, ids: np.ndarray, mask: np.ndarray
    ) -> Piece:
        """Raises BadRow where a limit says so. Takes ids of any integer dtype."""
        limits = self.rules.limits
        count = len(ids)
        if not count:
            raise BadRow("empty", "no tokens")
        outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
        if len(outside):
            place = int(outside[0])
            raise BadRow(
                "id_out_of_range",
                f"input_ids[{place}] is {ids[place]}: wanted 0 to {limits.vocab_size - 1}",
            )
        if limits.min_supervised > 0 and not mask.any():
            raise BadRow("nothing_supervised", "no token is supervised")
        truncated = limits.max_length is not None and count > limits.max_length
        if truncated and limits.overlong == "skip":
            raise BadRow("too_long", f"{count} tokens, --max-length is {limits.max_length}")
        if limits.max_length is None and count > limits.context_length:
            raise BadRow(
                "longer_than_context",
                f"{count} tokens, the model's context is {limits.context_length} "
                "(--max-length truncates or skips)",
            )
        if truncated:
            ids, mask = ids[: limits.max_length], mask[: limits.max_length]
            if limits.min_supervised > 0 and not mask.any():
                raise BadRow(
                    "nothing_supervised_after_truncation",
                    f"no supervised tokens after truncation from {count} to {limits.max_length}",
                )
        if len(ids) < limits.min_length:
            raise BadRow("too_short", f"{count} tokens, --min-length is {limits.min_length}")
        if int(mask.sum()) < limits.min_supervised:
            raise BadRow(
                "too_few_supervised",
                f"{int(mask.sum())} supervised tokens, --min-supervised is {limits.min_supervised}",
            )
        return Piece(
            raw.number, turn, row_id, raw.file, raw.line, ids.astype(np.int32), mask, truncated
        )


def _parse(data: bytes | Mapping[str, Any] | BadRow) -> Mapping[str, Any]:
    if isinstance(data, BadRow):
        raise data
    if not isinstance(data, bytes):
        return data
    try:
        record = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"not UTF-8: byte {error.start} of the line") from None
    except ValueError as error:
        raise BadRow("not_json", f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRow("not_an_object", f"is a {type(record).__name__}: wanted an object")
    return record


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("not_unicode", f"holds half a surrogate pair, {text[error.start]!a}") from None
    return text


def _first_that_renders(template: ChatTemplate, talk: Conversation) -> Trace:
    """Render; a template that refuses tools or arguments in the usual form is given the other form
    that is in use (SGLang does so for tools)."""
    try:
        return template.prove(talk)
    except BadRow as bad:
        if bad.reason != "template_error":
            raise
        for other in _other_forms(talk):
            try:
                return template.prove(other)
            except BadRow:
                continue
        raise


def _other_forms(talk: Conversation) -> Iterable[Conversation]:
    if talk.tools and any(isinstance(tool.get("function"), dict) for tool in talk.tools):
        flat = [tool.get("function", tool) for tool in talk.tools]
        yield Conversation(talk.messages, flat, talk.unweighted)
    if any("tool_calls" in message for message in talk.messages):
        yield Conversation(
            [_with_text_arguments(message) for message in talk.messages],
            talk.tools,
            talk.unweighted,
        )


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates that paste arguments into their text want them as JSON text."""
    if "tool_calls" not in message:
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function = {**function, "arguments": text}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _encoder(rules: Rules) -> Encoder:
    if rules.tokenizer is not None:
        return FastEncoder(rules.tokenizer)
    from transformers import AutoTokenizer  # noqa: PLC0415  (imports torch: only where it must)

    return PythonEncoder(
        AutoTokenizer.from_pretrained(
            rules.tokenizer_path, trust_remote_code=rules.trust_remote_code
        )
    )
