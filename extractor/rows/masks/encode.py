"""Encodes text into ids with the place of each id in the text, and turns marked characters into a
mask over tokens.

The encoding is `tokenizer(text, add_special_tokens=False)`, as SGLang's server encodes a rendered
chat. Worker processes use the `tokenizers` library alone where they can: transformers' tokenizers
import torch, which costs each process seconds and hundreds of megabytes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from extractor.rows.records import BadRow

_SPACES = np.array([c for c in range(sys.maxunicode + 1) if chr(c).isspace()], np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The tokens of a text.

    Attributes:
        ids: int64 [T].
        starts, ends: int64 [T] each; token t covers the characters [starts[t], ends[t]).
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> list[Encoded]: ...


class FastEncoder:
    """Encodes with the `tokenizers` library.

    Args:
        serialized: the tokenizer as `Tokenizer.to_str` gives it.
    """

    def __init__(self, serialized: str) -> None:
        self._tokenizer = Tokenizer.from_str(serialized)
        # A tokenizer file may ask for truncation and padding. Both would change the ids.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            _encoded(text, np.array(one.ids, np.int64), np.array(one.offsets, np.int64))
            for text, one in zip(texts, found, strict=True)
        ]


class PythonEncoder:
    """Encodes with a tokenizer that is written in Python and gives no offsets.

    The offsets are computed from the bytes of the tokens. Raises BadRow ("mask_unproved") for a text
    whose tokens do not join to its bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()
        }

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Encoded:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = [self._bytes(token) for token in ids]
        if b"".join(pieces) != text.encode():
            raise BadRow("mask_unproved", "the tokenizer does not say where its tokens stand")
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        stops = np.cumsum(lengths)
        # The number of the character that each byte belongs to. In UTF-8 every byte except
        # 0b10xxxxxx begins a character.
        data = np.frombuffer(text.encode(), np.uint8)
        number = np.cumsum((data & 0xC0) != 0x80) - 1
        number = np.append(number, number[-1] + 1 if len(number) else 0)
        starts = number[stops - lengths]
        ends = np.where(lengths > 0, number[stops - 1] + 1, starts)
        return Encoded(np.array(ids, np.int64), starts, ends)

    def _bytes(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(text, bytes):
            return text
        return bytes(_BYTE_OF[c] for c in text) if all(c in _BYTE_OF for c in text) else b""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, in which byte-level tokenizers write tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    return dict(pairs + [(chr(256 + place), byte) for place, byte in enumerate(others)])


_BYTE_OF = _byte_alphabet()


def _encoded(text: str, ids: np.ndarray, offsets: np.ndarray) -> Encoded:
    """Tokens with their offsets int64 [T, 2] extended, so that spaces between them belong to one.

    Many tokenizers trim spaces off their offsets, and give (0, 0) for a token that is all spaces. Such
    a token gets the characters between its neighbours. Any other token gets the spaces before it, and
    the last one also those at the end of the text.
    """
    if not len(ids):
        return Encoded(ids, ids, ids)
    starts, ends = offsets[:, 0].copy(), offsets[:, 1].copy()
    told = np.flatnonzero(ends > starts)
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([[0], reached[:-1]])  # where the tokens before each token end
    following = np.append(told, -1)[np.searchsorted(told, np.arange(len(ids)))]
    after = np.where(following >= 0, starts[following], len(text))
    silent = ends <= starts
    starts[silent], ends[silent] = before[silent], np.maximum(after, before)[silent]
    alone = ~silent & ~np.concatenate([[False], silent[:-1]])
    for place in np.flatnonzero(alone & (starts > before)):
        if text[before[place] : starts[place]].isspace():
            starts[place] = before[place]
    if ends[-1] < len(text) and text[ends[-1] :].isspace():
        ends[-1] = len(text)
    return Encoded(ids, starts, ends)


def token_mask(text: str, marked: np.ndarray, encoded: Encoded) -> np.ndarray:
    """The mask over tokens, uint8 [T], from marks over characters.

    A token has 1 when all its characters are marked, or when one marked character in it is not a
    space. So a token that joins the end of a header with a marked space has 0.

    Args:
        marked: bool [n], one value per character of the text.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    seen = marked & ~np.isin(codes, _SPACES)
    # Prefix sums give the number of marked characters in any token by one subtraction.
    all_marked = np.concatenate([[0], np.cumsum(marked)])
    all_seen = np.concatenate([[0], np.cumsum(seen)])
    starts, ends = encoded.starts, encoded.ends
    covered = all_marked[ends] - all_marked[starts]
    full = (covered == ends - starts) & (ends > starts)
    return (full | (all_seen[ends] > all_seen[starts])).astype(np.uint8)
