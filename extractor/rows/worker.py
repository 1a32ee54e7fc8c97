"""The worker process, `python -m extractor.rows.worker`. Only work.py starts it.

It reads pickles from standard input until the input ends, and writes one pickle per request to
standard output. A Rules object is answered with None, or with a message when the rules cannot be
used. A chunk of rows is answered with its Outcome.
"""

import os
import pickle
import signal
import sys
from typing import Any

from extractor.errors import UsageError
from extractor.rows.bounds import bound_memory, cpu_bounded, most_text
from extractor.rows.converter import Converter, Rules


def main() -> None:
    # Ctrl-C reaches the whole process group. The parent decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output is replaced by standard error, so that text which a library prints does not
    # get between the pickles.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
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
    """A message that says why the rules cannot be used, or None."""
    most = most_text(converter.rules.limits.context_length)
    # The limit also holds while the template is learned. It is set again afterwards, because it
    # counts from the memory that the process then has.
    bound_memory(most)
    try:
        converter.learn()
    except UsageError as error:
        return str(error)
    bound_memory(most)
    return None


if __name__ == "__main__":
    main()
