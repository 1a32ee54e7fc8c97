"""A tokenizer made here, so that most tests of the front end need no model, and the models' folder
for those that do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from extractor.data.rows import Limits, RawRow
from extractor.data.sample import Converter, Outcome, Rules
from extractor.model import ModelSpec

DATA = Path(__file__).parents[2] / "data"
TEMPLATES = DATA / "templates"
CASES = DATA / "cases"

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<|im_user|>",
    "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]",
    "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>",
    "<|call|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|system|>",
)  # fmt: skip
BOS_EOS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma3": ("<bos>", "<end_of_turn>"),
    "mistral": ("<s>", "</s>"),
    "deepseek_v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "harmony": ("<|endoftext|>", "<|return|>"),
    "glm4": ("<|endoftext|>", "<|endoftext|>"),
}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
CORPUS = [
    "Hello there, how are you today?\n\nI am well, thank you.",
    "The quick brown fox jumps over the lazy dog.\n    def f(x):\n        return x + 1\n",
    "<think>\nLet me see.\n</think>\n\nassistant user system tool 12345 67890",
] * 4


@pytest.fixture(scope="session")
def models_dir(build_model: Callable[[str], Path]) -> Path:
    """The small models that the cases name."""
    names = ("smollm2", "tiny_qwen3", "think", "strict", "gentag", "bos", "left")
    return next(iter({build_model(name).parent for name in names}))


def train() -> Tokenizer:
    """Byte-level BPE of a few hundred tokens, with the special tokens of every template here. It
    merges spaces and newlines, so that tokens do straddle headers."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return made


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train()


Make = Callable[..., Converter]


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


def convert(converter: Converter, *records: Any) -> Outcome:
    """Records (or lines as bytes) as if they stood in rows.jsonl."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    return converter.convert([RawRow(n, "rows.jsonl", n + 1, x) for n, x in enumerate(lines)])


def chat(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def supervised(outcome: Outcome, tokenizer: Tokenizer, index: int = 0) -> list[str]:
    """The text of each run of supervised tokens."""
    assert not outcome.refusals, outcome.refusals
    piece = outcome.pieces[index]
    runs: list[list[int]] = []
    before = 0
    for token, mark in zip(piece.ids.tolist(), piece.mask.tolist(), strict=True):
        if mark and not before:
            runs.append([])
        if mark:
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def reasons(outcome: Outcome) -> list[str]:
    return [refusal.reason for refusal in outcome.refusals]


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
        vocab_size=2000,
        context_length=500,
        dtype="bfloat16",
        digest="toy",
    )
