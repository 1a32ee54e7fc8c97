"""The disguise that the proof puts on text: the same length, other characters."""

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
