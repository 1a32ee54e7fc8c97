"""The program with marks around its passes: what a run's own numbers do not tell, a file a rank.

torchrun --nproc-per-node 2 -m benchmarks.timed --marks FOLDER FLAGS_OF_EXTRACT
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from extractor.cli import outcome
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import Engine, EngineInfo, EngineOptions
from extractor.engine.selfcheck import SelfCheck
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.ranks.signals import StopSignals
from extractor.records import Batch, CapturedBatch
from extractor.run import extract
from extractor.states import States


@dataclass(frozen=True)
class Marks:
    """Seconds of one rank's passes.

    Attributes:
        passes: how many.
        in_passes: from begin to end of each on the device's clock, gaps between its kernels included.
        launching: of the thread that launches them, on the wall's clock; it stands still in that
            when the device's queue is full.
        launching_cpu: of which it had a core.
    """

    rank: int
    passes: int
    in_passes: float
    launching: float
    launching_cpu: float


class TimedEngine:
    """An engine whose passes leave marks on the device's clock: how long it had work of ours."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._cuda = engine, device.type == "cuda"
        self._events: list[tuple[Any, Any]] = []
        self.launching = self.launching_cpu = 0.0

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def self_check(self) -> SelfCheck | None:
        return self._engine.self_check()

    def close(self) -> None:
        self._engine.close()

    def forward(self, batch: Batch) -> CapturedBatch:
        mark, cpu = time.perf_counter(), time.thread_time()
        begin = self._event()
        captured = self._engine.forward(batch)
        self._events.append((begin, self._event()))
        self.launching += time.perf_counter() - mark
        self.launching_cpu += time.thread_time() - cpu
        return captured

    def _event(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def busy(self) -> float:
        """Seconds between begin and end of passes on the device; on a CPU, within them."""
        if not self._cuda:
            return self.launching
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3

    def marks(self, rank: int) -> Marks:
        return Marks(
            rank=rank,
            passes=len(self._events),
            in_passes=round(self.busy(), 3),
            launching=round(self.launching, 3),
            launching_cpu=round(self.launching_cpu, 3),
        )


class TimedBackend:
    """SGLang, its engine timed. See Backend."""

    def __init__(self) -> None:
        self.engine: TimedEngine | None = None

    def choose_device(self, wanted: str, place: Place) -> torch.device:
        return engine_sglang.choose_device(wanted, place)

    def prepare_process(self, device: torch.device, place: Place, verbose: bool = False) -> None:
        engine_sglang.prepare_process(device, place, verbose)

    def import_modules(self, device: torch.device) -> None:
        engine_sglang.import_modules(device)

    def check_model(self, spec: ModelSpec, place: Place, sglang_args: Mapping[str, str]) -> None:
        engine_sglang.check_model(spec, place, sglang_args)

    def build(
        self, spec: ModelSpec, states: States, place: Place, options: EngineOptions
    ) -> Engine:
        engine = engine_sglang.build(spec, states, place, options)
        self.engine = TimedEngine(engine, options.device)
        return cast(Engine, self.engine)


def read_marks(folder: Path) -> list[Marks]:
    """What a run's ranks left, by rank."""
    found = [Marks(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda marks: marks.rank)


def main() -> None:
    flag, folder, *argv = sys.argv[1:]
    assert flag == "--marks", flag
    backend, stop = TimedBackend(), StopSignals()
    code = outcome(lambda: extract.extract(argv, backend=backend, stop=stop))
    if backend.engine is not None:
        marks = backend.engine.marks(int(os.environ.get("RANK", "0")))
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank-{marks.rank}.json").write_text(json.dumps(asdict(marks)))
    sys.exit(code)


if __name__ == "__main__":
    main()
