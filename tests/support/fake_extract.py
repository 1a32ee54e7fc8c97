"""extract with the fake engine and faults: what torchrun starts in tests, and the zygote in a fork.

usage: fake_extract.py [--faults JSON] [--log FILE] FLAGS_OF_EXTRACT
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from extractor.ranks.signals import StopSignals

if TYPE_CHECKING:
    from tests.support.faults import Fault


def run(
    argv: Sequence[str],
    faults: Sequence["Fault"] = (),
    log: Path | None = None,
    stop: StopSignals | None = None,
) -> int:
    """The exit code of one rank, which torchrun's variables describe."""
    from extractor.cli import outcome
    from extractor.plan import request
    from extractor.run import extract
    from extractor.write.writer import ORDINARY
    from tests.support import faulty_writer
    from tests.support.fake_engine import FakeBackend
    from tests.support.faults import Faults

    here = Faults(faults, log)
    backend = FakeBackend(here.before_pass, here.on_load, here.on_import, here.poison())
    real = request.prepare

    def slow_prepare(*args: object, **kwargs: object) -> object:
        here.on_prepare()
        return real(*args, **kwargs)  # pyright: ignore

    request.prepare = slow_prepare  # pyright: ignore
    workers = ORDINARY
    if any(fault.kind == "processes" for fault in faults):
        workers = faulty_writer.workers(faults, log)
    return outcome(lambda: extract.extract(argv, backend=backend, stop=stop, workers=workers))


def main() -> None:
    # Before the imports, as in extractor.cli: on a busy machine another rank may be at work already.
    stop = StopSignals()
    from tests.support.faults import from_json

    argv = sys.argv[1:]
    faults: list[Fault] = []
    log: Path | None = None
    while argv and argv[0] in ("--faults", "--log"):
        flag, value, *argv = argv
        if flag == "--faults":
            faults = from_json(value)
        else:
            log = Path(value)
    sys.exit(run(argv, faults, log, stop))


if __name__ == "__main__":
    main()
