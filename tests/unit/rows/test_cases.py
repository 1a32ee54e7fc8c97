"""Rows that other tools were reported to get wrong, with golden ids and masks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from extractor.config import DataConfig
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.prepared.store import PreparedStore
from extractor.rows.prepare import prepare
from tests.support.data_kit import CASES

TABLE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("01_tf5_batchencoding", "tiny_qwen3", "expected.json", {}),
    ("06_think_history_stripped", "think", "expected.json", {}),
    ("08_stock_template_no_generation_tag", "tiny_qwen3", "expected.json", {}),
    ("12_empty_or_assistant_first", "tiny_qwen3", "expected.json", {}),
    ("13_non_alternating_strict_template", "strict", "expected.json", {}),
    ("13_non_alternating_strict_template", "tiny_qwen3", "expected_lenient.json", {}),
    ("14_tool_calls", "think", "expected.json", {}),
    ("16_sharegpt_vs_messages", "tiny_qwen3", "expected.json", {}),
    ("17_truncation", "tiny_qwen3", "expected.json", {"max_length": 48}),
    ("17_truncation", "left", "expected.json", {"max_length": 48}),
    ("18_longer_than_context", "tiny_qwen3", "expected.json", {}),
    ("21_pretokenized_bad_rows", "tiny_qwen3", "expected.json", {}),
    ("23_jsonl_bom", "tiny_qwen3", "expected.json", {}),
    ("24_jsonl_broken_lines", "tiny_qwen3", "expected.json", {}),
    ("37_double_bos", "bos", "expected.json", {}),
    ("41_other_containers", "tiny_qwen3", "expected.json", {}),
]


def run(data: Path, models: Path, model: str, output: Path, **settings: Any) -> PreparedStore:
    config = DataConfig(
        model=str(models / model), data=(str(data),), output=output,
        **{"bad_rows": "skip", **settings},
    )  # fmt: skip
    return prepare(config, ModelSpec.read(config.model), lambda _: None)


def check(store: PreparedStore, expected: dict[str, Any], lines: list[str]) -> None:
    samples = [store.sample(index) for index in range(len(store))]
    for sample in samples:
        want = expected[sample.id]
        assert want["status"] != "skip", sample
        if "input_ids" in want:
            assert sample.input_ids.tolist() == want["input_ids"]
            mask = sample.loss_mask.tolist()
            assert [i for i in want["must_one"] if not mask[i]] == []
            assert [i for i in want["must_zero"] if mask[i]] == []
    written = [sample.id for sample in samples]
    assert len(set(written)) == len(written)
    assert {k for k, want in expected.items() if want["status"] == "ok"} <= set(written)
    # Every row is accounted for: written, or rejected under its own number.
    rejected = {reject.row for reject in store.rejects}
    assert {sample.row for sample in samples} | rejected == set(range(len(lines)))
    assert store.summary()["rows"] == len(lines)


@pytest.mark.parametrize(("case", "model", "golden", "settings"), TABLE)
def test_golden(
    case: str, model: str, golden: str, settings: dict[str, Any], models_dir: Path, tmp_path: Path
) -> None:
    expected = json.loads((CASES / case / golden).read_text())
    file = CASES / case / "input.jsonl"
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    check(run(file, models_dir, model, tmp_path / "out", **settings), expected, lines)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["input.json", "input.jsonl.gz", "shards"])
def test_other_containers_hold_the_same_rows(name: str, models_dir: Path, tmp_path: Path) -> None:
    folder = CASES / "41_other_containers"
    expected = json.loads((folder / "expected.json").read_text())
    store = run(folder / name, models_dir, "tiny_qwen3", tmp_path / "out", bad_rows="fail")
    check(store, expected, ["", "", ""])


def test_tool_calls_that_a_template_ignores(models_dir: Path, tmp_path: Path) -> None:
    file = CASES / "14_tool_calls" / "input.jsonl"
    with pytest.raises(UsageError, match="4 tool_calls_not_rendered, 1 bad_tool_calls"):
        run(file, models_dir, "tiny_qwen3", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_double_bos(models_dir: Path, tmp_path: Path) -> None:
    file = CASES / "37_double_bos" / "input.jsonl"
    store = run(file, models_dir, "bos", tmp_path / "out")
    assert store.sample(0).input_ids.tolist().count(0) == 1


@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        ("23_jsonl_bom", "input_utf16.jsonl", "input_utf16.jsonl: not UTF-8 .*UTF-16"),
        ("41_other_containers", "empty.jsonl", "empty.jsonl: the file is empty"),
        ("41_other_containers", "missing.jsonl", "missing.jsonl: no such file"),
    ],
)
def test_refused_by_name(
    case: str, name: str, message: str, models_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        run(CASES / case / name, models_dir, "tiny_qwen3", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bad_rows_stop_the_run_and_are_named(models_dir: Path, tmp_path: Path) -> None:
    file = CASES / "24_jsonl_broken_lines" / "input.jsonl"
    with pytest.raises(UsageError) as stopped:
        run(file, models_dir, "tiny_qwen3", tmp_path / "out", bad_rows="fail")
    for line in (2, 4, 5, 8):
        assert f"input.jsonl:{line}: " in str(stopped.value)
    assert not list(tmp_path.iterdir())


def test_each_turn_as_it_was_generated(models_dir: Path, tmp_path: Path) -> None:
    file = CASES / "06_think_history_stripped" / "input.jsonl"
    store = run(file, models_dir, "think", tmp_path / "out", turns="each")
    assert store.turns.tolist() == [1, 2]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models_dir / "think")
    texts = []
    for index in range(2):
        sample = store.sample(index)
        texts.append(tokenizer.decode(sample.input_ids[sample.loss_mask.bool()]))
    assert texts == [
        "<think>\nseven is nice\n</think>\n\nSeven.<|im_end|>",
        "<think>\n7*2=14\n</think>\n\nFourteen.<|im_end|>",
    ]


def test_generation_blocks_are_transformers_own(models_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = CASES / "01_tf5_batchencoding" / "input.jsonl"
    store = run(file, models_dir, "gentag", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(models_dir / "gentag")
    for index, line in enumerate(file.read_text().splitlines()):
        want = tokenizer.apply_chat_template(
            json.loads(line)["conversations"], return_dict=True, return_assistant_tokens_mask=True
        )
        sample = store.sample(index)
        assert sample.input_ids.tolist() == want["input_ids"]
        assert sample.loss_mask.tolist() == want["assistant_masks"]


def test_context_and_max_length(models_dir: Path, tmp_path: Path) -> None:
    file = CASES / "18_longer_than_context" / "input.jsonl"
    with pytest.raises(UsageError, match=r"id huge: longer_than_context: 5036 tokens.* 4096"):
        run(file, models_dir, "tiny_qwen3", tmp_path / "out", bad_rows="fail")
    store = run(file, models_dir, "tiny_qwen3", tmp_path / "a", max_length=4096, bad_rows="fail")
    assert store.lengths.tolist() == [34, 4096, 34]
    assert store.summary()["truncated"] == 1
    store = run(
        file, models_dir, "tiny_qwen3", tmp_path / "b", max_length=4096, overlong="skip",
        bad_rows="fail",
    )  # fmt: skip
    assert store.rows.tolist() == [0, 2]
    with pytest.raises(UsageError, match="--max-length 4097: the model's context is 4096"):
        run(file, models_dir, "tiny_qwen3", tmp_path / "c", max_length=4097)


def test_a_store_is_found_again_and_a_moved_file_changes_nothing(
    models_dir: Path, tmp_path: Path
) -> None:
    case = CASES / "01_tf5_batchencoding" / "input.jsonl"
    first = run(case, models_dir, "tiny_qwen3", tmp_path / "out")
    copy = shutil.copy(case, tmp_path / "elsewhere.jsonl")
    again = run(Path(copy), models_dir, "tiny_qwen3", tmp_path / "out")
    assert (again.path, again.digest) == (first.path, first.digest)
    other = run(case, models_dir, "tiny_qwen3", tmp_path / "out", supervise="last")
    assert other.digest != first.digest
    assert {k for k in first.parts if first.parts[k] != other.parts[k]} == {"supervise"}
