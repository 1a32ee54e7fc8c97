"""convert: there and back without a bit changed, resumable, and honest about what does not fit."""

import json
from pathlib import Path

import pytest
import torch
import xxhash

from extractor.dataset import HiddenStates
from extractor.errors import RunError, UsageError
from extractor.layouts import LAYOUTS
from extractor.output import run_json
from extractor.output.journal import read_entries
from extractor.verbs.check import examine
from extractor.verbs.convert import convert
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


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_corrupt_bytes_get_no_checksum_of_their_own(tmp_path: Path, name: str):
    """One bit of a state, which no header tells."""
    layout, _ = make(tmp_path / "out", name, asked="1,3,5")
    path = tmp_path / "out" / layout.path(2, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", name]
    with pytest.raises(RunError, match=rf"{path.name}: its checksum is not the one"):
        convert([*argv, "--workers", "1"])
    assert (2, 0) not in {entry.key for entry in read_entries(tmp_path / "new")}
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert convert(argv) == 0


def test_numbers_of_files_count_the_samples_that_were_rejected(tmp_path: Path):
    """hs_i is the i-th sample that was to be converted, whatever became of those before it."""
    samples = make_samples()
    layout = make_layout(asked="1,3,5", samples=samples)
    write_folder(tmp_path / "out", layout, samples, model_dtype=torch.float32)
    path = tmp_path / "out" / layout.path(3, 0)
    data = bytearray(path.read_bytes())
    state = layout.load(path).states["5"]
    at = data.index(state.view(torch.int16).numpy().tobytes()[:32])
    data[at : at + 2] = (0x7F7F).to_bytes(2, "little")
    path.write_bytes(data)
    journal_again(tmp_path / "out", path, row=3)
    new = tmp_path / "new"
    argv = [str(tmp_path / "out"), str(new), "--layout", "speculators"]
    assert convert([*argv, "--dtype", "float16"]) == 3
    assert convert([str(new), str(tmp_path / "back")]) == 0
    back = HiddenStates(tmp_path / "back")
    assert 3 not in back.rows.tolist() and len(back) == len(samples) - 1
    for index, row in enumerate(back.rows.tolist()):
        (sample,) = [s for s in samples if (s.row, s.turn) == (row, int(back.turns[index]))]
        assert torch.equal(back[index]["input_ids"], sample.input_ids)
    assert examine(new, deep=True).complete
    rejects = [json.loads(line) for line in (new / "rejects.jsonl").read_text().splitlines()]
    assert [(r["row"], r["reason"]) for r in rejects] == [(3, "non_finite")]


def test_the_record_of_a_converted_folder(tmp_path: Path):
    make(tmp_path / "out")
    convert([str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "modelopt"])
    run = run_json.find(tmp_path / "new")
    assert run.status == "complete" and run.prepared is None and run.converted_from is not None
    assert run.counts is not None and run.counts["samples"] == run.counts["written"] == 7


@pytest.mark.parametrize("inside", ["samples", "samples/00000", "journal"])
def test_links_in_source_or_target_are_refused(tmp_path: Path, inside: str):
    make(tmp_path / "out")
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", "modelopt"]
    assert convert(argv) == 0
    for folder, more in ((tmp_path / "new", ()), (tmp_path / "out", ("--layers", "1"))):
        (folder / inside).rename(tmp_path / "elsewhere")
        (folder / inside).symlink_to(tmp_path / "elsewhere")
        before = sorted((tmp_path / "elsewhere").rglob("*"))
        with pytest.raises(UsageError, match="is a link to"):
            convert([*argv, *more])
        assert sorted((tmp_path / "elsewhere").rglob("*")) == before
        (folder / inside).unlink()
        (tmp_path / "elsewhere").rename(folder / inside)


def test_a_folder_inside_the_source_or_of_extract_is_refused(tmp_path: Path):
    make(tmp_path / "out")
    make(tmp_path / "run", "modelopt")
    with pytest.raises(UsageError, match="or inside it"):
        convert([str(tmp_path / "out"), str(tmp_path / "out" / "new"), "--layout", "modelopt"])
    with pytest.raises(UsageError, match="what extract wrote"):
        convert([str(tmp_path / "out"), str(tmp_path / "run"), "--layout", "modelopt"])
