"""Inputs that broke others, through the real program, real torchrun, real files."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.launch import ROOT, TORCHRUN, extract
from tests.support.reference import Reference

CASES = ROOT / "tests/data/cases"
Build = Callable[[str], Path]


def files(output: Path) -> list[Path]:
    return sorted((output / "samples").rglob("*.safetensors"))


def by_id(output: Path) -> dict[str, dict[str, torch.Tensor]]:
    loaded: dict[str, dict[str, torch.Tensor]] = {}
    for path in files(output):
        with safe_open(path, "pt") as handle:
            name = handle.metadata()["id"]
        assert name not in loaded, f"{name} was written twice"
        loaded[name] = load_file(path)
    return loaded


def judge_folder(model: Path, output: Path) -> int:
    reference = Reference(model)
    count = 0
    for name, tensors in by_id(output).items():
        states = {
            key.removeprefix("hidden_states."): value
            for key, value in tensors.items()
            if key.startswith("hidden_states.")
        }
        for judgement in reference.judge(tensors["input_ids"], states):
            assert judgement.good, (name, judgement)
            count += 1
    return count


@pytest.fixture(scope="module")
def mixed(build_model: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen rows with shared prefixes and twins, all in one batch."""
    output = tmp_path_factory.mktemp("mixed") / "out"
    data = CASES / "19_batch_mix_shared_prefix/input.jsonl"
    result = extract(build_model("tiny_qwen3"), data, output, "--layers", "4,1,5,embed")
    assert result.code == 0, result.text
    return output


def test_shared_prefixes_and_twins(mixed: Path, build_model: Build) -> None:
    assert judge_folder(build_model("tiny_qwen3"), mixed) == 13 * 5
    expected = json.loads((CASES / "19_batch_mix_shared_prefix/expected.json").read_text())
    loaded = by_id(mixed)
    assert set(loaded) == set(expected)
    for name, golden in expected.items():
        mask = loaded[name]["loss_mask"].tolist()
        assert loaded[name]["input_ids"].tolist() == golden["input_ids"]
        assert all(mask[i] for i in golden["must_one"])
        assert not any(mask[i] for i in golden["must_zero"])


