"""Rows whose text was lost or invented, and masks that ended at the wrong token: golden ids under
templates with a tokenizer of their own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extractor.config import DataConfig
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.prepared.store import PreparedStore
from extractor.rows.prepare import prepare
from tests.support.data_kit import CASES, TEMPLATES

Make = Callable[[str], Path]
# (template, beginning, end, other special tokens, tokens that are added and not special)
TOKENIZERS: dict[str, tuple[Path, str, str, tuple[str, ...], tuple[str, ...]]] = {
    "t_harmony": (
        TEMPLATES / "harmony.jinja", "<|startoftext|>", "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"), (),
    ),
    "t_llama3": (
        TEMPLATES / "llama3.jinja", "<|begin_of_text|>", "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"), (),
    ),
    "t_qwen3": (TEMPLATES / "qwen3.jinja", "", "<|im_end|>", ("<|im_start|>",), ()),
    "t_phi4mini": (
        CASES / "56_end_then_eos/template.jinja", "", "<|endoftext|>",
        ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), (),
    ),
    "t_eotplain": (
        CASES / "63_eot_not_special/template.jinja", "", "<|endoftext|>", (),
        ("<|turn|>", "<|turn_end|>"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(
    build_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with SmolLM2's tokenizer, a template, and the tokens that the template prints."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizers")

    def make(name: str) -> Path:
        path = folder / name
        if path.exists():
            return path
        template, bos, eos, special, plain = TOKENIZERS[name]
        tokenizer: Any = AutoTokenizer.from_pretrained(build_model("smollm2"))
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
        tokens = [AddedToken(t, normalized=False, special=True) for t in (bos, eos, *special) if t]
        tokenizer.add_tokens(tokens, special_tokens=True)
        if bos:
            tokenizer.bos_token = bos
        tokenizer.eos_token = eos
        tokenizer.chat_template = template.read_text()
        tokenizer.save_pretrained(path)
        config = json.loads((build_model("tiny_qwen3") / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "vocab_size": 49152 + 256}))
        return path

    return make


def run(model: Path, data: Path, output: Path, **settings: Any) -> PreparedStore:
    config = DataConfig(
        model=str(model), data=(str(data),), output=output, **{"bad_rows": "skip", **settings}
    )
    return prepare(config, ModelSpec.read(config.model), lambda _: None)


def expected(case: str) -> dict[str, Any]:
    return json.loads((CASES / case / "expected.json").read_text())


def ids(store: PreparedStore) -> dict[str, list[int]]:
    samples = map(store.sample, range(len(store)))
    return {sample.id: sample.input_ids.tolist() for sample in samples}


def test_reasoning_under_any_name_is_printed(made: Make, tmp_path: Path) -> None:
    case = "52_last_turn_reasoning_dropped"
    store = run(made("t_harmony"), CASES / case / "input.jsonl", tmp_path / "out")
    golden = expected(case)["field_thinking"]["ids"]
    assert ids(store) == dict.fromkeys(
        ("field_thinking", "field_reasoning_content", "field_reasoning"), golden
    )


def test_reasoning_that_a_template_knows_no_name_for(made: Make, tmp_path: Path) -> None:
    file = CASES / "52_last_turn_reasoning_dropped/input.jsonl"
    with pytest.raises(
        UsageError, match="not one of 3 rows can be used: 3 not_rendered"
    ) as stopped:
        run(made("t_llama3"), file, tmp_path / "out")
    assert "id field_reasoning: not_rendered: the chat template drops reasoning" in str(
        stopped.value
    )


@pytest.mark.parametrize("name", ["input.jsonl", "input.parquet", "text.jsonl"])
def test_tools_have_no_keys_that_a_container_filled_in(
    name: str, made: Make, tmp_path: Path
) -> None:
    case = CASES / "54_parquet_tools_null_fill"
    file = case / name
    if name == "text.jsonl":  # what datasets writes of the Parquet file
        import pyarrow.parquet

        file = tmp_path / name
        rows = pyarrow.parquet.read_table(case / "input.parquet").to_pylist()
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "null" in file.read_text()
    golden = expected(case.name)
    store = run(made("t_qwen3"), file, tmp_path / "out")
    assert ids(store) == {name: golden[name]["ids"] for name in ("depth", "tide")}


def test_values_of_a_call_under_another_key(made: Make, tmp_path: Path) -> None:
    case = "55_tool_call_parameters_key"
    golden = expected(case)["arguments"]["ids"]
    store = run(made("t_qwen3"), CASES / case / "input.jsonl", tmp_path / "out")
    assert ids(store) == dict.fromkeys(("arguments", "parameters", "args", "input"), golden)
    store = run(made("t_llama3"), CASES / case / "input.jsonl", tmp_path / "llama")
    assert len(set(map(tuple, ids(store).values()))) == 1


def test_an_end_token_for_the_text_is_not_the_turns(made: Make, tmp_path: Path) -> None:
    case = "56_end_then_eos"
    store = run(made("t_phi4mini"), CASES / case / "input.jsonl", tmp_path / "out")
    golden = expected(case)["two"]
    assert store.sample(0).input_ids.tolist() == golden["ids"]
    assert store.sample(0).loss_mask.tolist() == golden["mask"]


def test_an_end_of_turn_that_is_no_special_token(made: Make, tmp_path: Path) -> None:
    case = "63_eot_not_special"
    store = run(made("t_eotplain"), CASES / case / "input.jsonl", tmp_path / "out")
    golden = expected(case)["two"]
    sample = store.sample(0)
    assert sample.input_ids.tolist() == golden["ids"]
    ends = [n for n, token in enumerate(golden["ids"]) if token == golden["end_token"]]
    assert [int(sample.loss_mask[n]) for n in ends] == [0, 1, 0, 1]
    assert int(sample.loss_mask[-1]) == 0


def test_an_end_of_turn_of_ordinary_tokens(made: Make, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(made("t_eotplain"), model)
    template = TOKENIZERS["t_eotplain"][0].read_text().replace("<|turn_end|>", " ENDS")
    (model / "chat_template.jinja").write_text(template)
    store = run(model, CASES / "63_eot_not_special/input.jsonl", tmp_path / "out")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    sample = store.sample(0)
    text = tokenizer.decode(sample.input_ids[sample.loss_mask.bool()])
    assert text == "Heron. ENDSStork. ENDS"
