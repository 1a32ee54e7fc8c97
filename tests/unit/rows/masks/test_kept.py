"""Nothing that a supervised turn says is lost on the way into the prompt."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.data_kit import RESULT, Make, call, convert, reasons, supervised

USER = {"role": "user", "content": "Why?"}
NAMES = [
    "reasoning_content", "reasoning", "thinking", "thought", "thoughts", "thinking_content",
    "reasoning_text", "think", "chain_of_thought", "cot",
]  # fmt: skip
# Reads a key for thoughts and cuts inline ones out of every text, as GLM, Kimi and others do.
SPLITS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.thoughts_of_mine -%}{{ '<think>' + m.thoughts_of_mine + '</think>' }}{%- endif -%}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def answer(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Seven.", **more}


def row(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


@pytest.mark.parametrize("key", NAMES)
def test_a_template_is_given_reasoning_under_its_own_name(
    key: str, converter: Make, tokenizer: Tokenizer
) -> None:
    thought = row(USER, answer(**{key: "hm"}))
    for name, wanted in {
        "qwen3": "<think>\nhm\n</think>\n\nSeven.<|im_end|>",
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
        "<|message|>Seven.<|return|>",
    }.items():
        assert supervised(convert(converter(name), thought), tokenizer) == [wanted]
    made = converter(source=SPLITS)
    assert supervised(convert(made, thought), tokenizer) == ["<think>hm</think>Seven.<|im_end|>"]
    for name in ("llama3", "chatml", "deepseek_r1", "mistral", "gemma3", "glm4", "kimi_k2"):
        outcome = convert(converter(name), thought)
        assert reasons(outcome) == ["not_rendered"], name
        assert "drops reasoning of the assistant in turn 1: 'hm'" in outcome.refusals[0].detail


def test_reasoning_beside_a_call_in_the_last_turn(converter: Make, tokenizer: Tokenizer) -> None:
    thought = row(USER, {**call("look", 0, n=1), "reasoning": "hm"})
    (text,) = supervised(convert(converter("qwen3"), thought), tokenizer)
    assert text.startswith("<think>\nhm\n</think>\n\n<tool_call>")
    (text,) = supervised(convert(converter("harmony"), thought), tokenizer)
    assert text.startswith("<|channel|>analysis<|message|>hm<|end|>")
    assert reasons(convert(converter("llama3"), thought)) == ["not_rendered"]
    # A tool's result is no question: the call is still of the last turn.
    more = row(*thought["messages"], RESULT)
    assert reasons(convert(converter("llama3"), more)) == ["not_rendered"]
    assert supervised(convert(converter("qwen3"), more), tokenizer)[0].startswith("<think>\nhm")


def test_reasoning_of_earlier_turns_may_be_stripped(converter: Make, tokenizer: Tokenizer) -> None:
    talk = row(USER, answer(thinking="hm"), USER, answer())
    for name in ("qwen3", "harmony", "llama3", "deepseek_r1"):
        assert len(supervised(convert(converter(name), talk), tokenizer)) == 2
    inline = row(USER, answer(content="<think>hm</think>Seven."), USER, answer())
    for name in ("qwen3", "deepseek_r1"):
        assert supervised(convert(converter(name), inline), tokenizer)[0].startswith("Seven.")
    asked = row(USER, answer(thinking="hm"), USER)  # and of one that another question follows
    assert len(supervised(convert(converter("llama3"), asked), tokenizer)) == 1


def test_a_turn_that_is_not_supervised_may_lose_its_reasoning(converter: Make) -> None:
    talk = row(USER, answer(), USER, answer(thinking="hm", weight=0))
    assert not convert(converter("llama3"), talk).refusals


def test_each_turn_is_a_last_one(converter: Make) -> None:
    talk = row(USER, answer(thinking="hm"), USER, answer())
    outcome = convert(converter("llama3", turns="each"), talk)
    assert reasons(outcome) == ["not_rendered"] and [p.turn for p in outcome.pieces] == [2]


def test_every_token_supervised_is_no_excuse(converter: Make) -> None:
    made = converter("llama3", supervise="all")
    assert reasons(convert(made, row(USER, answer(thinking="hm")))) == ["not_rendered"]


def test_a_thought_that_is_cut_out_goes_to_the_key_that_the_template_reads(
    converter: Make, tokenizer: Tokenizer
) -> None:
    inline = row(USER, answer(content="<think>\nhm\n</think>\n\nSeven."))
    made = converter(source=SPLITS)
    assert supervised(convert(made, inline), tokenizer) == ["<think>hm</think>Seven.<|im_end|>"]


@pytest.mark.parametrize(
    "content",
    [
        "<think>hm</think>Seven.",
        "Sure. <think>hm</think>Seven.",
        "<think>\n\n</think>\n\nSure.</think>Seven.",
    ],
)
def test_words_that_a_template_cuts(content: str, converter: Make) -> None:
    assert reasons(convert(converter("deepseek_r1"), row(USER, answer(content=content)))) == [
        "not_rendered"
    ]
    outcome = convert(converter("qwen3"), row(USER, answer(content=content)))
    # Its own key for thoughts takes the last one whole.
    assert reasons(outcome) == (["not_rendered"] if content.startswith("Sure") else [])


def test_an_empty_thought_is_no_loss(converter: Make, tokenizer: Tokenizer) -> None:
    for empty in ("", "<think>\n\n</think>\n\n"):
        outcome = convert(converter("deepseek_r1"), row(USER, answer(content=f"{empty}Seven.")))
        assert "Seven." in supervised(outcome, tokenizer)[0]


def test_two_thoughts_that_differ(converter: Make, tokenizer: Tokenizer) -> None:
    same = row(USER, answer(reasoning="hm", reasoning_content="hm", thinking=""))
    assert supervised(convert(converter("qwen3"), same), tokenizer)[0].startswith("<think>\nhm\n")
    other = row(USER, answer(reasoning="hm", thinking="ha"))
    assert reasons(convert(converter("qwen3"), other)) == ["ambiguous"]
    details = row(USER, answer(reasoning_details=[{"type": "reasoning.text", "text": "hm"}]))
    assert reasons(convert(converter("qwen3"), details)) == ["bad_content"]


def test_thoughts_among_the_parts_of_a_content(converter: Make, tokenizer: Tokenizer) -> None:
    text = {"type": "text", "text": "Seven."}
    for thought in (
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
    ):
        outcome = convert(converter("qwen3"), row(USER, answer(content=[thought, text])))
        assert supervised(outcome, tokenizer) == ["<think>\nhm\n</think>\n\nSeven.<|im_end|>"]
        after = convert(converter("qwen3"), row(USER, answer(content=[text, thought])))
        assert reasons(after) == ["bad_content"]


def test_a_template_that_prints_a_part_of_a_text(converter: Make) -> None:
    made = converter(source=SPLITS.replace("m.content.split('</think>')[-1]", "m.content[:9]"))
    outcome = convert(made, row(USER, answer(content="Seven geese.")))
    assert reasons(outcome) == ["not_rendered"] and "'se.'" in outcome.refusals[0].detail


def test_the_second_of_two_calls(converter: Make) -> None:
    """Harmony prints the first alone; the other's name is a part of the first one's key."""
    both = call("look", 0, page=1)
    both["tool_calls"] = both["tool_calls"] + call("a", 0, n=1)["tool_calls"]
    assert reasons(convert(converter("harmony"), row(USER, both))) == ["tool_calls_not_rendered"]


@pytest.mark.parametrize("values", [{"n": 3}, {"deep": {"er": [1, 2]}}, {"city": "Oro"}])
def test_values_that_a_template_does_not_print(values: dict[str, Any], converter: Make) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    made = converter(source=SPLITS.replace("{{ m.content", calls + "{{ m.content"))
    assert reasons(convert(made, row(USER, call("look", 0, **values)))) == [
        "tool_calls_not_rendered"
    ]
    assert not convert(made, row(USER, call("look", 0))).refusals
