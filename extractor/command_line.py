"""Flags of a verb, and under them the file of --config, as the verb's configuration.

argparse takes the words apart, values.py holds each to its field's type, and tyro writes --help from
the fields' own docstrings. Whatever is wrong ends in a UsageError, which is shown as one line.
"""

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from extractor import config_file
from extractor.errors import EXIT_OK, UsageError
from extractor.printable import printable
from extractor.progress import say
from extractor.torchrun import is_first_here
from extractor.values import WrongValue, bare, decode, flag, from_word, hints, nearest

C = TypeVar("C")
CONFIG = "--config"

# Flags that take KEY=VALUE: of the file and the command line together, the later one of a key counts.
PAIRS = ("sglang", "template_arg")


def read(kind: type[C], argv: Sequence[str], prog: str, shared: type) -> C:
    """The configuration that a command line asks for.

    Args:
        kind: the verb's configuration.
        argv: the words behind the verb.
        prog: how messages and --help call the verb.
        shared: the configuration whose file may be given to any verb: fields of it that this verb
            does not have are named and passed over.

    Raises UsageError. Prints --help and exits with 0 when that is asked for.
    """
    if any(word in ("-h", "--help") for word in argv):
        if is_first_here():
            tyro.cli(kind, args=["--help"], prog=prog)
        sys.exit(EXIT_OK)
    words = _words(kind, argv, prog, shared)
    file = words.pop("config", None)
    below = {} if file is None else _from_file(kind, _one_file(file), prog, shared)
    given = _from_words(kind, words)
    for name in PAIRS:
        if name in below and name in given:
            given[name] = _merged(below[name], given[name])
    values = below | given
    if missing := [name for name in _required(kind) if name not in values]:
        named = " and ".join(_shown_name(kind, name) for name in missing)
        raise UsageError(f"{named} {'is' if len(missing) == 1 else 'are'} missing ({prog} --help)")
    return kind(**values)


# The command line ----------------------------------------------------------------------------------
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(_plain_words(message))


def _plain_words(message: str) -> str:
    """argparse's complaint of a flag as a sentence of this program's."""
    found = re.match(r"argument ([^/:]+)[^:]*: (.*)", message, re.DOTALL)
    if found is None:
        return printable(message)
    name, what = found.groups()
    if what.startswith("expected"):
        return f"{name}: wanted a value after it"
    if what.startswith("ignored explicit argument"):
        return f"{name} takes no value: wanted {name} or --no-{name.removeprefix('--')}"
    return printable(f"{name}: {what}")


def _words(kind: type, argv: Sequence[str], prog: str, shared: type) -> dict[str, Any]:
    """Field names to the words given for them, as text or lists of text; switches as bool."""
    parser = _Parser(
        prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument(CONFIG, action="append")
    for name, hint in hints(kind).items():
        if not _is_positional(hint):
            parser.add_argument(flag(name), dest=name, **_action(name, hint))
    found, rest = parser.parse_known_args([_dashed(word) for word in argv])
    words = vars(found)
    places = [name for name, hint in hints(kind).items() if _is_positional(hint)]
    for word in (word for word in rest if word != "--"):
        if word.startswith("-") and word != "-":
            raise UsageError(_unknown(kind, word, prog, shared))
        if not places:
            raise UsageError(f"{printable(word)}: no flag takes this word ({prog} --help)")
        words[places.pop(0)] = word
    return words


def _action(name: str, hint: Any) -> dict[str, Any]:
    if bool in bare(hint):
        return {"action": argparse.BooleanOptionalAction}
    if not _is_list(hint):
        return {}
    return {"action": "append"} if name in PAIRS else {"action": "extend", "nargs": "+"}


def _dashed(word: str) -> str:
    """--max_length as --max-length; a value behind = is left alone."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.match(r"--[A-Za-z]", name) else word


def _unknown(kind: type, word: str, prog: str, shared: type) -> str:
    name = word.partition("=")[0]
    field = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    if field in hints(shared) and field not in hints(kind):
        return f"{printable(name)}: a flag of extract, and not of {prog} ({prog} --help)"
    flags = [CONFIG, *(flag(known) for known in hints(kind))]
    return f"{printable(name)}: no such flag{nearest(name, flags)} ({prog} --help)"


def _from_words(kind: type, words: Mapping[str, Any]) -> dict[str, Any]:
    fields = hints(kind)
    return _decoded(fields, {name: _given(name, fields[name], words[name]) for name in words})


def _given(name: str, hint: Any, words: str | list[str] | bool) -> "Given":
    if isinstance(words, str):
        return Given(from_word(hint, words), flag(name), words)
    return Given(words, flag(name), " ".join(words) if isinstance(words, list) else words)


# The file --------------------------------------------------------------------------------------------
def _one_file(files: Sequence[str]) -> Path:
    if len(files) > 1:
        raise UsageError(f"{CONFIG} is given {len(files)} times: wanted one file")
    return Path(files[0]).expanduser()


def _from_file(kind: type, file: Path, prog: str, shared: type) -> dict[str, Any]:
    own, known = hints(kind), {**hints(shared), **hints(kind)}
    loaded = config_file.read_mapping(file)
    wrong = [
        f"{printable(name)}: no such field{nearest(name, known)}"
        for name in loaded
        if name not in known
    ]
    given = {
        name: Given(config_file.plain(name, value), f"{name}:", config_file.shown(value))
        for name, value in loaded.items()
        if name in known
    }
    try:
        values = _decoded(known, given)
    except UsageError as error:
        values, wrong = {}, [*wrong, *str(error).split("\n")]
    if wrong:
        raise UsageError("\n".join(f"{CONFIG} {file}: {line}" for line in wrong))
    if others := [name for name in values if name not in own]:
        say(f"{CONFIG} {file}: {prog} has no use for {', '.join(others)}")
    return {name: value for name, value in values.items() if name in own}


# Both ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Given:
    """A field's value before it is held to its type, and how a message calls it and shows it."""

    value: Any
    called: str
    shown: Any


def _decoded(fields: Mapping[str, Any], given: Mapping[str, Given]) -> dict[str, Any]:
    """Raises UsageError with a line for each wrong value."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for name, item in given.items():
        try:
            values[name] = decode(fields[name], item.value, str(item.shown))
        except WrongValue as error:
            wrong.append(f"{item.called} {error}")
    if wrong:
        raise UsageError("\n".join(wrong))
    return values


def _merged(below: Sequence[str], above: Sequence[str]) -> tuple[str, ...]:
    """KEY=VALUE items, the later one of a key in place of an earlier one."""
    keys = (item.partition("=")[0].strip().replace("-", "_") for item in (*below, *above))
    return tuple(dict(zip(keys, (*below, *above), strict=True)).values())


def _required(kind: type) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _shown_name(kind: type, name: str) -> str:
    return name.upper() if _is_positional(hints(kind)[name]) else flag(name)


def _is_positional(hint: Any) -> bool:
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(member) is tuple for member in bare(hint))
