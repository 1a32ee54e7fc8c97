"""The real program under the real torchrun, as a user starts it."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NOISE = re.compile(r"^(W\d{4}|\[W\d{4}|\*{5}|WARNING|.*Multi-thread loading)")


@dataclass(frozen=True)
class Result:
    """code is torchrun's own: 1 for any failure of a rank; worker_code is what the first rank that
    failed ended with, read from torchrun's report."""

    code: int
    text: str

    @property
    def worker_code(self) -> int:
        found = re.search(r"exitcode\s*:\s*(-?\d+)", self.text)
        return int(found.group(1)) if found else self.code

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if not NOISE.match(line)]

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.lines if line.startswith("extractor: ")]


def torchrun(ranks: int, *command: str, timeout: float = 400, **environment: str) -> Result:
    return run([*TORCHRUN, "--nproc-per-node", str(ranks), *command], timeout, **environment)


def run(command: list[str], timeout: float, **environment: str) -> Result:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout)


def extract(
    model: Path, data: Path, output: Path, *flags: str, ranks: int = 1, timeout: float = 400
) -> Result:
    """The main job on the CPU."""
    common = ("--model", str(model), "--data", str(data), "--output", str(output))
    return torchrun(ranks, "launch/extract.py", *common, "--device", "cpu", *flags, timeout=timeout)
