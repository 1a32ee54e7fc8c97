"""--layers: names of states, and drafters' own configs of it.

The drafters' files in tests/data/drafters are cut down to what names the layers; the numbers are those
of published drafters, named in each file."""

import json
from pathlib import Path
from typing import Any

import pytest

from extractor.errors import UsageError
from extractor.states import States

DRAFTERS = Path(__file__).parents[1] / "data" / "drafters"


@pytest.mark.parametrize(
    ("n", "k", "layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-8B, as z-lab's drafter has them
        (48, 5, (1, 12, 23, 34, 45)),  # Qwen3-Coder-30B-A3B
        (36, 1, (18,)),
        (36, 2, (1, 33)),
        (28, 3, (1, 13, 25)),
    ],
)
def test_dflash(n: int, k: int, layers: tuple[int, ...]) -> None:
    assert States.resolve(f"dflash:{k}", False, n).layers == layers


@pytest.mark.parametrize(
    "layers",
    ["dflash", *(f"dflash:{k}" for k in ("", 0, -1, "x", 1.5, "\u0663", "9" * 12, 37, "05"))],
)
def test_dflash_of_no_number(layers: str) -> None:
    with pytest.raises(UsageError, match="wanted dflash:K with K from 1 to 36"):
        States.resolve(layers, True, 36)


def test_dflash_of_a_small_model() -> None:
    with pytest.raises(UsageError, match="appears twice"):
        States.resolve("dflash:4", True, 4)


@pytest.mark.parametrize(
    ("file", "n", "names"),
    [
        ("eagle3_gpt_oss_120b.json", 36, "1,17,32"),
        ("eagle3_top_level.json", 36, "1,17,32"),
        ("dflash_qwen3_8b.json", 36, "1,9,17,25,33"),
        ("dflash_qwen3_coder_30b.json", 48, "1,12,23,34,45"),
        ("speculators_qwen3_8b.json", 36, "1,17,32"),
        ("speculators_with_embedding.json", 36, "embed,17,32"),
    ],
)
@pytest.mark.parametrize("folder", [True, False])
def test_draft(tmp_path: Path, file: str, n: int, names: str, folder: bool) -> None:
    path = DRAFTERS / file
    if folder:
        (tmp_path / "config.json").write_bytes(path.read_bytes())
        path = tmp_path
    assert str(States.resolve(f"draft:{path}", False, n)) == names
    assert str(States.resolve(f" draft:{path} ", True, n)) == f"{names},final"


def test_draft_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_bytes((DRAFTERS / "dflash_qwen3_8b.json").read_bytes())
    assert States.resolve("draft:~/config.json", False, 36).layers == (1, 9, 17, 25, 33)
    with pytest.raises(UsageError, match="wanted a drafter's folder"):
        States.resolve("draft:~nobody-of-this-name/config.json", False, 36)


def test_draft_is_past_the_end_of_another_model() -> None:
    path = DRAFTERS / "dflash_qwen3_8b.json"
    with pytest.raises(UsageError, match=r"on a model of 28 layers: .*layer 33 is past the end"):
        States.resolve(f"draft:{path}", True, 28)


def key(value: Any) -> bytes:
    return json.dumps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": value}}).encode()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\xfa", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1, 2]", "wanted a JSON object"),
        (b"null", "wanted a JSON object"),
        (b"{}", "use --layers eagle3"),
        (b'{"eagle_config": 3}', "use --layers eagle3"),
        (key([]), "use --layers eagle3"),
        (key(None), "use --layers eagle3"),
        (key("1,2"), "wanted a list of whole numbers"),
        (key(5), "wanted a list of whole numbers"),
        (key({"1": 2}), "wanted a list of whole numbers"),
        (key(["1", "2"]), "wanted a list of whole numbers"),
        (key([1.0, 2]), "wanted a list of whole numbers"),
        (key([True, 2]), "wanted a list of whole numbers"),
        (key([-1, 2]), "wanted a list of whole numbers"),
        (key([[1], 2]), "wanted a list of whole numbers"),
        (key([1, None]), "wanted a list of whole numbers"),
        (key([10**30]), "wanted a list of whole numbers"),
        (key([1, 1]), "appears twice"),
        (key(list(range(1, 5000))), "past the end"),
    ],
)
def test_draft_that_is_damaged(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        States.resolve(f"draft:{path}", True, 36)
    said = str(refused.value)
    assert wanted in said and str(path) in said and "\n" not in said and len(said) < 60_000


@pytest.mark.parametrize("place", ["", "nowhere/config.json", "/dev/null"])
def test_draft_that_is_not_there(place: str) -> None:
    with pytest.raises(UsageError, match="wanted a drafter's folder"):
        States.resolve(f"draft:{place}", True, 36)


@pytest.mark.parametrize("name", ["07", "\u0663", "²", "+1", "1.0", "-1", "9" * 5000, "em bed"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError):
        States.resolve(f"1,{name}", True, 36)
