"""--dry-run against what the run then does."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from extractor.config import ExtractConfig, parse
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.plan.budget import WRITER_BYTES
from extractor.plan.dry_run import dry_run, make_estimate, table, weight_bytes
from extractor.progress import duration, size
from tests.integration.conftest import Bench
from tests.support.fake_engine import HIDDEN
from tests.support.launch import ROOT
from tests.support.models import build, cache_folder

CASES = ROOT / "tests/data/cases"


def config(bench: Bench, *flags: str) -> ExtractConfig:
    parsed = parse(ExtractConfig, bench.argv("--dry-run", "--device=cpu", *flags), "extract")
    parsed.check()
    return parsed


def used(output: Path, names: str) -> int:
    """What the system says the files take."""
    files = [path for path in output.rglob(names) if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.parametrize(
    "layout, names",
    [
        ("native", "0*.safetensors"),
        ("specforge", "*.ckpt"),
        ("speculators", "hs_*"),
        ("modelopt", "*.pt"),
    ],
)
def test_within_five_percent_of_the_truth(bench: Bench, layout: str, names: str):
    estimate = make_estimate(config(bench, f"--layout={layout}"))
    run = bench.run(f"--layout={layout}")
    assert run.code == 0, run.output()
    lines = (bench.output / "journal" / "0000.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert estimate.left_tokens == sum(entry["tokens"] for entry in entries)
    assert estimate.left_samples == len(entries) == 40
    taken = used(bench.output, names) + used(bench.output / "vocab", "*")
    assert abs(estimate.disk / taken - 1) < 0.05
    assert f"{estimate.batches} batches of at most 256 tokens" in run.output(0)
    after = make_estimate(config(bench, f"--layout={layout}"))
    assert (after.left_samples, after.left_tokens, after.disk) == (0, 0, 0)


@pytest.mark.parametrize("layout", ["native", "specforge", "speculators"])
def test_the_draft_vocabulary_is_counted(bench: Bench, layout: str):
    flags = (f"--layout={layout}", "--draft-vocab-size=40000")
    plain, more = make_estimate(config(bench, flags[0])), make_estimate(config(bench, *flags))
    assert bench.run(*flags).code == 0
    names = ("vocab/*", "token_freq.pt", "*.npy")
    beside = sum(used(bench.output, name) for name in names) - 50_000 * 8
    assert beside > 40_000 * 8
    assert abs((more.disk - plain.disk) / beside - 1) < 0.05


def test_every_layout_is_compared(bench: Bench):
    estimate = make_estimate(config(bench))
    assert estimate.choices["native bfloat16"] == estimate.disk
    assert "speculators float8_e4m3fn" in estimate.choices
    assert "modelopt float8_e4m3fn" not in estimate.choices


def test_it_reads_at_a_glance_and_as_json(bench: Bench, capsys: pytest.CaptureFixture[str]):
    assert dry_run(config(bench, "--tokens-per-second=10")) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "<- this run" in text and "at the rate given" in text
    assert dry_run(config(bench, "--json")) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["samples"] == 40 and values["problems"] == []
    assert not (bench.output / "samples").exists()


def test_case_50(build_model: Callable[[str], Path], tmp_path: Path):
    """A published multimodal config with five fields of its language model, and no weights."""
    model, case = tmp_path / "model", CASES / "50_gemma3_text_config_defaults"
    model.mkdir()
    files = build_model("smollm2").iterdir()
    for file in (each for each in files if "token" in each.name or each.suffix == ".jinja"):
        shutil.copy(file, model)
    shutil.copy(case / "config.json", model)
    argv = ["--device=cpu", "--dry-run", f"--model={model}", f"--data={case / 'input.jsonl'}"]
    estimate = make_estimate(
        parse(ExtractConfig, [*argv, f"--output={tmp_path / 'out'}"], "extract")
    )
    assert estimate.rejected == 0 and estimate.samples > 0
    assert "34 layers of 2,560" in estimate.model
    assert 3e9 * 2 < estimate.device.weights < 5e9 * 2  # of four thousand million parameters


def test_too_little_room_is_an_exit_code(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("extractor.plan.dry_run.free_bytes", lambda _: 1000)
    assert dry_run(config(bench)) == 1
    assert "WILL NOT FIT: the disk lacks" in table(make_estimate(config(bench)))


def test_too_little_host_memory_is_one_too(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    need = make_estimate(config(bench)).host
    for free, code in ((need, 0), (need - 1, 1)):
        monkeypatch.setattr("extractor.plan.budget.available_host_bytes", lambda free=free: free)
        assert dry_run(config(bench)) == code
    text = table(make_estimate(config(bench)))
    assert "WILL NOT FIT: host memory lacks 1 B: use a smaller --host-memory" in text
    assert f"{size(need)} of {size(need - 1)} free" in text


def test_every_writer_of_the_machine_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    alone = make_estimate(config(bench, "--tp=1"))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    three = make_estimate(config(bench, "--tp=1"))
    each = 4 * 256 * (len(alone.stored) * HIDDEN * 2) + WRITER_BYTES  # four batches
    assert (alone.writers, three.writers) == (1, 3)
    assert three.host - alone.host == 2 * each
    assert ", 3 writers" in table(three)


def test_other_ranks_are_quiet(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert dry_run(config(bench)) == 0
    assert not bench.output.exists()


def test_its_flags_go_with_it(bench: Bench):
    for flag in ("--json", "--tokens-per-second=3"):
        with pytest.raises(UsageError, match="go with --dry-run"):
            parse(ExtractConfig, bench.argv(flag), "extract").check()


@pytest.mark.slow
def test_weights_are_counted_without_loading_them(bench: Bench):
    spec = ModelSpec.read(str(build("smollm2", cache_folder())))
    assert abs(weight_bytes(config(bench), spec) / spec.weight_bytes - 1) < 0.01


def test_words():
    assert size(1536) == "1.50 KiB" and size(12) == "12 B"
    assert duration(59.2) == "1 min 00 s" and duration(7300) == "2 h 01 min"
