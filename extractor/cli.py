"""Verbs of `extractor` and `python -m extractor`, and how a run's end becomes an exit code."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from extractor.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    PeerError,
    RunError,
    UsageError,
)
from extractor.signals import Stopped, StopSignals

VERBS = {
    "extract": "write hidden states (the main job; start it with torchrun)",
    "prepare": "tokenize only, on a machine without a GPU; extract picks it up",
    "show": "a sample in the terminal, its mask coloured",
    "check": "is every row accounted for, is every file whole",
    "verify": "stored states against transformers, sample by sample",
    "convert": "a folder again in another project's file format, or back",
    "report": "a page with pictures of what a folder holds and how it was made",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb and exit. Mistakes of the user's are one line on rank 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else "--help"
    if verb not in VERBS:
        _help()
        sys.exit(EXIT_OK if verb in ("--help", "-h", "help") else EXIT_USAGE)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    sys.exit(outcome(lambda: _run(verb, arguments[1:])))


def outcome(verb: Callable[[], int]) -> int:
    """Run it, and turn its end into an exit code. torchrun is told of what went wrong in a run."""
    try:
        return verb()
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except Stopped:
        return EXIT_AGAIN
    except PeerError as error:
        _tell_torchrun(error)
        return _complain(str(error), EXIT_FAILED) if error.elsewhere else EXIT_FAILED
    except RunError as error:
        _tell_torchrun(error)
        return _complain(str(error), EXIT_FAILED)
    except Exception as error:
        _tell_torchrun(error)
        raise


def _tell_torchrun(error: BaseException) -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from extractor.topology import record_error  # noqa: PLC0415

        record_error(error)


def _run(verb: str, arguments: list[str]) -> int:
    # Each verb imports what it needs and no more, so that --help answers at once.
    if verb == "extract":
        _check_data_names(arguments)
        # Before the imports, which take a while. A signal in them is kept for when this rank can tell
        # the others that it was asked to stop and has not died.
        stop = StopSignals()
        from extractor.pipeline import extract  # noqa: PLC0415

        return extract(arguments, stop=stop)
    if verb == "prepare":
        from extractor.prepare_verb import prepare  # noqa: PLC0415

        return prepare(arguments)
    if verb == "show":
        from extractor.prepare_verb import show  # noqa: PLC0415

        return show(arguments)
    if verb == "verify":
        from extractor.verify import verify  # noqa: PLC0415

        return verify(arguments)
    if verb == "convert":
        from extractor.convert import convert  # noqa: PLC0415

        return convert(arguments)
    if verb == "report":
        from extractor.report import report  # noqa: PLC0415

        return report(arguments)
    if verb == "check":
        from extractor.check import check  # noqa: PLC0415

        return check(arguments)
    raise AssertionError(verb)


def _check_data_names(arguments: list[str]) -> None:
    """A mistyped --data is told before imports that take seconds. Only rank 0 reads rows, and may
    be on the only machine that has them."""
    if os.environ.get("RANK", "0") == "0":
        from extractor.config import ExtractConfig, parse  # noqa: PLC0415
        from extractor.data.read import check_names  # noqa: PLC0415

        check_names(parse(ExtractConfig, arguments, "extractor extract").data)


def _complain(text: str, code: int) -> int:
    print(f"extractor: {text}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _help() -> None:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {what}" for verb, what in VERBS.items()]
    text = "usage: extractor VERB [flags]    (extractor VERB --help)\n\n" + "\n".join(lines)
    print(text)  # noqa: T201
