"""`python -m extractor.rows.worker`: Rules and then chunks of rows on standard input; on standard
output None (or why the rules cannot be used) and then what became of each chunk; as pickles, until
the input ends. Started by work.py alone."""

import os
import pickle
import signal
import sys
from typing import Any

from extractor.errors import UsageError
from extractor.rows.bounds import bound_memory, cpu_bounded, most_text
from extractor.rows.converter import Converter, Rules


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    requests = sys.stdin.buffer
    converter: Converter | None = None
    while True:
        try:
            asked = pickle.load(requests)
        except EOFError:
            return
        if isinstance(asked, Rules):
            converter = Converter(asked, cpu_bounded)
            answer: Any = _learned(converter)
        else:
            assert converter is not None
            answer = converter.convert(asked)
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _learned(converter: Converter) -> str | None:
    """Why the rules cannot be used, or None."""
    most = most_text(converter.rules.limits.context_length)
    bound_memory(most)  # what a template takes while it is learned counts as well
    try:
        converter.learn()
    except UsageError as error:
        return str(error)
    bound_memory(most)
    return None


if __name__ == "__main__":
    main()
