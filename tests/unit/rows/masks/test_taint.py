"""Strings with origins do what strings do, and know where each character comes from."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.rows.masks.taint import Tainted, concat, origins

TEXT = "  Ab, cd\n<think> ef </think>, gh\r\n ij  "
OPERATIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("strip", ()), ("strip", (" A",)), ("lstrip", ()), ("rstrip", ("j \n",)),
    ("split", ()), ("split", (None, 2)), ("split", (", ",)), ("split", ("</think>", 1)),
    ("rsplit", (None, 1)), ("rsplit", (",", 1)), ("splitlines", ()), ("splitlines", (True,)),
    ("partition", ("</think>",)), ("partition", ("absent",)), ("rpartition", (",",)),
    ("rpartition", ("absent",)), ("replace", ("e", "")), ("replace", (", ", "XY", 1)),
    ("lower", ()), ("upper", ()), ("capitalize", ()), ("title", ()), ("swapcase", ()),
    ("removeprefix", ("  Ab",)), ("removeprefix", ("no",)), ("removesuffix", (" ij  ",)),
    ("removesuffix", ("",)), ("join", (["x", "y"],)), ("__mul__", (2,)), ("__add__", ("z",)),
    ("__getitem__", (slice(3, -2),)), ("__getitem__", (slice(None, None, -1),)),
    ("__getitem__", (slice(9, 2),)), ("__getitem__", (-3,)), ("__getitem__", (5,)),
]  # fmt: skip


def check(result: str, source: str, changed_case: bool = False) -> None:
    """Every character with an origin is the source's character there."""
    places, _ = origins(result)
    assert len(places) == len(result)
    for character, place in zip(str.__str__(result), places.tolist(), strict=True):
        if place >= 0:
            same = source[place - 100]
            assert character == same or (changed_case and character.lower() == same.lower())


@pytest.mark.parametrize(("method", "arguments"), OPERATIONS)
def test_methods(method: str, arguments: tuple[Any, ...]) -> None:
    tainted = Tainted.at(TEXT, 100)
    result = getattr(tainted, method)(*arguments)
    plain = getattr(TEXT, method)(*arguments)
    assert result == plain
    for piece in [result] if isinstance(result, str) else result:
        check(piece, TEXT, changed_case=True)
        if piece and method not in ("replace", "join", "__add__") and piece in TEXT:
            assert (origins(piece)[0] >= 0).all(), piece


@settings(max_examples=300, deadline=None)
@given(st.text("ab <>\n", max_size=20), st.data())
def test_any_sequence_of_operations(text: str, data: st.DataObject) -> None:
    tainted: Any = Tainted.at(text, 100)
    plain: Any = text
    for _ in range(data.draw(st.integers(1, 5))):
        method, arguments = data.draw(st.sampled_from(OPERATIONS))
        if method == "__getitem__" and isinstance(arguments[0], int):
            continue
        if method == "replace" and not arguments[0]:
            continue
        plain = getattr(plain, method)(*arguments)
        tainted = getattr(tainted, method)(*arguments)
        assert tainted == plain
        if not isinstance(plain, str):
            if not plain:
                return
            pick = data.draw(st.integers(0, len(plain) - 1))
            plain, tainted = plain[pick], tainted[pick]
        check(tainted, text, changed_case=True)


def test_additions_from_either_side() -> None:
    tainted = Tainted.at("ab", 100)
    assert origins("x" + tainted + "y")[0].tolist() == [-1, 100, 101, -1]
    assert origins(concat(["x", tainted[1:], tainted]))[0].tolist() == [-1, 101, 100, 101]
    assert type(concat(["x", "y"])) is str
    assert str(tainted) is tainted
    with pytest.raises(TypeError):
        _ = tainted + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="sequence item 1: expected str instance, int found"):
        tainted.join(["a", 1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="empty separator"):
        tainted.partition("")
    with pytest.raises(IndexError):
        tainted[2]


def test_hash_and_equality_are_a_strings() -> None:
    assert {Tainted.at("k", 0): 1}["k"] == 1
    assert Tainted.at("k", 0) in {"k"}
