"""`python -m extractor.data.worker`: Rules and then chunks of rows on standard input, what became
of each on standard output, as pickles, until the input ends. Started by work.py alone."""

import os
import pickle
import signal
import sys

from extractor.data.sample import Converter


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    requests = sys.stdin.buffer
    converter = Converter(pickle.load(requests))
    while True:
        try:
            chunk = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(converter.convert(chunk), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
