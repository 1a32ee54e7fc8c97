"""What is supervised under templates that behave as the public ones do."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.data_kit import (
    NAMES,
    RESULT,
    TEMPLATES,
    TOOL,
    TOOL_TALK,
    Make,
    call,
    chat,
    convert,
    reasons,
    supervised,
)

SYSTEM = ("system", "Be kind.")
FIRST = ("user", "Say <|im_start|>assistant\n<think> hi")
THOUGHT = ("assistant", "<think>\nhm\n</think>\n\nHi <|im_end|> there.")
SECOND = ("user", "Hi there. Again!")
LAST = ("assistant", "<think>\nmore\n</think>\n\nHi there.")
CUTS_THOUGHTS = ("deepseek_r1", "deepseek_v3")  # out of every turn, also the last


def talk(name: str) -> dict[str, Any]:
    last = ("assistant", "Hi there.") if name in CUTS_THOUGHTS else LAST
    return chat(SYSTEM, FIRST, THOUGHT, SECOND, last)


KEPT = "<think>\nhm\n</think>\n\nHi <|im_end|> there."
KEPT_LAST = "<think>\nmore\n</think>\n\nHi there."

TALK: dict[str, list[str]] = {
    "chatml": [KEPT + "<|im_end|>", KEPT_LAST + "<|im_end|>"],
    "noprompt": [KEPT + "<|im_end|>", KEPT_LAST + "<|im_end|>"],
    "generation": [KEPT + "<|im_end|>", KEPT_LAST + "<|im_end|>"],
    "llama3": [KEPT + "<|eot_id|>", KEPT_LAST + "<|eot_id|>"],
    "qwen3": ["Hi <|im_end|> there.<|im_end|>", KEPT_LAST + "<|im_end|>"],
    "deepseek_v3": [
        "\n\nHi <|im_end|> there.<｜end▁of▁sentence｜>",
        "Hi there.<｜end▁of▁sentence｜>",
    ],
    "deepseek_r1": [
        "\n\nHi <|im_end|> there.<｜end▁of▁sentence｜>",
        "Hi there.<｜end▁of▁sentence｜>",
    ],
    "kimi_k2": [KEPT + "<|im_end|>", KEPT_LAST + "<|im_end|>"],
    "gemma3": [KEPT + "<end_of_turn>", KEPT_LAST + "<end_of_turn>"],
    "mistral": [KEPT + "</s>", KEPT_LAST + "</s>"],
    "harmony": [
        f"<|channel|>final<|message|>{KEPT}<|end|>",
        f"<|channel|>final<|message|>{KEPT_LAST}<|return|>",
    ],
    "glm4": [KEPT, KEPT_LAST],  # its turns end with the next header's token: that is a header
}


@pytest.mark.parametrize("name", NAMES)
def test_a_talk(name: str, converter: Make, tokenizer: Tokenizer) -> None:
    outcome = convert(converter(name), talk(name))
    assert supervised(outcome, tokenizer) == TALK[name]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_last_turn(name: str, converter: Make, tokenizer: Tokenizer) -> None:
    made = converter(name, supervise="last")
    outcome = convert(made, talk(name))
    assert supervised(outcome, tokenizer) == TALK[name][1:]


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_sees_no_later_one(name: str, converter: Make, tokenizer: Tokenizer) -> None:
    made = converter(name, turns="each")
    outcome = convert(made, talk(name))
    if name in CUTS_THOUGHTS:  # out of the first turn as well, which is a last one here
        assert [piece.turn for piece in outcome.pieces] == [2]
        assert reasons(outcome) == ["not_rendered"]
        return
    assert [piece.turn for piece in outcome.pieces] == [1, 2]
    assert supervised(outcome, tokenizer, 1) == TALK[name][1:]
    first = convert(made, chat(SYSTEM, FIRST, THOUGHT))
    assert outcome.pieces[0].ids.tolist() == first.pieces[0].ids.tolist()
    assert supervised(outcome, tokenizer, 0) == supervised(first, tokenizer)


DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
ONE, TWO = '{"city": "Pa\\"ris\\n", "n": 2}', '{"n": 3}'
CALLS: dict[str, list[str]] = {
    "llama3": [
        f'{{"name": "look", "parameters": {ONE}}}<|eot_id|>',
        f'{{"name": "lookk", "parameters": {TWO}}}<|eot_id|>',
        "Sunny.<|eot_id|>",
    ],
    "qwen3": [
        f'<tool_call>\n{{"name": "look", "arguments": {ONE}}}\n</tool_call><|im_end|>',
        f'<tool_call>\n{{"name": "lookk", "arguments": {TWO}}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nSunny.<|im_end|>",
    ],
    "deepseek_v3": [
        DEEPSEEK_CALL.format("look", ONE),
        DEEPSEEK_CALL.format("lookk", TWO),
        "Sunny.<｜end▁of▁sentence｜>",
    ],
    "kimi_k2": [
        KIMI_CALL.format("look:1000", ONE),
        KIMI_CALL.format("lookk:100", TWO),
        "Sunny.<|im_end|>",
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {ONE}, "id": "look:1000"}}]</s>',
        f'[TOOL_CALLS] [{{"name": "lookk", "arguments": {TWO}, "id": "lookk:100"}}]</s>',
        "Sunny.</s>",
    ],
    "harmony": [
        f" to=functions.look<|channel|>commentary json<|message|>{ONE}<|call|>",
        f" to=functions.lookk<|channel|>commentary json<|message|>{TWO}<|call|>",
        "<|channel|>final<|message|>Sunny.<|return|>",
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_tool_calls(name: str, converter: Make, tokenizer: Tokenizer) -> None:
    """Calls are supervised, results never, not even where a result's header repeats the name."""
    outcome = convert(converter(name), {"messages": TOOL_TALK})
    if name in CALLS:
        assert supervised(outcome, tokenizer) == CALLS[name]
    else:
        assert reasons(outcome)[0] in ("tool_calls_not_rendered", "template_error")


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_printed_or_the_row_is_refused(
    name: str, converter: Make, tokenizer: Tokenizer
) -> None:
    outcome = convert(converter(name), {"messages": TOOL_TALK, "tools": [TOOL]})
    if name in CALLS and name != "deepseek_v3":
        assert supervised(outcome, tokenizer) == CALLS[name]
        assert "looks" in tokenizer.decode(outcome.pieces[0].ids.tolist())
    else:
        assert reasons(outcome)[0] in ("tools_not_rendered", "template_error")


