"""Text of strangers, as a terminal or a log may show it: ids, file names, messages of templates."""

import re

# C0 and C1 controls and DEL, which move the cursor or set colours; the separators that end a line
# in some programs; marks that turn the writing direction; halves of surrogate pairs, which no
# output can encode.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, *, keep: str = "") -> str:
    """The text with everything that could move a terminal or forge a line of a log as an escape.

    Args:
        keep: characters that stay as they are, such as the newlines of a text shown as a whole.
    """
    return _UNSAFE.sub(lambda found: _escaped(found[0], keep), text)


def _escaped(character: str, keep: str) -> str:
    if character in keep:
        return character
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
