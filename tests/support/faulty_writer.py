"""Writer processes with faults in them.

usage: faulty_writer.py DESCRIPTOR PARENT FAULTS_AS_JSON LOG
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from extractor.write import child
from tests.support.faults import Fault, Faults, from_json, to_json

if TYPE_CHECKING:
    from extractor.write.writer import Workers


def workers(faults: Sequence[Fault], log: Path | None) -> "Workers":
    """Have a rank write through processes, as one with a GPU does, in which these faults happen."""
    from extractor.write.writer import Workers  # not in the processes, which start without PyTorch

    def command(descriptor: int, parent: int) -> list[str]:
        numbers = [str(descriptor), str(parent)]
        return [sys.executable, "-m", __name__, *numbers, to_json(faults), str(log or "")]

    return Workers(are_processes=lambda _: True, command=command)


def main() -> None:
    descriptor, parent, faults, log = sys.argv[1:]
    Faults(from_json(faults), Path(log) if log else None, parent=int(parent))
    child.main(int(descriptor), int(parent))


if __name__ == "__main__":
    main()