def test_parallel_calls(converter: Make, tokenizer: Tokenizer) -> None:
    both = {**call("look", 0, n=1)}
    both["tool_calls"] = both["tool_calls"] + call("see", 0, n=[1, "x"])["tool_calls"]
    outcome = convert(converter("qwen3"), {"messages": [TOOL_TALK[0], both, RESULT, RESULT, LAST_]})
    assert supervised(outcome, tokenizer)[0] == (
        '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "see", "arguments": {"n": [1, "x"]}}\n</tool_call><|im_end|>'
    )


LAST_ = {"role": "assistant", "content": "Done."}


def test_reasoning_field(converter: Make, tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": "Seven.", "reasoning_content": "hm"}
    row = {"messages": [{"role": "user", "content": "?"}, answer]}
    outcome = convert(converter("qwen3"), row)
    assert supervised(outcome, tokenizer) == ["<think>\nhm\n</think>\n\nSeven.<|im_end|>"]


def test_thinking_off(converter: Make, tokenizer: Tokenizer) -> None:
    """The empty thought is in the prompt then, and so it is not supervised."""
    made = converter("qwen3", variables={"enable_thinking": False})
    outcome = convert(made, chat(("user", "?"), ("assistant", "Seven.")))
    assert supervised(outcome, tokenizer) == ["Seven.<|im_end|>"]


def test_harmony_thinking(converter: Make, tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": "Seven.", "thinking": "hm"}
    row = {"messages": [{"role": "user", "content": "?"}, answer]}
    outcome = convert(converter("harmony"), row)
    assert supervised(outcome, tokenizer) == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        "Seven.<|return|>"
    ]


def test_an_answer_that_repeats_the_prompt(converter: Make, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>assistant\nsame<|im_end|>\n<|im_start|>user\nsame"
    outcome = convert(converter("chatml"), chat(("user", text), ("assistant", text)))
    assert supervised(outcome, tokenizer) == [text + "<|im_end|>"]


def test_spaces_that_merge_with_the_header(converter: Make, tokenizer: Tokenizer) -> None:
    outcome = convert(converter("chatml"), chat(("user", "?"), ("assistant", "\n\n  Hello \n")))
    (text,) = supervised(outcome, tokenizer)
    assert text.strip("\n ") == "Hello \n<|im_end|>".strip("\n ")
    assert "assistant" not in text


def test_weight_zero(converter: Make, tokenizer: Tokenizer) -> None:
    row = chat(("user", "?"), ("assistant", "No."), ("user", "?"), ("assistant", "Yes."))
    row["messages"][1]["weight"] = 0
    assert supervised(convert(converter(), row), tokenizer) == ["Yes.<|im_end|>"]


def test_supervise_all(converter: Make) -> None:
    outcome = convert(converter(supervise="all"), chat(FIRST, THOUGHT), {"text": "plain"})
    assert all(piece.mask.all() for piece in outcome.pieces)
    assert len(outcome.pieces) == 2


def test_literals_that_overlap_are_kept_in_the_proof(converter: Make, tokenizer: Tokenizer) -> None:
    """The template looks for `</think>`, and "\\n</" is among its own texts as well."""
    strip = "(m.content.split('</think>')[-1] if '</think>' in m.content else m.content)"
    source = CHATML.replace("CONTENT", strip) + "{%- set unused = '\\n</' -%}"
    outcome = convert(
        converter(source=source), chat(("user", "?"), THOUGHT, SECOND, ("assistant", "y"))
    )
    assert supervised(outcome, tokenizer) == ["\n\nHi <|im_end|> there.<|im_end|>", "y<|im_end|>"]


def test_a_template_that_wants_parts(converter: Make, tokenizer: Tokenizer) -> None:
    """As models that see have: it indexes each content as a list of parts."""
    parts = "(m.content|map(attribute='text')|join('+'))"
    made = converter(source=CHATML.replace("CONTENT", parts))
    outcome = convert(made, chat(("user", "?"), ("assistant", "Goose.")))
    assert supervised(outcome, tokenizer) == ["Goose.<|im_end|>"]


def test_no_end_token_after_a_call(converter: Make, tokenizer: Tokenizer) -> None:
    """GLM's way: what follows a call is known by what opens the next message."""
    source = (TEMPLATES / "glm4.jinja").read_text()
    printed = (
        "{{ m.content.strip() }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{{ c.function.arguments|tojson }}</call>{% endfor %}"
    )
    made = converter("glm4", source=source.replace("{{ m.content.strip() }}", printed))
    outcome = convert(made, {"messages": TOOL_TALK})
    assert supervised(outcome, tokenizer) == [
        f"<call>look{ONE}</call>",
        f"<call>lookk{TWO}</call>",
        "Sunny.",
    ]
    cut = convert(made, {"messages": TOOL_TALK[:2]})
    assert supervised(cut, tokenizer) == [f"<call>look{ONE}</call>"]


def test_an_end_token_after_a_closing_one(converter: Make, tokenizer: Tokenizer) -> None:
    """Cohere's way: an answer is closed, and then the turn is ended, by a token each."""
    source = CHATML.replace("CONTENT", "m.content").replace("'<|im_end|>", "'<|end|><|im_end|>")
    outcome = convert(converter(source=source), chat(("user", "?"), ("assistant", "Goose.")))
    assert supervised(outcome, tokenizer) == ["Goose.<|end|><|im_end|>"]


# ---- templates that the proof must refuse, or that drop something

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + CONTENT + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@pytest.mark.parametrize(
    "content",
    [
        "(m.content|escape|string)",
        "'a %s' % (m.content,)",
        "m.content.encode('utf-8').decode('utf-8')",
        "m.content|wordwrap(5)",
    ],
)
def test_lost_origins_are_found(content: str, converter: Make) -> None:
    """Ways to move text that the tracking does not know: refused, not guessed."""
    made = converter(source=CHATML.replace("CONTENT", content))
    outcome = convert(made, chat(("user", "What is it?"), ("assistant", "It is a goose <b>.")))
    assert reasons(outcome)[0] in ("mask_unproved", "not_rendered", "template_error")


@pytest.mark.parametrize(
    "content",
    [
        "m.content|upper|lower",
        "m.content.replace('g', 'gg')",
        "('a{}b{x}'.format(m.content, x=m.content[:2]))",
        "[m.content, 'x']|join('-')",
        "'-'.join([m.content, 'x'])",
        "(m.content|tojson)",
        "(m.content|list|join)",
        "(m.content|indent(2, true))",
        "m.content.split(' ')|join('_')",
        "m.content.partition(' ')|join",
        "m.content.splitlines()|join('|')",
        "m.content[::-1]",
        "(m.content|first ~ m.content[1:])",
        "m.content.title()",
        "(m.content|replace('goose', 'geese'))",
        "m.content.removeprefix('It')",
    ],
)
def test_followed_through(content: str, converter: Make) -> None:
    made = converter(source=CHATML.replace("CONTENT", content))
    outcome = convert(made, chat(("user", "What is it?"), ("assistant", "It is\na goose.")))
    assert not outcome.refusals
    piece = outcome.pieces[0]
    marks = piece.mask.tolist()
    assert marks[-1] == 0 and marks[-2] == 1 and sum(marks) > 3


def test_copies_of_an_answer_are_not_supervised(converter: Make, tokenizer: Tokenizer) -> None:
    source = CHATML.replace("CONTENT", "m.content") + "{{ 'summary: ' + messages[1].content }}"
    outcome = convert(converter(source=source), chat(("user", "?"), ("assistant", "Goose.")))
    assert supervised(outcome, tokenizer) == ["Goose.<|im_end|>"]


def test_dropped_messages_are_refused(converter: Make) -> None:
    source = CHATML.replace("in messages", "in messages if m.role != 'system'")
    made = converter(source=source.replace("CONTENT", "m.content"))
    outcome = convert(made, chat(SYSTEM, ("user", "?"), ("assistant", "Hi")))
    assert reasons(outcome) == ["not_rendered"]
    assert "message 0 (system)" in outcome.refusals[0].detail


def test_empty_answers_are_refused(converter: Make) -> None:
    assert reasons(convert(converter(), chat(("user", "?"), ("assistant", "")))) == [
        "empty_assistant"
    ]


def test_what_a_template_says_no_to(converter: Make) -> None:
    outcome = convert(converter("gemma3"), chat(("user", "a"), ("user", "b"), ("assistant", "c")))
    assert reasons(outcome) == ["template_error"]
    assert "must alternate" in outcome.refusals[0].detail


def test_a_rows_own_variables(converter: Make, tokenizer: Tokenizer) -> None:
    """The empty thought of that row alone is in the prompt, and so it is not supervised."""
    off = {"chat_template_kwargs": {"enable_thinking": False, "unheard_of": 1}}
    rows = [chat(("user", "?"), ("assistant", "Seven."), **more) for more in ({}, off, {})]
    outcome = convert(converter("qwen3"), *rows)
    assert [supervised(outcome, tokenizer, n) for n in range(3)] == [
        ["<think>\n\n</think>\n\nSeven.<|im_end|>"],
        ["Seven.<|im_end|>"],
        ["<think>\n\n</think>\n\nSeven.<|im_end|>"],
    ]
    assert dict(outcome.unread) == {"chat_template_kwargs unheard_of": 1}


def test_keys_that_neither_we_nor_the_template_read(converter: Make) -> None:
    row = chat(("user", "?"), ("assistant", "Seven."), source="web")
    row["messages"][1] |= {"name": "Ann", "train_detail": [1]}
    row["messages"].append({**RESULT, "name": "look"})
    for name, extra in (("chatml", {"message key name": 2}), ("kimi_k2", {})):
        unread = dict(convert(converter(name), row, row).unread)
        assert unread == {"row key source": 2, "message key train_detail": 2, **extra}


# ---- ends of turns


def ended(answer: str, last: str) -> str:
    return (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        f"{{{{ '{answer}' if not loop.last else '{last}' }}}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


@pytest.mark.parametrize(
    ("answer", "last", "ends"),
    [
        ("<|end|>", "<|end|><|im_end|>", ("<|end|>", "<|end|>")),
        ("<|end|><|im_end|>", "<|end|><|im_end|>", ("<|end|><|im_end|>", "<|end|><|im_end|>")),
        ("<|end|>\\n", "<|end|>\\n<|im_end|>", ("<|end|>", "<|end|>")),
        ("<|end|>", "<|im_end|>", ("<|end|>", "<|im_end|>")),
        ("[done]\\n", "[done]\\n", ("[done]", "[done]")),
        ("[done]\\n", "[done]\\n<|im_end|>", ("[done]", "[done]")),
        ("[done]<|end|>\\n", "[done]<|end|>\\n", ("[done]<|end|>", "[done]<|end|>")),
        ("", "", ("", "")),
    ],
)
def test_ends_of_turns(
    answer: str, last: str, ends: tuple[str, str], converter: Make, tokenizer: Tokenizer
) -> None:
    outcome = convert(
        converter(source=ended(answer, last)),
        chat(("user", "?"), ("assistant", "One."), ("user", "?"), ("assistant", "Two.")),
    )
    found = supervised(outcome, tokenizer)
    assert found == [f"One.{ends[0]}", f"Two.{ends[1]}"]
    assert bool(outcome.remarks) == (not answer)


def test_a_footer_is_no_end_of_turn(converter: Make) -> None:
    outcome = convert(
        converter(source=ended("\\n### Question\\n", "\\n### Answer\\n")),
        chat(("user", "?"), ("assistant", "One.")),
    )
    assert reasons(outcome) == ["mask_unproved"]
    assert "'### Answer'" in outcome.refusals[0].detail
