"""Mutated rows: no crash, and every row is written or named."""

import json
import random
from typing import Any

import pytest

from extractor.rows.records import RawRow
from tests.support.data_kit import TOOL_TALK, Make

SEEDS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"},
                             {"role": "assistant", "content": "Yo"}]},
    {"id": 7, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
    {"messages": TOOL_TALK, "tools": [{"type": "function", "function": {"name": "look"}}]},
    {"system": "S", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                                 {"role": "assistant", "content": "y", "reasoning_content": "z"}]},
    {"prompt": "p", "response": "r"},
    {"text": "plain text"},
    {"id": "t", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 1e300, 10**30, float("nan"), "", " ", "x", "\ud800", "\0",
    "user", "assistant", "tool", "gpt", "<|im_end|>", "{{ 7*7 }}", "{not json", '{"a": 1}', "[]",
    [], {}, [[]], [{}], {"a": {}}, [1, 2], ["a"], [None], "é" * 50, "\u2028", "\ufeff",
]  # fmt: skip
KEYS = [
    "id", "messages", "conversations", "role", "content", "from", "value", "tools", "tool_calls",
    "function", "name", "arguments", "input_ids", "loss_mask", "labels", "text", "prompt", "x",
    "response", "system", "reasoning_content", "weight", "attention_mask", "thinking", "type",
    "completion",
]  # fmt: skip


def mutate(value: Any, chance: random.Random) -> Any:
    """The value with one thing changed somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        copy = dict(value)
        key = chance.choice(list(copy))
        act = chance.randrange(6)
        if act == 0:
            del copy[key]
        elif act == 1:
            copy[chance.choice(KEYS)] = chance.choice(VALUES)
        elif act == 2:
            copy[chance.choice(KEYS)] = copy[key]
        else:
            copy[key] = mutate(copy[key], chance)
        return copy
    if isinstance(value, list) and value and chance.random() < 0.8:
        copy = list(value)
        place = chance.randrange(len(copy))
        act = chance.randrange(5)
        if act == 0:
            del copy[place]
        elif act == 1:
            copy.insert(place, chance.choice(VALUES))
        elif act == 2:
            copy.insert(place, copy[place])
        else:
            copy[place] = mutate(copy[place], chance)
        return copy
    return chance.choice(VALUES)


def line(chance: random.Random) -> bytes:
    value: Any = chance.choice(SEEDS)
    for _ in range(chance.randrange(4)):
        value = mutate(value, chance)
    text = json.dumps(value).encode()
    act = chance.randrange(12)
    if act == 0:
        return text[: chance.randrange(len(text))] or b"{"
    if act == 1:
        place = chance.randrange(len(text))
        return text[:place] + bytes([chance.randrange(256)]) + text[place + 1 :]
    if act == 2:
        return b"[" * 100_000 if chance.random() < 0.05 else b'{"a":' * 500 + b"1" + b"}" * 500
    return text


def fuzz(count: int, converter: Make, seed: int) -> None:
    chance = random.Random(seed)
    settings: list[dict[str, Any]] = [
        {"name": "chatml"},
        {"name": "qwen3", "turns": "each"},
        {"name": "harmony", "supervise": "last", "max_length": 40},
        {"name": "mistral", "supervise": "all", "min_length": 12},
        {"name": "kimi_k2", "max_length": 30, "overlong": "skip"},
    ]
    makers = [converter(**setting) for setting in settings]
    written = refused = 0
    for begin in range(0, count, 50):
        rows = [RawRow(begin + n, "f.jsonl", n + 1, line(chance)) for n in range(50)]
        outcome = chance.choice(makers).convert(rows)
        assert outcome.rows == 50
        seen = {piece.row for piece in outcome.pieces} | {r.row for r in outcome.refusals}
        assert seen == {row.number for row in rows}
        for piece in outcome.pieces:
            assert len(piece.ids) == len(piece.mask) > 0
            assert set(piece.mask.tolist()) <= {0, 1} and piece.mask.any()
            assert piece.ids.min() >= 0 and piece.ids.max() < 2000
        for refusal in outcome.refusals:
            assert refusal.reason and refusal.detail
            json.dumps([refusal.id, refusal.detail])
        written += len(outcome.pieces)
        refused += len(outcome.refusals)
    assert written > count / 10 and refused > count / 10  # both happened, often


def test_a_few_thousand_mutated_rows(converter: Make) -> None:
    fuzz(4000, converter, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutated_rows(converter: Make) -> None:
    fuzz(100_000, converter, seed=2)
