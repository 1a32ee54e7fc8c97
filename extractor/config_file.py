"""The YAML file of --config: names of flags to values.

It is read strictly. YAML 1.1 takes `yes` for true, 012 for ten and 2026-12-01 for a date; here such
words stay text, and a field that wants something else refuses them. A key that comes twice is refused.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from extractor.errors import UsageError
from extractor.printable import printable
from extractor.values import FRACTION, WHOLE, number


def read_mapping(file: Path) -> dict[str, Any]:
    """The file's keys, as field names, to values. Raises UsageError."""
    try:
        loaded: Any = yaml.load(file.read_text(encoding="utf-8"), _Strict)
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {file}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file}: {_one_line(error)}") from error
    except RecursionError as error:
        raise UsageError(f"--config {file}: nested too deeply") from error
    if not isinstance(loaded, dict | None):
        raise UsageError(f"--config {file}: wanted a mapping of flags to values")
    given: dict[str, Any] = {}
    for key, value in (loaded or {}).items():
        name = str(key).replace("-", "_")
        if name in given:
            raise UsageError(f"--config {file}: {printable(str(key))} is given twice")
        given[name] = value
    return given


def plain(name: str, value: Any) -> Any:
    """A field's value without what files alone know: one item for a list of them, a list of layers,
    a mapping for KEY=VALUE. What does not fit stays as it is, for the field's type to refuse."""
    if name in ("sglang", "template_arg") and isinstance(value, dict):
        return [f"{key}={_word(item, name)}" for key, item in value.items()]
    if name in ("data", "sglang", "template_arg") and isinstance(value, str):
        return [value]
    if name == "layers":
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str | int) and not isinstance(item, bool) for item in items):
            return ",".join(map(str, items))
    return value


def shown(value: Any) -> str:
    """A value as a file may have it, on one line."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _word(value: Any, name: str) -> str:
    """As it would stand behind KEY= on the command line. There a template's argument is JSON where it
    can be read so; text that could be is written as JSON text, to stay text."""
    if isinstance(value, str) and not (name == "template_arg" and _is_json(value)):
        return value
    return shown(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _one_line(error: yaml.YAMLError) -> str:
    """What is wrong and where, of PyYAML's several lines."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return printable(f"{where}{what}")


class _Strict(yaml.SafeLoader):
    """PyYAML's safe loader with the words of YAML 1.2 alone, and without a key that comes twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own names)
    yaml_constructors: dict[Any, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong("wanted a word as a key", key)
            if key.value in seen:
                raise _wrong(f"{key.value} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _wrong(what: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)


def _add(tag: str, pattern: str, read: Callable[[str], Any]) -> None:
    """A kind of word: how it looks, and what it says. Text under a tag that it does not fit stays
    text."""

    def construct(loader: Any, node: Any) -> Any:
        return read(loader.construct_scalar(node))

    name = f"tag:yaml.org,2002:{tag}"
    _Strict.add_implicit_resolver(name, re.compile(f"(?:{pattern})$"), None)
    _Strict.yaml_constructors[name] = construct


_add("null", "~|null|", lambda _: None)

_add("bool", "true|false", lambda text: {"true": True, "false": False}.get(text, text))

_add("int", WHOLE.pattern, number)

_add("float", FRACTION.pattern, number)

for _tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map", None):
    _Strict.yaml_constructors[_tag] = yaml.SafeLoader.yaml_constructors[_tag]
