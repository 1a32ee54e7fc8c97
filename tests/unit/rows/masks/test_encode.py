"""Where tokens stand, and which of them are marked."""

import functools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from extractor.rows.masks.encode import Encoded, FastEncoder, PythonEncoder, token_mask
from tests.support.data_kit import train


@functools.cache
def _tokenizer() -> Tokenizer:
    return train()


def mask(text: str, marked: str, tokens: list[tuple[int, int]]) -> list[int]:
    starts = np.array([a for a, _ in tokens])
    ends = np.array([b for _, b in tokens])
    marks = np.array([c == "^" for c in marked])
    return token_mask(text, marks, Encoded(np.zeros(len(tokens), np.int64), starts, ends)).tolist()


def test_straddling_tokens() -> None:
    text, marks = "user\n\nHi<e>\n", "     ^^^^^^ "
    assert mask(text, marks, [(0, 4), (4, 6), (6, 8), (8, 11), (11, 12)]) == [0, 0, 1, 1, 0]
    assert mask(text, marks, [(0, 4), (4, 5), (5, 6), (6, 8), (8, 12)]) == [0, 0, 1, 1, 1]
    assert mask(text, marks, [(0, 4), (4, 7), (7, 11), (11, 12)]) == [0, 1, 1, 0]


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab \n\té日🙂\u0301\u2028", max_size=30))
def test_extents_cover_the_text_even_where_offsets_are_trimmed(text: str) -> None:
    made = Tokenizer.from_str(_tokenizer().to_str())
    made.post_processor = ByteLevel(trim_offsets=True)
    (found,) = FastEncoder(made.to_str()).encode([text])
    covered = np.zeros(len(text), bool)
    for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True):
        assert 0 <= start < end <= len(text)
        covered[start:end] = True
    assert covered.all()
    assert token_mask(text, np.ones(len(text), bool), found).all()


class SlowTokenizer:
    """A Python tokenizer: the fast one without its offsets."""

    def __init__(self, fast: Tokenizer) -> None:
        self._fast = fast
        self.added_tokens_decoder = fast.get_added_tokens_decoder()

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self._fast.encode(text, add_special_tokens=add_special_tokens).ids}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._fast.id_to_token(token)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_offsets_from_bytes_are_the_fast_ones(data: st.DataObject) -> None:
    tokenizer = _tokenizer()
    text = data.draw(st.text("ab \n日🙂é", max_size=20)) + "<|im_end|>" + data.draw(st.text())
    (fast,) = FastEncoder(tokenizer.to_str()).encode([text])
    (slow,) = PythonEncoder(SlowTokenizer(tokenizer)).encode([text])
    assert fast.ids.tolist() == slow.ids.tolist()
    assert fast.starts.tolist() == slow.starts.tolist()
    assert fast.ends.tolist() == slow.ends.tolist()
