"""Converts a chunk of records into samples and refusals. This is the work of one worker process.

Everything here takes plain values and holds no open file, so it can run in a worker process.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError

from extractor.errors import UsageError
from extractor.prepared.pieces import Piece, Refusal
from extractor.printable import printable
from extractor.rows.bounds import ROW_SECONDS, Guard, check_length, most_text, unbounded
from extractor.rows.masks.encode import Encoded, Encoder, FastEncoder, PythonEncoder, token_mask
from extractor.rows.masks.forms import render
from extractor.rows.masks.render import ChatTemplate
from extractor.rows.masks.turns import TurnShape, spans, wanted_turns
from extractor.rows.normalise import (
    REASONING,
    Conversation,
    PlainText,
    Pretokenized,
    normalise,
    record_id,
)
from extractor.rows.records import BadRow, Limits, RawRow, Supervise, Turns


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that decides how a record becomes samples. It is pickled and sent to the workers.

    Attributes:
        tokenizer: a fast tokenizer, serialized; None for a tokenizer that only Python can run.
        tokenizer_path: the folder from which the Python tokenizer is loaded.
        templates: chat templates by name: "default", and "tool_use" for rows with tools.
        variables: what a template is given besides the row.
        special_tokens, eos: the tokenizer's special tokens, as text.
        added_tokens: all tokens that the tokenizer has beside its vocabulary, special or not.
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
    added_tokens: tuple[str, ...] = field(default=(), repr=False)


NO_END = (
    "the chat template ends an assistant turn by no token: what is supervised ends with its last "
    "character"
)
LEARNED = 32  # how many pairs of a template and a row's own variables are cached
READ_OF_MESSAGES = frozenset({"role", "content", "tool_calls", REASONING})
READ_OF_TOOLS = READ_OF_MESSAGES | {"tool_call_id", "name", "id"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a chunk of records. Each record has an entry in at least one of the two lists.

    Attributes:
        rows: number of records in the chunk.
        unread: keys that nothing reads, with the number of rows that have them.
        remarks: messages about the template or the rows that are shown once, with the number of
            samples that they apply to.
    """

    rows: int
    pieces: list[Piece]
    refusals: list[Refusal]
    unread: Counter[str] = field(default_factory=Counter[str])
    remarks: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A text that waits for the tokenizer.

    Attributes:
        marked: bool [n], one value per character: whether it is supervised. None marks all.
    """

    raw: RawRow
    id: str
    turn: int
    text: str
    marked: np.ndarray | None


class Converter:
    """Applies Rules to records.

    Args:
        guard: bounds the CPU seconds of each render.
    """

    def __init__(self, rules: Rules, guard: Guard = unbounded) -> None:
        self.rules = rules
        self._guard = guard
        self._templates: OrderedDict[str, tuple[ChatTemplate, TurnShape] | BadRow] = OrderedDict()

    @cached_property
    def _encoder(self) -> Encoder:
        return _encoder(self.rules)

    def learn(self) -> None:
        """Load and learn, ahead of the first row, everything that rows of text need.

        Raises:
            UsageError: a template is not valid Jinja.
        """
        _ = self._encoder
        for name in self.rules.templates:
            try:
                self._learned(name, {})
            except TemplateSyntaxError as error:
                raise UsageError(
                    f"the chat template, line {error.lineno}: {printable(str(error.message))}"
                ) from error
            except BadRow:  # each row that uses the template is rejected with this reason
                continue

    def shape(self, name: str = "default") -> TurnShape:
        return self._learned(name, {})[1]

    def renders(self, rows: Iterable[RawRow]) -> bool:
        """Whether at least one of the rows has text, which needs the template or the tokenizer."""
        for raw in rows:
            try:
                if not isinstance(normalise(_parse(raw.data)), Pretokenized):
                    return True
            except (BadRow, RecursionError):
                continue
        return False

    def convert(self, rows: Sequence[RawRow]) -> Outcome:
        outcome = Outcome(len(rows), [], [])
        drafts: list[_Draft] = []

        def refuse(raw: RawRow, row_id: str, turn: int, bad: BadRow) -> None:
            place = (raw.number, turn, row_id, raw.file, raw.line)
            outcome.refusals.append(Refusal(*place, bad.reason, bad.detail))

        for raw in rows:
            row_id = str(raw.number)
            try:
                record = _parse(raw.data)
                row_id = record_id(record, raw.number)
                found = normalise(record)
                if isinstance(found, Pretokenized):
                    mask = self._given_mask(found)
                    outcome.pieces.append(self._piece(raw, row_id, 0, found.ids, mask))
                elif isinstance(found, PlainText):
                    drafts.append(self._text_draft(raw, row_id, found))
                else:
                    outcome.unread.update(self._unread(found))
                    for turn, cut, wanted in self._cuts(found):
                        try:
                            drafts.append(self._chat_draft(raw, row_id, turn, cut, wanted))
                            outcome.remarks.update(self._remarks(cut))
                        except BadRow as bad:
                            refuse(raw, row_id, turn, bad)
            except BadRow as bad:
                refuse(raw, row_id, 0, bad)
            except RecursionError:
                refuse(raw, row_id, 0, BadRow("too_deep", "objects are nested too deeply"))
        # All texts of the chunk are encoded in one batch.
        for draft, encoded in self._encode(drafts):
            try:
                if isinstance(encoded, BadRow):
                    raise encoded
                mask = np.ones(len(encoded.ids), np.uint8)
                if draft.marked is not None:
                    mask = token_mask(draft.text, draft.marked, encoded)
                outcome.pieces.append(
                    self._piece(draft.raw, draft.id, draft.turn, encoded.ids, mask)
                )
            except BadRow as bad:
                refuse(draft.raw, draft.id, draft.turn, bad)
        outcome.pieces.sort(key=lambda piece: (piece.row, piece.turn))
        outcome.refusals.sort(key=lambda refusal: (refusal.row, refusal.turn))
        return outcome

    def _unread(self, talk: Conversation) -> set[str]:
        """Keys that neither this program nor the template reads, as words for a message."""
        names = self._template(talk)[0].names
        found = set(talk.unread)
        found |= {f"chat_template_kwargs {key}" for key in talk.variables.keys() - names}
        for message in talk.messages:
            known = names | (READ_OF_TOOLS if message["role"] == "tool" else READ_OF_MESSAGES)
            found |= {f"message key {key}" for key in message.keys() - known}
        return found

    def _remarks(self, talk: Conversation) -> Iterable[str]:
        template, shape = self._template(talk)
        if not (shape.ends or template.has_generation_blocks or self.rules.supervise == "all"):
            yield NO_END

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
        text = _encodable(found.text)
        check_length(text, most_text(self.rules.limits.context_length))
        return _Draft(raw, row_id, 0, text, None)

    def _cuts(self, talk: Conversation) -> Iterable[tuple[int, Conversation, list[int]]]:
        """(turn, conversation, messages to supervise) of each sample of a conversation."""
        if self.rules.turns == "whole":
            yield 0, talk, wanted_turns(talk, self.rules.supervise)
            return
        if talk.unweighted.issuperset(talk.assistant_turns):
            raise BadRow("nothing_supervised", "every assistant turn is switched off")
        for turn, last in enumerate(talk.assistant_turns, 1):
            if last not in talk.unweighted:
                cut = replace(talk, messages=talk.messages[: last + 1])
                yield turn, cut, [last]

    def _chat_draft(
        self, raw: RawRow, row_id: str, turn: int, talk: Conversation, wanted: list[int]
    ) -> _Draft:
        template, shape = self._template(talk)
        every = self.rules.supervise == "all"
        with self._guard(ROW_SECONDS):
            trace = render(template, talk, wanted, empty=every)
            text = _encodable(trace.text)
            if every:
                return _Draft(raw, row_id, turn, text, None)
            marked = np.zeros(len(text), bool)
            for span in spans(trace, talk, shape, wanted, template.has_generation_blocks):
                marked[span.start : span.stop] = True
            return _Draft(raw, row_id, turn, text, marked)

    def _template(self, talk: Conversation) -> tuple[ChatTemplate, TurnShape]:
        templates = self.rules.templates
        name = "tool_use" if talk.tools and "tool_use" in templates else "default"
        if name not in templates:
            raise BadRow(
                "no_chat_template", "the tokenizer has no chat template: wanted --chat-template"
            )
        return self._learned(name, talk.variables)

    def _learned(self, name: str, variables: Mapping[str, Any]) -> tuple[ChatTemplate, TurnShape]:
        """A template, with a row's own variables over those of all rows, and its TurnShape.

        Raises:
            BadRow: the template does not end even on a short conversation. The failure is cached as
                well, so that each row with these variables gets it at no cost.
        """
        key = json.dumps([name, variables], sort_keys=True, default=repr)
        if key not in self._templates:
            self._templates[key] = self._learn(name, variables)
            if len(self._templates) > LEARNED:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        found = self._templates[key]
        if isinstance(found, BadRow):
            raise BadRow(found.reason, f"even of a short conversation: {found.detail}")
        return found

    def _learn(
        self, name: str, variables: Mapping[str, Any]
    ) -> tuple[ChatTemplate, TurnShape] | BadRow:
        rules = self.rules
        try:
            made = ChatTemplate(
                rules.templates[name],
                {**rules.variables, **variables},
                most=most_text(rules.limits.context_length),
                guard=self._guard,
            )
            return made, TurnShape.learn(made, rules.special_tokens, rules.eos, rules.added_tokens)
        except BadRow as bad:
            return bad

    def _encode(self, drafts: list[_Draft]) -> Iterable[tuple[_Draft, Encoded | BadRow]]:
        try:
            found = self._encoder.encode([draft.text for draft in drafts])
            yield from zip(drafts, found, strict=True)
        except BadRow:
            for draft in drafts:  # encoding them one by one tells which text is refused
                try:
                    yield draft, self._encoder.encode([draft.text])[0]
                except BadRow as bad:
                    yield draft, bad

    def _piece(
        self, raw: RawRow, row_id: str, turn: int, ids: np.ndarray, mask: np.ndarray
    ) -> Piece:
        """The ids (any integer dtype, [T]) and the mask [T] as a Piece, cut to --max-length.

        Raises:
            BadRow: the sample breaks a limit.
        """
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


def identified(raw: RawRow) -> str:
    """The row's own id, or its number when the row cannot be parsed."""
    try:
        return record_id(_parse(raw.data), raw.number)
    except (BadRow, RecursionError):
        return str(raw.number)


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


def _encoder(rules: Rules) -> Encoder:
    if rules.tokenizer is not None:
        return FastEncoder(rules.tokenizer)
    from transformers import AutoTokenizer  # noqa: PLC0415  (imports torch: only where it must)

    return PythonEncoder(
        AutoTokenizer.from_pretrained(
            rules.tokenizer_path, trust_remote_code=rules.trust_remote_code
        )
    )
