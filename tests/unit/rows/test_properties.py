"""Random conversations under every template: what is supervised, decoded, is what the assistant
said and the template's markers of it, and nobody else's text has a say in it."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.data_kit import BOS_EOS, NAMES, Make, convert

# Pieces that tempt: headers, end tokens, thoughts, spaces to merge, text that repeats.
PIECES = st.sampled_from(
    [
        "Hello",
        "Hi there.",
        "hm",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "</s>",
        "[/INST]",
        "<｜Assistant｜>",
        "<start_of_turn>model\n",
        "user\n",
        "\n\n",
        "  ",
        "\n",
        "x = 1",
        "\u2028",
        "日本",
        "🙂",
        "é",
        '{"a": 1}',
        "'",
        "<tool_call>",
        "<|end|>",
        "assistant",
        "42",
        "% {{ x }}",
    ]
)
WORD = st.sampled_from(["Goose", "swan", "42", "Ente", "鳥"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Never blank, and with a word in it."""
    parts = draw(st.lists(PIECES, max_size=5))
    parts.insert(draw(st.integers(0, len(parts))), draw(WORD))
    return "".join(parts)


@st.composite
def conversations(draw: st.DrawFn, strict: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts())})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts())})
        for _ in range(1 if strict else draw(st.integers(1, 2))):
            messages.append({"role": "assistant", "content": draw(texts())})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(texts())})
    return messages


def spoken(mask: np.ndarray, ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in runs]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_supervised_is_what_was_said(
    name: str, data: st.DataObject, converter: Make, tokenizer: Tokenizer
) -> None:
    made = converter(name)
    messages = data.draw(conversations(strict=name == "gemma3"))
    outcome = convert(made, {"messages": messages})
    assert not outcome.refusals, outcome.refusals
    piece = outcome.pieces[0]

    # The ids are those of transformers' own render, tokenized once.
    template = made._learned("default", {})[0]
    from transformers.utils.chat_template_utils import render_jinja_template

    bos, eos = BOS_EOS.get(name, ("<|endoftext|>", "<|im_end|>"))
    (rendered,), _ = render_jinja_template(
        conversations=[messages], chat_template=template.source, bos_token=bos, eos_token=eos
    )
    assert piece.ids.tolist() == tokenizer.encode(rendered, add_special_tokens=False).ids

    said = [m["content"] for m in messages if m["role"] == "assistant"]
    found = spoken(piece.mask, piece.ids, tokenizer)
    header, closers = made.shape().header, made.shape().terminators
    everything = squeezed("".join(found))
    for text in said:
        # qwen3 and the DeepSeeks strip thoughts; these texts have no </think>, so all is kept.
        assert squeezed(text) in everything
    # Nothing but the answers, the end tokens and the template's markers: count the characters.
    markers = sum(len(squeezed(m)) for m in _markers(name, messages))
    ends = len(everything) - sum(len(squeezed(text)) for text in said) - markers
    assert ends in ({0} if name == "glm4" else {sum(pick) for pick in _sums(closers, len(said))}), (
        found,
        header,
    )


def _markers(name: str, messages: list[dict[str, Any]]) -> list[str]:
    answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    if name == "harmony":
        return ["<|channel|>final<|message|>"] * len(answers)
    if name == "qwen3":  # an empty thought before the last answer, when no question follows
        return ["<think></think>"] if answers[-1] == len(messages) - 1 else []
    return []


def _sums(closers: Any, count: int) -> list[tuple[int, ...]]:
    lengths = sorted({len(closer) for closer in closers})
    sums: list[tuple[int, ...]] = [()]
    for _ in range(count):
        sums = [(*s, n) for s in sums for n in lengths]
    return sums


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_other_roles_have_no_say(
    name: str, data: st.DataObject, converter: Make, tokenizer: Tokenizer
) -> None:
    made = converter(name)
    messages = data.draw(conversations(strict=name == "gemma3"))
    others = [
        m if m["role"] == "assistant" else {**m, "content": data.draw(texts())} for m in messages
    ]
    one, two = convert(made, {"messages": messages}), convert(made, {"messages": others})
    assert not one.refusals and not two.refusals
    first, second = one.pieces[0], two.pieces[0]
    assert [squeezed(t) for t in spoken(first.mask, first.ids, tokenizer)] == [
        squeezed(t) for t in spoken(second.mask, second.ids, tokenizer)
    ]
