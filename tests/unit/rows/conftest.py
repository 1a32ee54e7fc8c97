"""Fixtures of the front end's tests. Most need no model: their tokenizer is made here."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from extractor.model import ModelSpec
from extractor.rows import work
from extractor.rows.converter import Converter, Rules
from extractor.rows.records import Limits
from tests.support.data_kit import BOS_EOS, SPECIAL, TEMPLATES, Make, train


@pytest.fixture(scope="session", autouse=True)
def spare_workers() -> Iterator[None]:
    """A worker process takes a second to start: each test goes on with that of the one before."""
    work.KEEP_SPARE = True
    yield
    work.KEEP_SPARE = False
    while work.SPARE:
        work.SPARE.pop().close()


@pytest.fixture(scope="session")
def models_dir(build_model: Callable[[str], Path]) -> Path:
    """The small models that the cases name."""
    names = ("smollm2", "tiny_qwen3", "think", "strict", "gentag", "bos", "left")
    return next(iter({build_model(name).parent for name in names}))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train()


@pytest.fixture(scope="session")
def converter(tokenizer: Tokenizer) -> Make:
    """converter("qwen3", supervise="last", variables={"enable_thinking": False}, max_length=10)"""

    def make(name: str = "chatml", source: str | None = None, **settings: Any) -> Converter:
        bos, eos = BOS_EOS.get(name, ("<|endoftext|>", "<|im_end|>"))
        variables = {"bos_token": bos, "eos_token": eos, **settings.pop("variables", {})}
        limits: dict[str, Any] = {
            "vocab_size": 2000,
            "context_length": 100_000,
            "max_length": None,
            "overlong": "truncate",
            "min_length": 1,
            "min_supervised": 1,
        }
        limits.update({key: settings.pop(key) for key in list(settings) if key in limits})
        text = (TEMPLATES / f"{name}.jinja").read_text() if source is None else source
        rules: dict[str, Any] = {
            "tokenizer": tokenizer.to_str(),
            "tokenizer_path": "",
            "trust_remote_code": False,
            "templates": {"default": text},
            "variables": variables,
            "special_tokens": SPECIAL,
            "eos": eos,
            "supervise": "assistant",
            "turns": "whole",
            "limits": Limits(**limits),
            **settings,
        }
        return Converter(Rules(**rules))

    return make


@pytest.fixture(scope="session")
def toy_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model folder with all that the front end reads: a tokenizer and a template."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("toy")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    fast.save_pretrained(folder)
    return ModelSpec(
        path=folder,
        architecture="ToyForCausalLM",
        num_layers=4,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=2,
        kv_bytes_per_token=64,
        weight_bytes=0,
        vocab_size=2000,
        context_length=500,
        dtype="bfloat16",
        digest="toy",
    )
