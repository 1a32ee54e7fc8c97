"""Fixtures of whole runs with the fake engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_engine import make_model, make_rows
from tests.support.faults import Fault
from tests.support.zygote import Run, Zygote

STATES = ["1", "2", "4", "final"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@dataclass(slots=True)
class Bench:
    """A model, rows and an output folder, and the way to run them."""

    zygote: Zygote
    folder: Path
    data: Path
    model: Path
    output: Path

    def rows(self, count: int) -> None:
        make_rows(self.data, count)

    def argv(self, *flags: str) -> list[str]:
        return [
            f"--model={self.model}",
            f"--data={self.data}",
            f"--output={self.output}",
            "--layers=1,2,4",
            "--batch-tokens=256",
            *flags,
        ]

    def start(
        self,
        *flags: str,
        ranks: int = 1,
        faults: Sequence[Fault] = (),
        max_restarts: int = 0,
        nodes: int = 1,
    ) -> Run:
        return self.zygote.start(
            self.argv(*flags),
            self.folder / "runs",
            ranks=ranks,
            faults=faults,
            max_restarts=max_restarts,
            nodes=nodes,
        )

    def run(self, *flags: str, ranks: int = 1, faults: Sequence[Fault] = ()) -> Run:
        run = self.start(*flags, ranks=ranks, faults=faults)
        run.wait()
        return run


@pytest.fixture
def bench(zygote: Zygote, tmp_path: Path) -> Bench:
    bench = Bench(
        zygote,
        tmp_path,
        tmp_path / "rows.jsonl",
        make_model(tmp_path / "model"),
        tmp_path / "out",
    )
    bench.rows(40)
    return bench
