"""Missing weight files are named before any is read."""

import json
from pathlib import Path

import pytest

from extractor.checkpoint import check_files
from extractor.errors import UsageError


def folder(tmp_path: Path, *names: str, index: dict[str, str] | None = None) -> Path:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    if index is not None:
        text = json.dumps({"weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.safetensors"], None),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        (["a.safetensors", "b.safetensors"], {"x": "a.safetensors", "y": "b.safetensors"}),
        (["pytorch_model.bin"], {"x": "model.safetensors"}),  # of the format that is not there
        (["model.safetensors", "adapter_config.json"], None),
    ],
)
def test_whole_checkpoints_pass(tmp_path: Path, names: list[str], index: object) -> None:
    check_files(folder(tmp_path, *names, index=index))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("names", "index", "said"),
    [
        (["model-00001-of-00002.safetensors"], None, "model-00002-of-00002.safetensors"),
        (["model-00002-of-00003.safetensors"], None, "model-00001-of-00003.safetensors"),
        (["a.safetensors"], {"x": "a.safetensors", "y": "b.safetensors"}, "b.safetensors"),
        ([], {"x": "a.safetensors"}, "a.safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], None, "adapter"),
        (["adapter_config.json"], None, "adapter"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, names: list[str], index: dict[str, str] | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check_files(folder(tmp_path, *names, index=index))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "[" * 100_000])
def test_a_damaged_index_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match="index"):
        check_files(tmp_path)
