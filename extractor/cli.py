"""Verbs of `extractor` and `python -m extractor`, and how a run's end becomes an exit code."""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from extractor.config import PrepareConfig, ShowConfig, parse, read_extract
from extractor.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REJECTS,
    EXIT_USAGE,
    PeerError,
    RunError,
    SharedUsageError,
    UsageError,
)
from extractor.ranks.signals import Stopped, StopSignals
from extractor.terminal import complain, discard, prepare_streams, reader_is_gone
from extractor.torchrun import Launch, has_recorded, is_first_here, record_error, record_line
from extractor.values import nearest

VERBS = {
    "extract": "write hidden states (the main job; start it with torchrun)",
    "prepare": "tokenize only, on a machine without a GPU; extract picks it up",
    "show": "a sample in the terminal, its mask coloured",
    "check": "is every row accounted for, is every file whole",
    "verify": "stored states against transformers, sample by sample",
    "convert": "a folder again in another project's file format, or back",
    "report": "a page with pictures of what a folder holds and how it was made",
}

# How long a rank that has nothing of its own to say waits for the one that has. torchrun ends all
# ranks when one has left, and its report is of those that left first.
FIRST_WORD_SECONDS = 2.0

# What torchrun's report ends with where the end is no error.
ENDS = {
    EXIT_REJECTS: "done, but rows were rejected that nobody allowed for: rejects.jsonl names them",
    EXIT_AGAIN: "stopped by a signal with work left: start the same command again",
}
READER_GONE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb and exit. Mistakes of the user's are one line on rank 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    sys.exit(_printed(lambda: _main(arguments)))


def _main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb in VERBS:
        return outcome(lambda: _run(verb, arguments[1:]))
    if verb in ("--help", "-h", "help"):
        _help()
        return EXIT_OK
    return outcome(lambda: _no_verb(verb))


def _no_verb(verb: str) -> int:
    raise UsageError(f"{verb}: no such verb{nearest(verb, VERBS)} (extractor --help)")


def _printed(run: Callable[[], int]) -> int:
    """Its exit code, once stdout has what it printed. A reader that wants no more of it, such as head,
    ends it without a word."""
    code = EXIT_OK
    try:
        code = run()
        sys.stdout.flush()
    except OSError as error:
        gone = reader_is_gone(sys.stdout)
        discard(sys.stdout)
        if gone:
            return READER_GONE
        if not code:
            complain(f"cannot write to stdout: {error.strerror}")
        return code or EXIT_FAILED
    return code


def outcome(verb: Callable[[], int]) -> int:
    """Run it, and turn its end into an exit code. torchrun is told of whatever is not a good end."""
    try:
        code = verb()
    except Stopped:
        code = EXIT_AGAIN
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UsageError as error:
        alone = not isinstance(error, SharedUsageError)
        return _end(error, EXIT_USAGE, shows=alone or is_first_here())
    except PeerError as error:
        return _end(error, error.code, shows=error.elsewhere)
    except RunError as error:
        return _end(error, EXIT_FAILED, shows=True)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone(sys.stdout):
            raise
        return _end(_refused_by_system(error), EXIT_FAILED, shows=True)
    except Exception as error:
        return _bug(error)
    if code in ENDS and not has_recorded():
        record_line(ENDS[code])
    return code


def _end(error: UsageError | RunError, code: int, *, shows: bool) -> int:
    record_error(error)
    if shows:
        complain(str(error))
    elif _let_others_speak() and code == EXIT_USAGE:
        record_line("refused, for the reason that another rank gives")
    return code


def _refused_by_system(error: OSError) -> RunError:
    where = f"{error.filename}: " if error.filename else "reading or writing failed: "
    return RunError(f"{where}{error.strerror or error}")


def _bug(error: Exception) -> int:
    """Nobody's mistake but this program's: all that is known of it."""
    record_error(error)
    complain("".join(traceback.format_exception(error)).rstrip())
    return EXIT_FAILED


def _let_others_speak() -> bool:
    """Wait for torchrun's SIGTERM, which says that the rank with the reason has left.

    Returns whether it came."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    end = time.monotonic() + FIRST_WORD_SECONDS
    while not signals and time.monotonic() < end:
        time.sleep(0.05)
    return bool(signals)


def _run(verb: str, arguments: list[str]) -> int:
    # Each verb imports what it needs and no more, so that --help answers at once.
    if verb == "extract":
        return _extract(arguments)
    if verb == "prepare":
        return _prepare(arguments)
    if verb == "show":
        return _show(arguments)
    if verb == "verify":
        from extractor.verbs.verify import verify  # noqa: PLC0415

        return verify(arguments)
    if verb == "convert":
        from extractor.verbs.convert import convert  # noqa: PLC0415

        return convert(arguments)
    if verb == "report":
        from extractor.verbs.report import report  # noqa: PLC0415

        return report(arguments)
    if verb == "check":
        from extractor.verbs.check import check  # noqa: PLC0415

        return check(arguments)
    raise AssertionError(verb)


def _extract(arguments: list[str]) -> int:
    # All that can be refused is, before the imports, which take a while. A signal in them is kept for
    # when this rank can tell the others that it was asked to stop and has not died.
    stop = StopSignals()
    config = read_extract(arguments)
    if Launch.from_environment().rank == 0:  # who alone reads rows, and may alone have them
        _check_names(config.data)
    from extractor.run.extract import run  # noqa: PLC0415

    return run(config, stop=stop)


def _prepare(arguments: list[str]) -> int:
    config = parse(PrepareConfig, arguments, "extractor prepare")
    _check_names(config.data)
    from extractor.verbs.prepare import prepare  # noqa: PLC0415

    return prepare(config)


def _show(arguments: list[str]) -> int:
    config = parse(ShowConfig, arguments, "extractor show")
    if not Path(config.target).expanduser().exists():
        _check_names([config.target])
    from extractor.verbs.show import show  # noqa: PLC0415

    return show(config)


def _check_names(data: Sequence[str]) -> None:
    """A mistyped name is told before imports that take seconds."""
    from extractor.rows.read import check_names  # noqa: PLC0415

    check_names(data)


def _help() -> None:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {what}" for verb, what in VERBS.items()]
    text = "usage: extractor VERB [flags]    (extractor VERB --help)\n\n" + "\n".join(lines)
    print(text)  # noqa: T201
