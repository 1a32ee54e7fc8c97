"""What nvidia-smi says of the GPUs while something runs: a witness that does not ask the program."""

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = "uuid,utilization.gpu,clocks.sm,power.draw"


@dataclass(frozen=True)
class Sample:
    """One GPU at one moment.

    Attributes:
        at: time.time().
        busy: percent of the last moment (nvidia-smi's own, up to a second) in which a kernel ran.
        mhz, watts: of its multiprocessors, and in all.
    """

    at: float
    uuid: str
    busy: float
    mhz: float
    watts: float


@dataclass(frozen=True)
class Mean:
    """One GPU over a while."""

    uuid: str
    samples: int
    busy: float
    mhz: float
    watts: float


class GpuWatch:
    """Asks once a second, in a thread, from entering to leaving; sees nothing where there is no
    nvidia-smi."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> "GpuWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        while not self._over.is_set():
            try:
                done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
            except (OSError, subprocess.SubprocessError):
                return
            self.samples += parse(done.stdout, time.time())
            self._over.wait(self._seconds)


def parse(text: str, at: float) -> list[Sample]:
    """Lines of nvidia-smi; those of a GPU that does not tell are left out."""
    samples: list[Sample] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            uuid, busy, mhz, watts = line.split(", ")
            samples.append(Sample(at, uuid, float(busy), float(mhz), float(watts)))
    return samples


def means(samples: Sequence[Sample], begin: float, end: float) -> list[Mean]:
    """Of each GPU, from begin to end of time.time()."""
    by_gpu: dict[str, list[Sample]] = {}
    for sample in samples:
        if begin <= sample.at <= end:
            by_gpu.setdefault(sample.uuid, []).append(sample)
    return [
        Mean(
            uuid=uuid,
            samples=len(some),
            busy=round(statistics.mean(sample.busy for sample in some), 1),
            mhz=round(statistics.mean(sample.mhz for sample in some)),
            watts=round(statistics.mean(sample.watts for sample in some)),
        )
        for uuid, some in by_gpu.items()
    ]
