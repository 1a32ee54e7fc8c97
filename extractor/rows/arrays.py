"""Splits a JSON array into its elements while the file is read block by block."""

import codecs
import json
import re
from collections.abc import Iterator

from extractor.rows.bounds import ROW_BYTES, too_many_bytes
from extractor.rows.records import BadRow

_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')


class ArrayReader:
    """Finds the elements of a JSON array, and returns each one as bytes that are not parsed.

    Attributes:
        line: the line, from 1, where the next element begins.
    """

    def __init__(self) -> None:
        self.line = 1
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        # What may come next: "[", "first" (an element or the last bracket), "element", "," (a comma
        # or the last bracket), or "" after the array.
        self._wanted = "["
        # Length at which an element was incomplete. It is parsed again at twice this length, so that
        # the work stays proportional to the size of the file.
        self._tried = 0
        # Set while an element that is not parsed is skipped to its end.
        self._passing: _Passed | None = None

    def feed(self, block: bytes) -> Iterator[tuple[int, bytes | BadRow]]:
        """Take the next block of the file, and yield (line, element) of each complete element.

        Raises:
            BadRow: the file is broken so that nothing after this place can be read.
        """
        try:
            self._text += self._decode.decode(block)
        except UnicodeDecodeError:
            raise BadRow("not_utf8", "not UTF-8; nothing after it can be read") from None
        if len(self._text) >= 2 * self._tried:
            yield from self._parse(final=False)

    def close(self) -> Iterator[tuple[int, bytes | BadRow]]:
        yield from self._parse(final=True)
        if self._wanted != "":
            raise BadRow("not_json", "not JSON: the array is cut off; nothing after it can be read")

    def _parse(self, final: bool) -> Iterator[tuple[int, bytes | BadRow]]:
        position = self._pass(0)
        self._tried = 0
        while position < len(self._text):
            position = self._skip(position)
            if position >= len(self._text):
                break
            if self._wanted != "element" and not self._at_element(position):
                position += 1
                continue
            try:
                element, end = self._json.raw_decode(self._text, position)
            except json.JSONDecodeError as error:
                if final:
                    raise BadRow(
                        "not_json", f"not JSON: {error}; nothing after it can be read"
                    ) from None
                if len(self._text) - position <= ROW_BYTES:
                    self._tried = len(self._text) - position
                    break  # the rest of the element may come with the next block
                whole = _Passed().end(self._text, position) is not None
                bad = (
                    BadRow("not_json", f"not JSON: {error}") if whole else too_many_bytes("record")
                )
            except ValueError as error:  # Python refuses a number of thousands of digits
                bad = BadRow("not_json", f"not JSON: {error}")
            except RecursionError:
                bad = BadRow("too_deep", "objects are nested too deeply")
            else:
                if self._skip(end, quiet=True) >= len(self._text) and not final:
                    break  # a number may go on in the next block
                data = self._text[position:end].encode()
                yield self.line, _record(element, data)
                self.line += self._text.count("\n", position, end)
                position, self._wanted = end, ","
                continue
            yield self.line, bad
            self._passing, self._wanted = _Passed(), ","
            position = self._pass(position)
        self._text = self._text[position:]

    def _pass(self, position: int) -> int:
        """Skip an element that is not parsed, as far as its text has arrived."""
        if self._passing is None:
            return position
        end = self._passing.end(self._text, position)
        if end is not None:
            self._passing = None
        stop = len(self._text) if end is None else end
        self.line += self._text.count("\n", position, stop)
        return stop

    def _at_element(self, position: int) -> bool:
        """Whether an element begins here. A [, a comma or the last ] changes what is wanted next.

        Raises:
            BadRow: the character is none of these.
        """
        character = self._text[position]
        if self._wanted == "first" and character != "]":
            return True
        if self._wanted == "":
            raise BadRow("not_json", "not JSON: there is more text after the array")
        following = {
            ("[", "["): "first",
            ("first", "]"): "",
            (",", ","): "element",
            (",", "]"): "",
        }.get((self._wanted, character))
        if following is None:
            wanted = "[" if self._wanted == "[" else ", or ]"
            raise BadRow("not_json", f"not JSON: wanted {wanted}, not {character!r}")
        self._wanted = following
        return False

    def _skip(self, position: int, quiet: bool = False) -> int:
        end = _SPACE.match(self._text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        if not quiet:
            self.line += self._text.count("\n", position, end)
        return end


class _Passed:
    """Finds where an object, an array or a string ends without parsing it, at any depth or length."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = self._escaped = False

    def end(self, text: str, position: int) -> int | None:
        """The position after its last character, or None when its end is not in this text."""
        if self._escaped and position < len(text):
            position, self._escaped = position + 1, False
        while found := (_INSIDE if self._inside else _OUTSIDE).search(text, position):
            position = found.end()
            character = found[0]
            if character == "\\":
                if position == len(text):
                    self._escaped = True
                position += 1
                continue
            if character == '"':
                self._inside = not self._inside
            else:
                self._depth += 1 if character in "{[" else -1
            if not self._inside and self._depth <= 0:
                return position
        return None


def _record(element: object, data: bytes) -> bytes | BadRow:
    if isinstance(element, dict):
        return data
    return BadRow("not_an_object", f"is a {type(element).__name__}: wanted an object")
