"""The benchmark of a machine's GPUs, on two CPU ranks and with the smallest settings."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launch import run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_gpus", "--device", "cpu"]
    command += ["--output", str(tmp_path / "out"), "--samples", "30"]
    result = run([*command, "--families", "tiny_qwen3"], timeout=1700)
    found = json.loads(result.lines[-1])
    parts = found["parts"]
    assert found["ok"] and result.code == 0, result.text[-5000:]
    assert {name: part["status"] for name, part in parts.items()} == {
        "startup": "ok",
        "states": "ok",
        "fused": "unavailable",  # and said so
        "share": "ok",
        "replicas": "ok",
        "kill": "ok",
    }
    rows = {name: {row["what"]: row["values"] for row in p["rows"]} for name, p in parts.items()}
    judged = rows["states"]["tiny_qwen3 TP 2"]
    assert judged["good"] == judged["judged"] > 0
    assert judged["states"] == 8  # six layers, the stream before them, final
    assert {"import", "prepare", "plan", "load", "self_check", "wall"} <= rows["startup"][
        "second start"
    ].keys()
    whole = rows["share"]["TP 2, tiny_qwen3.weights"]
    assert whole["share"] > 0 and whole["tp"] == 2
    assert rows["share"]["rank 1"]["for_writer"] >= 0
    two = rows["replicas"]["2 replicas of TP 1"]
    assert two["speedup"] >= 0 and len(two["together"]["rates"]) == 2
    assert sum(each["samples"] for each in two["replicas"]) == 60
    assert [each["passes"] > 0 and each["in_passes"] > 0 for each in two["ranks"]] == [True, True]
    assert rows["kill"]["rank 1 killed"]["left"] == 0
    assert 0 < rows["kill"]["the same command again"]["started_from"] < 30


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "states,nothing"], "--only nothing: one of startup, states"),
        (["--families", "tiny_bert"], "--families tiny_bert: one of tiny_llama"),
    ],
)
def test_names_it_does_not_know_are_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_gpus", "--output", str(tmp_path), *flags]
    result = run(command, timeout=120)
    assert result.code == 2 and said in result.text
