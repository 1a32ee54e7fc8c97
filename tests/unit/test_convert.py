"""convert: there and back without a bit changed, resumable, and honest about what does not fit."""

import json
from pathlib import Path

import pytest
import torch
import xxhash

from extractor.convert import convert
from extractor.dataset import HiddenStates
from extractor.errors import RunError, UsageError
from extractor.journal import read_entries
from extractor.layouts import LAYOUTS
from tests.support.written import make_layout, make_samples, write_folder


def make(folder: Path, name: str = "native", **kwargs):
    samples = make_samples()
    layout = make_layout(name, samples=samples, **kwargs)
    return layout, write_folder(folder, layout, samples)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "samples").rglob("*.safetensors"))
    }


def journal_again(folder: Path, path: Path, row: int) -> None:
    """A line for what the file holds now, as if a run had written it so."""
    line = next(e for e in read_entries(folder) if e.row == row)
    content = path.read_bytes()
    value = {"row": row, "turn": 0, "id": line.id, "tokens": line.tokens, "bytes": len(content)}
    value["xxh3"] = xxhash.xxh3_64(content).hexdigest()
    with (folder / "journal" / "0000.jsonl").open("a") as journal:
        journal.write(json.dumps(value) + "\n")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_there_and_back_is_the_same_bytes(tmp_path: Path, name: str):
    final = name not in ("speculators", "specforge-dflash")
    asked = "1,3,5" if name == "speculators" else "1,3,4"
    make(tmp_path / "out", asked=asked, final=final)
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", name]
    assert convert(argv) == 0
    assert convert([str(tmp_path / "new"), str(tmp_path / "back"), "--layout", "native"]) == 0
    before, after = files(tmp_path / "out"), files(tmp_path / "back")
    assert before and before == after


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_converted_file_is_the_file_that_a_run_writes(tmp_path: Path, name: str):
    """Byte for byte, and the folder's fingerprint is that run's."""
    make(tmp_path / "out", asked="1,3,5")
    layout, _ = make(tmp_path / "run", name, asked="1,3,5")
    convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", name])
    for sample in make_samples():
        path = layout.path(sample.row, sample.turn)
        assert (tmp_path / "new" / path).read_bytes() == (tmp_path / "run" / path).read_bytes()
    parts = json.loads((tmp_path / "new" / "run.json").read_text())["parts"]
    assert parts == json.loads((tmp_path / "run" / "run.json").read_text())["parts"]


def test_it_goes_on_where_it_was(tmp_path: Path):
    make(tmp_path / "out")
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "modelopt"]
    convert(argv)
    paths = sorted((tmp_path / "new").rglob("*.pt"))
    paths[3].write_bytes(b"cut")
    others = {path: path.stat().st_ino for path in paths if path != paths[3]}
    assert convert(argv) == 0
    assert paths[3].stat().st_size > 100
    assert {path: path.stat().st_ino for path in others} == others


def test_float8_halves_and_comes_back_close(tmp_path: Path):
    make(tmp_path / "out")
    argv = [str(tmp_path / "out"), str(tmp_path / "new")]
    convert([*argv, "--dtype", "float8_e4m3fn"])
    kept, small = HiddenStates(tmp_path / "out"), HiddenStates(tmp_path / "new")
    one, other = kept[2]["hidden_states.1"].float(), small[2]["hidden_states.1"].float()
    error = ((one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-9)).max()
    assert 0 < float(error) < 0.05


def test_layers_are_chosen_and_ordered(tmp_path: Path):
    make(tmp_path / "out", asked="1,3,5")
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "speculators"]
    convert([*argv, "--layers", "3,1"])
    layers = json.loads((tmp_path / "new" / "run.json").read_text())["layers"]
    assert layers == ["3", "1", "5"], "the last layer is there, and is not one of those asked for"


def test_a_missing_state_is_said_before_anything_is_written(tmp_path: Path):
    make(tmp_path / "out")
    with pytest.raises(UsageError, match=r"needs state 5, and .*--layers 1,3,4,final,5"):
        convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "speculators"])
    assert not (tmp_path / "new").exists()


def test_numbers_without_a_place_in_the_dtype_are_rejected(tmp_path: Path):
    samples = make_samples()
    layout = make_layout(samples=samples)
    write_folder(tmp_path / "out", layout, samples, model_dtype=torch.float32)
    path = tmp_path / "out" / layout.path(2, 0)
    data = bytearray(path.read_bytes())
    data[-40:-38] = (0x7F7F).to_bytes(2, "little")  # bfloat16's largest, past float16's
    path.write_bytes(data)
    journal_again(tmp_path / "out", path, row=2)
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--dtype", "float16"]
    assert convert(argv) == 3
    assert len(HiddenStates(tmp_path / "new")) == len(samples) - 1


def test_a_damaged_source_stops_it(tmp_path: Path):
    layout, _ = make(tmp_path / "out")
    path = tmp_path / "out" / layout.path(2, 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=path.name):
        convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "specforge"])


def test_other_folders_are_left_alone(tmp_path: Path):
    make(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    for folder, words in ((tmp_path / "mine", "not empty"), (tmp_path / "out", "source itself")):
        with pytest.raises(UsageError, match=words):
            convert([str(tmp_path / "out"), str(folder), "--layout", "modelopt"])
    convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "modelopt"])
    with pytest.raises(UsageError, match="layout: modelopt then, specforge now"):
        convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "specforge"])
