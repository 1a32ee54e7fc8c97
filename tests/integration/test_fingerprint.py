"""One folder, one model: what can change a stored number is named when it changes, and nothing else
stops a run from going on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.launch import ROOT, extract
from tests.support.ledger import Injection, Ledger

CASE = ROOT / "tests/data/cases/62_resume_other_engine_args/input.jsonl"
YARN = '{"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":512}}'


def lose_one(output: Path) -> None:
    min(folder.samples(output).values()).unlink()


def run_json(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())


def make_old(output: Path, *dropped: str) -> None:
    """run.json as it was written when the engine's settings were no parts of the fingerprint."""
    run = run_json(output)
    names = ("computed in", "sglang ", *dropped)
    run["parts"] = {k: v for k, v in run["parts"].items() if not k.startswith(names)}
    (output / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("load_format=dummy", "sglang load_format: absent then, dummy now"),
        ("quantization=fp8", "sglang quantization: absent then, fp8 now"),
        ("kv-cache-dtype=fp8_e4m3", "sglang kv_cache_dtype: absent then, fp8_e4m3 now"),
        ("dtype=half", "sglang dtype: absent then, float16 now"),
        (f"json_model_override_args={YARN}", "sglang json_model_override_args: absent then, {"),
    ],
)
def test_a_field_that_came_is_named(bench: Bench, flag: str, said: str, ledger: Ledger) -> None:
    """Case 62 (b): with a sample lost, the rest would be another model's."""
    assert bench.run().code == 0
    lose_one(bench.output)
    before = folder.snapshot(bench.output)
    run = bench.run(f"--sglang={flag}")
    assert run.code == 1 and said in run.output(0), run.output()
    assert folder.snapshot(bench.output) == before
    ledger.add(Injection(group="one folder", fault=f"another {said.split(':')[0]}"))


def test_a_field_that_went_is_named_though_nothing_is_left(bench: Bench) -> None:
    """Case 62 (a): the real command after a rehearsal is not told that all is done."""
    assert bench.run("--sglang=load_format=dummy").code == 0
    run = bench.run()
    assert run.code == 1, run.output()
    assert "sglang load_format: dummy then, absent now" in run.output(0)


def test_harmless_fields_defaults_and_spellings_go_on(bench: Bench) -> None:
    given = ("--sglang=enable_fp32_lm_head=true", f"--sglang=json_model_override_args={YARN}")
    assert bench.run(*given).code == 0
    again = (
        "--sglang=enable-fp32-lm-head=1",
        f"--sglang=json_model_override_args={json.dumps(json.loads(YARN), indent=1)}",
        "--sglang=mem_fraction_static=0.7",
        "--sglang=load_format=auto",
        "--sglang=dtype=auto",
    )
    lose_one(bench.output)
    run = bench.run(*again)
    assert run.code == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)


def test_another_computing_dtype_is_another_run(bench: Bench) -> None:
    """As when a folder of a CPU that computes in float32 goes on on a GPU."""
    assert bench.run().code == 0
    run = run_json(bench.output)
    here = run["parts"]["computed in"]
    run["parts"]["computed in"] = "float64"
    (bench.output / "run.json").write_text(json.dumps(run))
    again = bench.run()
    assert again.code == 1 and f"computed in: float64 then, {here} now" in again.output(0)


def test_a_folder_of_before_goes_on(bench: Bench) -> None:
    assert bench.run().code == 0
    make_old(bench.output)
    lose_one(bench.output)
    run = bench.run()
    assert run.code == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    assert "computed in" in run_json(bench.output)["parts"]


def test_a_folder_of_before_remembers_its_fields(bench: Bench) -> None:
    assert bench.run("--sglang=load_format=dummy", "--sglang=log_level=info").code == 0
    make_old(bench.output)
    run = bench.run()
    assert run.code == 1, run.output()
    assert "sglang load_format: dummy then, absent now" in run.output(0)
    assert "log_level" not in run.output(0)
    assert bench.run("--sglang=load_format=dummy").code == 0


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_quantization_file_is_in(bench: Bench, name: str) -> None:
    assert bench.run().code == 0
    (bench.model / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    run = bench.run()
    assert run.code == 1 and "quantization files: absent then, " in run.output(0), run.output()


def test_dummy_weights_then_real_ones(build_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Case 62 (a), with the real program; and what it computed in is what was foretold."""
    model, output = build_model("tiny_qwen3"), tmp_path / "out"
    flags = ("--layers", "1,3")
    first = extract(model, CASE, output, *flags, "--sglang", "load_format=dummy", "--no-self-check")
    assert first.code == 0, first.text
    run = run_json(output)
    assert run["parts"]["computed in"] == run["engine"]["compute_dtype"]
    second = extract(model, CASE, output, *flags)
    assert second.worker_code == 2, second.text
    assert "sglang load_format: dummy then, absent now" in second.complaints[0]