def test_run_json_and_journal(mixed: Path) -> None:
    run = json.loads((mixed / "run.json").read_text())
    assert run["status"] == "complete"
    assert run["layers"] == ["4", "1", "5", "embed", "final"]
    assert run["counts"]["written"] == 13
    lines = [json.loads(x) for x in (mixed / "journal/0000.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == list(range(13))
    for line in lines:
        path = mixed / f"samples/00000/{line['row']:09d}.safetensors"
        assert path.stat().st_size == line["bytes"]
    assert (mixed / "rejects.jsonl").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one_by_one", "reversed"])
def test_batch_mates_do_not_matter(
    mixed: Path, build_model: Build, tmp_path: Path, how: str
) -> None:
    lines = (CASES / "19_batch_mix_shared_prefix/input.jsonl").read_text().splitlines()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(lines if how == "one_by_one" else lines[::-1]) + "\n")
    budget = "1" if how == "one_by_one" else "256"
    flags = ("--layers", "4,1,5,embed", "--batch-tokens", budget)
    result = extract(build_model("tiny_qwen3"), data, tmp_path / "out", *flags)
    assert result.code == 0, result.text
    alone, together = by_id(tmp_path / "out"), by_id(mixed)
    assert set(alone) == set(together)
    for name, tensors in together.items():
        for key, value in tensors.items():
            other = alone[name][key]
            assert value.shape == other.shape
            if value.dtype == torch.bfloat16:
                error = (value.float() - other.float()).norm() / value.float().norm()
                assert error < 0.01, (name, key, float(error))
            else:
                assert torch.equal(value, other), (name, key)


def test_nothing_left_ends_at_once(mixed: Path, build_model: Build) -> None:
    before = {path: path.stat().st_mtime_ns for path in files(mixed)}
    data = CASES / "19_batch_mix_shared_prefix/input.jsonl"
    for ranks in (1, 2):
        result = extract(
            build_model("tiny_qwen3"), data, mixed, "--layers", "4,1,5,embed", ranks=ranks
        )
        assert result.code == 0, result.text
        assert "13 done, 0 to do" in result.text
        assert "loading" not in result.text.lower()
    assert {path: path.stat().st_mtime_ns for path in files(mixed)} == before


def test_other_settings_are_refused_by_name(
    mixed: Path, build_model: Build, tmp_path: Path
) -> None:
    model = build_model("tiny_qwen3")
    data = CASES / "19_batch_mix_shared_prefix/input.jsonl"
    result = extract(model, data, mixed, "--layers", "1,2")
    assert result.worker_code == 2
    assert "layers: 4,1,5,embed,final then, 1,2,final now" in result.complaints[0]
    shorter = tmp_path / "rows.jsonl"
    shorter.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    result = extract(model, shorter, mixed, "--layers", "4,1,5,embed")
    assert result.worker_code == 2
    assert "input rows" in result.complaints[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_qwen3moe", "tiny_dsv3"])
def test_tensor_parallel_folders_are_alike(build_model: Build, tmp_path: Path, name: str) -> None:
    data = CASES / "39_tp_equal/input.jsonl"
    outputs = []
    for ranks in (1, 2):
        outputs.append(tmp_path / f"tp{ranks}")
        result = extract(build_model(name), data, outputs[-1], "--layers", "1,2,4", ranks=ranks)
        assert result.code == 0, result.text
    one, two = map(by_id, outputs)
    assert set(one) == set(two)
    for sample, tensors in one.items():
        for key, value in tensors.items():
            assert value.shape == two[sample][key].shape
            if key.startswith("hidden_states"):
                difference = value.float() - two[sample][key].float()
                assert difference.norm() / value.float().norm() < 0.02, (sample, key)


@pytest.mark.slow
def test_kill_9_and_the_same_command(build_model: Build, tmp_path: Path) -> None:
    """Real engine, killed as soon as some files are there; the rest comes with the next start."""
    data, output = tmp_path / "rows.jsonl", tmp_path / "out"
    with data.open("w") as out:
        for n in range(200):
            ids = [(n * 7 + i) % 40_000 + 300 for i in range(40 + n % 30)]
            out.write(
                json.dumps({"id": f"k{n}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n"
            )
    model = build_model("tiny_qwen3")
    flags = ["--layers", "1,2,4", "--batch-tokens", "64", "--device", "cpu"]
    command = [*TORCHRUN, "--nproc-per-node", "1", "launch/extract.py", "--model", str(model)]
    command += ["--data", str(data), "--output", str(output), *flags]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(files(output)) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in files(output)}
    assert 10 <= len(kept) < 200, len(kept)
    for path in kept:
        load_file(path)  # none is torn
    journalled = (output / "journal/0000.jsonl").read_text().splitlines()
    result = extract(model, data, output, *flags)
    assert result.code == 0, result.text
    after = by_id(output)
    assert len(after) == 200
    rows = {json.loads(line)["row"] for line in journalled if line.endswith("}")}
    for path, stamp in kept.items():
        if int(path.stem) in rows:
            assert path.stat().st_mtime_ns == stamp, f"{path.name} was finished and written again"


@pytest.mark.slow
def test_two_jobs_at_once_on_one_host(build_model: Build, tmp_path: Path) -> None:
    data = CASES / "31_ports/input.jsonl"
    model = build_model("tiny_qwen3")
    jobs = []
    for name in ("a", "b"):
        command = [*TORCHRUN, "--nproc-per-node", "2", "launch/extract.py", "--model", str(model)]
        command += ["--data", str(data), "--output", str(tmp_path / name), "--layers", "1,2,4"]
        environment = {
            **os.environ,
            # torchrun's own variables win over Slurm's.
            "SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        jobs.append(
            subprocess.Popen(
                [*command, "--device", "cpu"],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    for job in jobs:
        text, _ = job.communicate(timeout=500)
        assert job.returncode == 0, text
    for name in ("a", "b"):
        assert len(files(tmp_path / name)) == 12
