"""Shapes of rows."""

from typing import Any

import pytest
from data_kit import chat

from extractor.data.normalise import Conversation, Pretokenized, normalise, record_id
from extractor.data.rows import BadRow

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    found = normalise(record)
    assert isinstance(found, Conversation)
    return found.messages


def reason(record: dict[str, Any]) -> str:
    with pytest.raises(BadRow) as bad:
        normalise(record)
    assert bad.value.detail
    return bad.value.reason


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TALK},
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "GPT", "value": "b"}]},
        {
            "conversations": [
                {"role": "USER", "value": "a"},
                {"from": " assistant ", "content": "b"},
            ]
        },
        {"messages": TALK, "conversations": None, "text": "a b", "prompt": "a"},
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"messages": [{"role": "user", "content": ["a"]}, {**TALK[1], "tool_calls": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, TALK[1]]},
        {"messages": [{**TALK[0], "name": None}, {**TALK[1], "tool_calls": []}], "system": ""},
    ],
)
def test_one_talk_in_many_shapes(record: dict[str, Any]) -> None:
    assert messages(record) == TALK


def test_system_text_becomes_a_message() -> None:
    assert messages({"messages": TALK, "system": "s"})[0] == {"role": "system", "content": "s"}
    assert reason({"messages": [{"role": "system", "content": "t"}, *TALK], "system": "s"}) == (
        "ambiguous"
    )


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_tool_calls(arguments: Any, content: dict[str, Any]) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    row = {"messages": [TALK[0], {"role": "assistant", **content, "tool_calls": calls}]}
    answer = messages(row)[1]
    assert answer["content"] == ""
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def with_call(call: Any) -> dict[str, Any]:
    return {"messages": [TALK[0], {"role": "assistant", "tool_calls": call}]}


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({}, "unknown_shape"),
        ({"messages": None}, "unknown_shape"),
        ({"prompt": "a"}, "unknown_shape"),
        ({"messages": TALK, "conversations": TALK}, "ambiguous"),
        ({"messages": TALK, "input_ids": [1]}, "ambiguous"),
        ({"prompt": "a", "response": "b", "completion": "c"}, "ambiguous"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "a"}, TALK[1]]}, "ambiguous"),
        ({"messages": [{**TALK[0], "value": "b"}, TALK[1]]}, "ambiguous"),
        ({"messages": []}, "empty"),
        ({"messages": TALK[:1]}, "no_assistant"),
        ({"messages": "a"}, "bad_messages"),
        ({"messages": [1]}, "bad_messages"),
        ({"messages": [{"content": "a"}]}, "bad_messages"),
        ({"messages": [{"role": 1, "content": "a"}]}, "bad_messages"),
        ({"messages": TALK, "system": 1}, "bad_messages"),
        ({"messages": [{**TALK[1], "weight": 0.5}]}, "bad_messages"),
        ({"messages": [{"role": "reviewer", "content": "a"}, TALK[1]]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": 1}, TALK[1]]}, "bad_content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}, TALK[1]]}, "bad_content"),
        (chat(("user", [{"type": "image_url"}])), "bad_content"),  # type: ignore[arg-type]
        (chat(("user", [{"type": "text"}])), "bad_content"),  # type: ignore[arg-type]
        (with_call("f"), "bad_tool_calls"),
        (with_call(["f"]), "bad_tool_calls"),
        (with_call([{"function": {}}]), "bad_tool_calls"),
        (with_call([{"function": {"name": "f", "arguments": "{no"}}]), "bad_tool_calls"),
        (with_call([{"function": {"name": "f", "arguments": "[1]"}}]), "bad_tool_calls"),
        ({"messages": [{**TALK[0], "tool_calls": [{"name": "f"}]}, TALK[1]]}, "bad_tool_calls"),
        ({"messages": [TALK[0], {**TALK[1], "function_call": {"name": "f"}}]}, "bad_tool_calls"),
        ({"messages": TALK, "tools": "{no"}, "bad_tools"),
        ({"messages": TALK, "tools": {"a": 1}}, "bad_tools"),
        ({"text": ""}, "bad_text"),
        ({"text": 1}, "bad_text"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": "1"}, "bad_ids"),
        ({"input_ids": [1.0]}, "bad_ids"),
        ({"input_ids": [True]}, "bad_ids"),
        ({"input_ids": [[1]]}, "bad_ids"),
        ({"input_ids": [10**30], "loss_mask": [1]}, "id_out_of_range"),
        ({"input_ids": [1], "loss_mask": [1, 1]}, "bad_mask"),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_mask"),
        ({"input_ids": [1], "loss_mask": [1.0]}, "bad_mask"),
        ({"input_ids": [1], "labels": [-100, 1]}, "bad_mask"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "bad_mask"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "ambiguous"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 0]}, "padded"),
    ],
)
def test_refused(record: dict[str, Any], code: str) -> None:
    assert reason(record) == code


def test_labels_and_boolean_masks() -> None:
    for record in (
        {"input_ids": [5, 6], "labels": [-100, 6]},
        {"input_ids": [5, 6], "loss_mask": [False, True]},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [-100, 6], "attention_mask": [1, 1]},
    ):
        found = normalise(record)
        assert isinstance(found, Pretokenized) and found.mask is not None
        assert found.mask.tolist() == [0, 1]


def test_ids_are_texts() -> None:
    assert record_id({"id": 7}, 0) == "7"
    assert record_id({"conversation_id": "x/../y"}, 0) == "x/../y"
    assert record_id({"id": None}, 3) == "3"
    assert record_id({"id": ["a"]}, 3) == "3"
