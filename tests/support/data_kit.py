"""Shared by the front end's tests: a tokenizer made here, rows, and ways to look at samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from extractor.rows.converter import Converter, Outcome
from extractor.rows.records import RawRow

DATA = Path(__file__).parents[1] / "data"
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


Make = Callable[..., Converter]


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


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": f"{name}:{number:03}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


RESULT = {"role": "tool", "content": "sun ny", "tool_call_id": "look:000"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}},
}
TOOL_TALK = [
    {"role": "user", "content": "Look!"},
    call("look", 1000, city='Pa"ris\n', n=2),
    RESULT,
    call("lookk", 100, n=3),
    RESULT,
    {"role": "assistant", "content": "Sunny."},
]
