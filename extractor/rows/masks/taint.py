"""Taint tracking: strings that carry the origin of each character, and a Jinja environment that
keeps the origins while a chat template runs.

The *origin* of a character is its address in the concatenation of all strings that are wrapped for
one render, or NOWHERE in the template's own text. What Jinja and its templates do to strings (slice,
split, strip, join, replace, change case, tojson) keeps origins. Any other operation returns a plain
string, whose characters count as the template's own: an origin may be lost, but is never wrong, and
the proof in render.py detects the loss.
"""

import inspect
import json
import operator
import re
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import numpy as np
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

NOWHERE = -1

# (length in characters, origin of the first one or NOWHERE, number of the generation block or 0)
Run = tuple[int, int, int]


class Tainted(str):
    """A string with the origins of its characters, stored as runs of consecutive addresses."""

    runs: tuple[Run, ...]

    def __new__(cls, text: str, runs: Iterable[Run]) -> "Tainted":
        self = super().__new__(cls, text)
        self.runs = tuple(runs)
        return self

    @classmethod
    def at(cls, text: str, origin: int) -> "Tainted":
        """A string whose characters have consecutive addresses from `origin` on."""
        return cls(text, ((len(text), origin, 0),) if text else ())

    @classmethod
    def of(cls, text: str) -> "Tainted":
        return text if isinstance(text, Tainted) else cls(text, runs_of(text))

    def cut(self, start: int, stop: int) -> "Tainted":
        return Tainted(str.__getitem__(self, slice(start, stop)), _cut(self.runs, start, stop))

    def __str__(self) -> str:  # Jinja calls str() on all that it prints; this keeps the origins
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self.cut(start, max(start, stop))
            return concat(self.cut(i, i + 1) for i in range(start, stop, step))
        index = operator.index(key)  # raises TypeError for text["role"], as any string does
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError("string index out of range")
        return self.cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(i, i + 1) for i in range(len(self)))

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return concat([self] * operator.index(times))

    def __rmul__(self, times: SupportsIndex) -> str:
        return self * times

    def join(self, iterable: Iterable[str], /) -> str:
        pieces: list[str] = []
        for position, item in enumerate(iterable):
            if not isinstance(item, str):
                raise TypeError(
                    f"sequence item {position}: expected str instance, {type(item).__name__} found"
                )
            if position:
                pieces.append(self)
            pieces.append(item)
        return concat(pieces)

    def strip(self, chars: str | None = None, /) -> str:
        return Tainted.of(self.lstrip(chars)).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self.cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self.cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self.cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        kept = len(self) - len(suffix) if suffix and self.endswith(suffix) else len(self)
        return self.cut(0, kept)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._tiles(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._tiles(super().rsplit(sep, maxsplit), sep)

    def _tiles(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of a split, cut out of this string so that they keep their origins."""
        found: list[str] = []
        position = 0
        for piece in pieces:
            if sep is None:
                position = self.find(piece, position)
            found.append(self.cut(position, position + len(piece)))
            position += len(piece) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines: list[str] = []
        position = 0
        for whole, bare in zip(super().splitlines(True), super().splitlines(), strict=True):
            lines.append(self.cut(position, position + len(whole if keepends else bare)))
            position += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(self.find(sep), sep, missing=(self, "", ""))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(self.rfind(sep), sep, missing=("", "", self))

    def _parted(self, at: int, sep: str, missing: tuple[str, str, str]) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        if at < 0:
            return missing
        after = at + len(sep)
        return self.cut(0, at), self.cut(at, after), self.cut(after, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        limit = operator.index(count)
        if not old:  # inserts `new` between all characters, which may lose origins
            return super().replace(old, new, limit)
        pieces: list[str] = []
        position = 0
        while limit != 0 and (found := self.find(old, position)) >= 0:
            pieces += (self.cut(position, found), new)
            position = found + len(old)
            limit -= 1
        return concat([*pieces, self.cut(position, len(self))]) if pieces else self

    def lower(self) -> str:
        return self._recased(super().lower())

    def upper(self) -> str:
        return self._recased(super().upper())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def title(self) -> str:
        return self._recased(super().title())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def casefold(self) -> str:
        return self._recased(super().casefold())

    def _recased(self, text: str) -> str:
        return Tainted(text, self.runs) if len(text) == len(self) else text


def runs_of(text: str) -> tuple[Run, ...]:
    if isinstance(text, Tainted):
        return text.runs
    return ((len(text), NOWHERE, 0),) if text else ()


def _cut(runs: tuple[Run, ...], start: int, stop: int) -> Iterator[Run]:
    position = 0
    for length, origin, block in runs:
        first, last = max(start - position, 0), min(stop - position, length)
        if first < last:
            yield last - first, origin if origin == NOWHERE else origin + first, block
        position += length
        if position >= stop:
            return


def concat(pieces: Iterable[str]) -> str:
    """`"".join` that keeps origins. The result is a plain string when no piece is Tainted."""
    pieces = list(pieces)
    text = "".join(pieces)
    if not any(isinstance(piece, Tainted) for piece in pieces):
        return text
    runs: list[Run] = []
    for piece in pieces:
        for run in runs_of(piece):
            if runs and _continues(runs[-1], run):
                runs[-1] = (runs[-1][0] + run[0], *runs[-1][1:])
            else:
                runs.append(run)
    return Tainted(text, runs)


def _continues(before: Run, after: Run) -> bool:
    if before[2] != after[2]:
        return False
    if before[1] == NOWHERE or after[1] == NOWHERE:
        return before[1] == after[1]
    return before[1] + before[0] == after[1]


def origins(text: str) -> tuple[np.ndarray, np.ndarray]:
    """(origin int64 [n], number of the generation block or 0 int32 [n]) of each character."""
    runs = runs_of(text)
    if not runs:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    lengths = np.array([run[0] for run in runs])
    firsts = np.array([run[1] for run in runs], np.int64)
    begins = np.cumsum(lengths) - lengths
    within = np.arange(len(text)) - np.repeat(begins, lengths)
    first = np.repeat(firsts, lengths)
    blocks = np.repeat(np.array([run[2] for run in runs], np.int32), lengths)
    return np.where(first == NOWHERE, NOWHERE, first + within), blocks


class _GenerationBlocks(jinja2.ext.Extension):
    """The tag `{% generation %}`: marks the characters of each block with the block's number, which
    they keep wherever they are printed. transformers counts the characters printed so far, and so
    misplaces a block inside a macro or a set block."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks = 0

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.blocks += 1
        return Tainted(text, [(length, origin, self.blocks) for length, origin, _ in runs_of(text)])


class TaintEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with string functions that keep origins."""

    concat = staticmethod(concat)  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def call(
        __self,  # pyright: ignore[reportSelfClsParameterName]
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A method of a plain string drops the origins of its arguments, so Tainted's method is used.
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and __obj.__name__ in ("join", "replace"):
            __obj = getattr(Tainted.of(owner), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None

        def format_text(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                args, kwargs = (), dict(args[0])
            return _format(self, owner, args, kwargs)

        return format_text


def _format(
    environment: TaintEnvironment, pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """str.format with the sandbox's field lookup; a field without conversion or format spec keeps
    the origins of its value."""
    formatter = SandboxedFormatter(environment)
    pieces: list[str] = []
    automatic = 0
    for literal, field, spec, conversion in string.Formatter().parse(pattern):
        pieces.append(literal)
        if field is None:
            continue
        if field == "" or field.startswith((".", "[")):
            field, automatic = f"{automatic}{field}", automatic + 1
        value, _ = formatter.get_field(field, args, kwargs)
        if conversion or spec:
            value = formatter.format_field(formatter.convert_field(value, conversion), spec or "")
        pieces.append(str(value))
    return concat(pieces)


def taint_template(
    compiled: jinja2.Template, source: str
) -> tuple[jinja2.Template, Callable[[], None]]:
    """Compile a template again, in an environment that keeps origins.

    Args:
        compiled: transformers' template; its environment's settings, filters and so on are copied.
        source: its Jinja text.

    Returns:
        The template, and a function that restarts the numbers of generation blocks.
    """
    theirs = compiled.environment
    extensions = [
        _GenerationBlocks if "generation" in extension.tags else type(extension)
        for extension in theirs.extensions.values()
    ]
    settings = ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "newline_sequence")
    environment = TaintEnvironment(
        extensions=extensions,
        undefined=theirs.undefined,
        autoescape=theirs.autoescape,
        **{name: getattr(theirs, name) for name in settings},
    )
    environment.globals.update(theirs.globals)
    environment.tests.update(theirs.tests)
    filters: dict[str, Any] = environment.filters  # pyright: ignore[reportAssignmentType]
    filters.update(theirs.filters)
    filters.update(
        tojson=_tainted_tojson(filters["tojson"]),
        join=_join,
        replace=_replace,
        indent=_indent,
        safe=_safe,
    )
    template = environment.from_string(source)
    template.root_render_func.__globals__["str_join"] = lambda parts: concat(map(str, parts))
    marks = environment.extensions[_GenerationBlocks.identifier]
    assert isinstance(marks, _GenerationBlocks)

    def reset() -> None:
        marks.blocks = 0

    return template, reset


@jinja2.pass_eval_context
def _join(
    context: jinja2.nodes.EvalContext,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return Tainted.of(str(d)).join(map(str, value))


def _replace(value: str, old: str, new: str, count: int | None = None) -> str:
    return Tainted.of(str(value)).replace(str(old), str(new), -1 if count is None else count)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * width
    lines = (Tainted.of(value) + "\n").splitlines()
    text = Tainted.of("\n").join(
        margin + line if number and (line or blank) else line for number, line in enumerate(lines)
    )
    return margin + text if first else text


def _safe(value: Any) -> Any:
    return value if isinstance(value, str) else str(value)


def _tainted_tojson(plain: Callable[..., str]) -> Callable[..., str]:
    signature = inspect.signature(plain)

    # Each literal of the text gets the origins of its string: both have the same order.
    def tojson(value: Any, *args: Any, **kwargs: Any) -> str:
        text = plain(value, *args, **kwargs)
        given = signature.bind(value, *args, **kwargs).arguments
        strings = list(_strings(value, bool(given.get("sort_keys", False))))
        literals = list(_JSON_STRING.finditer(text))
        if len(strings) != len(literals):
            return text
        pieces: list[str] = []
        position = 0
        for source, literal in zip(strings, literals, strict=True):
            if isinstance(source, Tainted):
                pieces += (text[position : literal.start() + 1], _escaped(source, literal[0][1:-1]))
                position = literal.end() - 1
        return concat([*pieces, text[position:]])

    return tojson


_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_JSON_ESCAPE = re.compile(
    r"[^\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.",
    re.DOTALL,
)


def _strings(value: Any, sort_keys: bool) -> Iterator[str | None]:
    """The strings that json.dumps prints as literals, in its order; None for a key that is not a
    string, which json.dumps turns into one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in sorted(value.items()) if sort_keys else value.items():
            yield key if isinstance(key, str) else None
            yield from _strings(item, sort_keys)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, sort_keys)


def _escaped(source: Tainted, body: str) -> str:
    """The body of a JSON literal with the origins of its source; of an escape sequence, the last
    character has the origin of the escaped character."""
    pieces: list[str] = []
    position = 0
    for unit in _JSON_ESCAPE.findall(body):
        if unit[0] == "\\":
            pieces += (unit[:-1], Tainted(unit[-1], _cut(source.runs, position, position + 1)))
            position += 1
        else:
            pieces.append(Tainted(unit, _cut(source.runs, position, position + len(unit))))
            position += len(unit)
    if position != len(source) or json.loads(f'"{body}"', strict=False) != source:
        return body
    return concat(pieces)
