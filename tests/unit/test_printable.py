"""Nothing that a stranger wrote moves the terminal."""

import sys
import unicodedata

import pytest

from extractor.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Gänse, 鳥, 🙂 and \\n", "Gänse, 鳥, 🙂 and \\n"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\nextractor: done\r\n\tb", "a\\nextractor: done\\r\\n\\tb"),
        ("\x9b31m\x85\x7f\0", "\\x9b31m\\x85\\x7f\\x00"),
        ("\u202egnp.exe \u2066x\u2069 \u200f\u2028\u2029", "\\u202egnp.exe \\u2066x\\u2069 "
         "\\u200f\\u2028\\u2029"),
        ("half \ud800", "half \\ud800"),
    ],
)  # fmt: skip
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


def test_no_control_is_left() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    left = printable(everything)
    kinds = {unicodedata.category(c) for c in left}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not turning & {unicodedata.bidirectional(c) for c in left}


def test_what_is_kept() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
