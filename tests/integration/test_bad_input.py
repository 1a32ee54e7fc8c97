"""What cannot run: one clear line, exit code 2, before weights load, and nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch import extract

Build = Callable[[str], Path]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    row = {"id": "a", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    path.write_text(json.dumps(row) + "\n")
    return path


CASES = [
    (("--layers", "1,99"), "layer 99 is past the end: this model's layers are 0 to 5"),
    (("--layers", "1,2", "--tp", "3"), "--tp 3 does not divide the world of 1 ranks"),
    (("--layers", "1,2", "--batch-tokens", "900000000"), "too little"),
    (("--layers", "1,2", "--sglang", "memfraction=1"), "no such field of SGLang's ServerArgs"),
]
# These are refused in the same place as the first one, which tests/unit has every case of.
SLOW_CASES = [
    (("--layers", "1,2,2"), "2 appears twice"),
    (("--layers", "eagle3"), "2 appears twice"),
    (("--layers", "1,banana"), "'banana' is neither a layer number nor embed or final"),
    (("--layers", "1,2", "--shard", "4/4"), "wanted I/N with 0 <= I < N"),
]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        *(pytest.param(*case, id=" ".join(case[0])) for case in CASES),
        *(pytest.param(*c, id=" ".join(c[0]), marks=pytest.mark.slow) for c in SLOW_CASES),
    ],
)
def test_refused(
    build_model: Build, data: Path, tmp_path: Path, flags: tuple[str, ...], wanted: str
) -> None:
    output = tmp_path / "out"
    result = extract(build_model("tiny_qwen3"), data, output, *flags)
    assert result.worker_code == 2, result.text
    assert len(result.complaints) == 1, result.text
    assert wanted in result.complaints[0]
    assert not (output / "samples").exists()
    assert not (output / "run.json").exists()


def test_heads_that_tp_does_not_divide(build_model: Build, data: Path, tmp_path: Path) -> None:
    flags = ("--layers", "1,2")
    result = extract(build_model("tiny_qwen3"), data, tmp_path / "out", *flags, ranks=3)
    assert result.worker_code == 2, result.text
    assert result.complaints == [
        "extractor: tensor parallelism of 3 does not divide the model's 8 attention heads: "
        "choose --tp among the divisors of 8"
    ]
    assert not (tmp_path / "out").exists()


def test_model_without_marks(build_model: Build, data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(build_model("tiny_qwen3"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    result = extract(model, data, tmp_path / "out", "--layers", "1,2")
    assert result.worker_code == 2, result.text
    assert "GPT2LMHeadModel has no capture marks" in result.complaints[0]
    assert "LlamaForCausalLM" in result.complaints[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows(build_model: Build, tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    flags = ("--layers", "1,2")
    result = extract(build_model("tiny_qwen3"), tmp_path / "rows.jsonl", tmp_path / "out", *flags)
    assert result.worker_code == 2, result.text
    assert len(result.complaints) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_foreign_folder_and_file(build_model: Build, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("mine")
    result = extract(build_model("tiny_qwen3"), data, output, "--layers", "1,2")
    assert result.worker_code == 2, result.text
    assert "'thesis.tex'" in result.complaints[0]
    assert [path.name for path in output.iterdir()] == ["thesis.tex"]
    result = extract(build_model("tiny_qwen3"), data, data, "--layers", "1,2")
    assert result.worker_code == 2
    assert "is a file" in result.complaints[0]
