"""Disguises: functions that replace the characters of a text and keep its length, for the proof."""

import re
import unicodedata
from collections.abc import Callable

from extractor.rows.records import Kind

Disguise = Callable[[str, Kind, "re.Pattern[str]"], str]
_WHEELS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    ".,;:!?",
    "+-*/=",
)


class _Shift(dict[int, int]):
    """A table for str.translate.

    A character of a wheel becomes the one `steps` later in it. A letter, number or symbol outside
    ASCII becomes the code point beside it, where that is of the same Unicode category. All other
    characters stay.
    """

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
        """Change the text, except where it holds a literal that the template could look for."""
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

# One disguise that holds is a proof. The later ones change fewer characters and kinds, for templates
# that treat some characters in a special way.
DISGUISES: tuple[Disguise, ...] = (
    _disguise(_Shift(1, _WHEELS), _ALL),
    _disguise(_Shift(13, _WHEELS[:3]), _ALL),
    _disguise(_Shift(5, _WHEELS[:2]), _SAID),
)
