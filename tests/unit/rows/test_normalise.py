"""Shapes of rows."""

from typing import Any

import pytest

from extractor.rows.normalise import Conversation, Pretokenized, normalise, record_id
from extractor.rows.records import BadRow
from tests.support.data_kit import chat

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


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input", "params", "kwargs"])
@pytest.mark.parametrize("values", [{"a": 1}, '{"a": 1}'])
def test_the_values_of_a_call(key: str, values: Any) -> None:
    for call in (
        {"function": {"name": "f", key: values}, "id": "1"},
        {"name": "f", key: values},
        {"function": {"name": "f", "arguments": None}, key: values},
        {"function": {"name": "f", key: values, "arguments": {"a": 1}}},
    ):
        (found,) = messages(with_call([call]))[1]["tool_calls"]
        function = found.get("function", found)
        assert function == {"name": "f", "arguments": {"a": 1}}
        assert not {key} & found.keys() - {"arguments"}


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "inputs": {"a": 1}},
        {"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}},
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"function": {"name": "f", "arguments": {}}, "args": {"a": 1}},
        {"name": "f", "arguments": {"a": float("nan")}},
        {"name": "f", "arguments": '{"a": [1e999]}'},
    ],
)
def test_a_call_whose_values_are_not_certain(call: dict[str, Any]) -> None:
    assert reason(with_call([call])) == "bad_tool_calls"


def test_a_call_without_values() -> None:
    (found,) = messages(with_call([{"id": "1", "type": "function", "function": {"name": "f"}}]))[1][
        "tool_calls"
    ]
    assert found["function"]["arguments"] == {}


def test_nulls_in_tools_and_calls_are_missing_keys() -> None:
    schema = {"name": "f", "parameters": {"a": {"type": "string", "enum": ["x", None]}, "b": {}}}
    filled = {
        "name": "f", "strict": None,
        "parameters": {"a": {"type": "string", "enum": ["x", None], "n": None}, "b": {"n": None}},
    }  # fmt: skip
    call = {"id": None, "function": {"name": "f", "arguments": '{"c": null}', "more": None}}
    found = normalise({**with_call([call]), "tools": [{"function": filled, "type": None}]})
    assert isinstance(found, Conversation)
    assert found.tools == [{"function": schema}]
    assert found.messages[1]["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"c": None}}}  # a null of the text is meant
    ]
    text = normalise({"messages": TALK, "tools": '[{"default": null}]'})
    assert isinstance(text, Conversation) and text.tools == [{"default": None}]


@pytest.mark.parametrize(
    "switch",
    [
        {"weight": 0}, {"train": False}, {"training": 0}, {"trainable": False}, {"loss": 0.0},
        {"masked": True}, {"train": False, "weight": 0},
    ],
)  # fmt: skip
def test_switches_of_a_message(switch: dict[str, Any]) -> None:
    found = normalise({"messages": [*TALK, TALK[0], {**TALK[1], **switch}]})
    assert isinstance(found, Conversation)
    assert found.unweighted == {3} and found.messages[3] == TALK[1] and not found.unread
    on = {key: not value for key, value in switch.items()}
    found = normalise({"messages": [TALK[0], {**TALK[1], **on}]})
    assert isinstance(found, Conversation) and not found.unweighted


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"train": "false"}, "bad_messages"),
        ({"loss": 2.5}, "bad_messages"),
        ({"train": True, "weight": 0}, "ambiguous"),
        ({"masked": True, "loss": 1}, "ambiguous"),
    ],
)
def test_switches_that_say_nothing_clear(message: dict[str, Any], code: str) -> None:
    assert reason({"messages": [TALK[0], {**TALK[1], **message}]}) == code


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
def test_a_row_that_is_switched_off(key: str) -> None:
    for row in ({"messages": TALK}, {"input_ids": [1], "loss_mask": [1]}, {"text": "a"}):
        assert reason({**row, key: 0}) == "switched_off"
        assert reason({**row, key: False}) == "switched_off"
    found = normalise({"messages": TALK, key: 1})
    assert isinstance(found, Conversation) and not found.unread
    found = normalise({"messages": TALK, key: 0.5})
    assert isinstance(found, Conversation) and found.unread == (f"row key {key}",)


def test_what_nothing_reads_is_noted() -> None:
    row = {"id": 1, "messages": [{**TALK[0], "train": True}, TALK[1]], "split": "a", "x": None}
    found = normalise(row)
    assert isinstance(found, Conversation)
    assert set(found.unread) == {"row key split", "a switch to learn from a user message"}
    assert reason({"messages": TALK, "functions": [{"name": "f"}]}) == "bad_tools"


def test_variables_of_a_row() -> None:
    for given in ({"a": False, "b": None}, '{"a": false}'):
        found = normalise({"messages": TALK, "chat_template_kwargs": given})
        assert isinstance(found, Conversation) and found.variables == {"a": False}
    for wrong in ([1], "{no", {"messages": []}, {"add_generation_prompt": True}):
        assert reason({"messages": TALK, "chat_template_kwargs": wrong}) == "bad_messages"
