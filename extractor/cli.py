"""Verbs of `extractor` and `python -m extractor`, and how a run's end becomes an exit code."""

import logging
import sys
from collections.abc import Sequence

from extractor.errors import RunError, UsageError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_REJECTS, EXIT_AGAIN = 0, 1, 2, 3, 75

VERBS = {
    "extract": "write hidden states (the main job; start it with torchrun)",
    "prepare": "tokenize only, on a machine without a GPU; extract picks it up",
    "show": "a sample in the terminal, its mask coloured",
    "check": "is every row accounted for, is every file whole",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb and exit. Mistakes of the user's are one line on rank 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else "--help"
    if verb not in VERBS:
        _help()
        sys.exit(EXIT_OK if verb in ("--help", "-h", "help") else EXIT_USAGE)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        code = _run(verb, arguments[1:])
    except UsageError as error:
        code = _complain(str(error), EXIT_USAGE)
    except RunError as error:
        code = _complain(str(error), EXIT_FAILED)
    sys.exit(code)


def _run(verb: str, arguments: list[str]) -> int:
    # Each verb imports what it needs and no more, so that --help answers at once.
    if verb == "extract":
        from extractor.pipeline import extract  # noqa: PLC0415

        return extract(arguments)
    if verb == "prepare":
        from extractor.prepare import prepare  # noqa: PLC0415

        return prepare(arguments)
    raise UsageError(f"{verb}: not here yet")


def _complain(text: str, code: int) -> int:
    print(f"extractor: {text}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _help() -> None:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {what}" for verb, what in VERBS.items()]
    text = "usage: extractor VERB [flags]    (extractor VERB --help)\n\n" + "\n".join(lines)
    print(text)  # noqa: T201
