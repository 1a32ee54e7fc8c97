"""docs/examples/train_drafter.py on SmolLM2's states: the loss falls."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import build, cache_folder

ROOT = Path(__file__).resolve().parents[2]


def conversations(path: Path, words: int = 60) -> None:
    text = (ROOT / "tests" / "support" / "prose.txt").read_text().split()
    with path.open("w") as handle:
        for begin in range(0, len(text) - words, 25):
            part = text[begin : begin + words]
            messages = [
                {"role": "user", "content": "Go on: " + " ".join(part[:12])},
                {"role": "assistant", "content": " ".join(part[12:])},
            ]
            handle.write(json.dumps({"id": f"p{begin}", "messages": messages}) + "\n")


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path):
    rows, output = tmp_path / "rows.jsonl", str(tmp_path / "out")
    conversations(rows)
    model = str(build("smollm2", cache_folder()))
    flags = ["--model", model, "--data", str(rows), "--output", output, "--device", "cpu"]
    run("launch/extract.py", *flags)
    shown = run("docs/examples/train_drafter.py", output, "--cpu", "--steps", "25")
    losses = json.loads(shown.splitlines()[-1])
    assert losses["last"] < 0.6 * losses["first"], shown
