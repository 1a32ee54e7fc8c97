"""Each layout's files, against what the format's owner says is in them. Their own readers are called
in tests/peers."""

from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file

from extractor.errors import RunError, UsageError
from extractor.layouts import LAYOUTS
from extractor.output.done import find_done
from extractor.states import States
from tests.support.written import NUM_LAYERS, make_layout, make_samples, write_folder

NAMES = sorted(LAYOUTS)


def written(tmp_path: Path, name: str, **kwargs):
    samples = make_samples()
    layout = make_layout(name, samples=samples, **kwargs)
    return layout, write_folder(tmp_path, layout, samples)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(tmp_path: Path, name: str):
    layout, truths = written(tmp_path, name)
    for truth in truths:
        loaded = layout.load(tmp_path / layout.path(truth.sample.row, truth.sample.turn))
        assert torch.equal(loaded.input_ids, truth.sample.input_ids)
        assert torch.equal(loaded.loss_mask, truth.sample.loss_mask)
        assert loaded.loss_mask.dtype == torch.uint8
        assert list(loaded.states) != [] and set(loaded.states) == set(layout.stored)
        for key, state in loaded.states.items():
            assert torch.equal(state, truth.states[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_the_journal_finds_every_file_and_notices_damage(tmp_path: Path, name: str):
    layout, truths = written(tmp_path, name)
    assert layout.numbering is not None
    rows, turns = layout.numbering.rows, layout.numbering.turns
    assert find_done(tmp_path, rows, turns, layout.path).finished.all()
    path = tmp_path / layout.path(truths[2].sample.row, truths[2].sample.turn)
    path.write_bytes(path.read_bytes()[:-1])
    done = find_done(tmp_path, rows, turns, layout.path)
    assert done.damaged == 1 and done.finished.sum() == len(truths) - 1
    with pytest.raises(RunError, match=path.name):
        layout.load(path, path.stat().st_size + 1)


def test_a_file_holds_nothing_of_its_neighbours(tmp_path: Path):
    """torch.save writes a tensor's whole storage: a view of the staged buffer would take it along."""
    layout, truths = written(tmp_path, "modelopt")
    for truth in truths:
        path = tmp_path / layout.path(truth.sample.row, truth.sample.turn)
        states = 4 * layout.hidden * 2 * len(truth.sample)
        assert path.stat().st_size < states + 16 * len(truth.sample) + 4096


def test_specforge_eagle3(tmp_path: Path):
    layout, truths = written(tmp_path, "specforge", asked="4,1,3", final=False)
    assert layout.stored == ("4", "1", "3", "final"), "the target is added"
    truth = truths[2]
    path = tmp_path / layout.path(truth.sample.row, truth.sample.turn)
    content = torch.load(path, weights_only=True, mmap=True)
    assert {key: (tuple(v.shape), v.dtype) for key, v in content.items()} == {
        "input_ids": ((30,), torch.int64),
        "loss_mask": ((30,), torch.int64),
        "aux_hidden_state": ((1, 30, 3 * layout.hidden), torch.bfloat16),
        "hidden_state": ((1, 30, layout.hidden), torch.bfloat16),
    }
    joined = torch.cat([truth.states[k] for k in ("4", "1", "3")], dim=-1)
    assert torch.equal(content["aux_hidden_state"][0], joined)
    assert torch.equal(content["hidden_state"][0], truth.states["final"])


def test_specforge_files_sort_in_row_order(tmp_path: Path):
    layout, truths = written(tmp_path, "specforge")
    paths = [layout.path(t.sample.row, t.sample.turn) for t in truths]
    assert paths == sorted(paths)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.ckpt")) == paths


def test_dflash_keeps_no_last_state_and_dspark_does(tmp_path: Path):
    for name, keys in (
        ("specforge-dflash", {"input_ids", "loss_mask", "hidden_states"}),
        (
            "specforge-dspark",
            {"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"},
        ),
    ):
        layout, truths = written(tmp_path / name, name)
        sample = truths[0].sample
        content = torch.load(tmp_path / name / layout.path(sample.row, sample.turn))
        assert set(content) == keys


def test_speculators(tmp_path: Path):
    layout, truths = written(tmp_path, "speculators")
    last = str(NUM_LAYERS - 1)
    assert layout.stored == ("1", "3", "4", last), "the last layer before the norm, and no final"
    data = datasets.load_from_disk(str(tmp_path))
    assert len(data) == len(truths)
    for i, truth in enumerate(truths):
        tensors = load_file(tmp_path / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(tensors["token_ids"], data[i]["input_ids"])
        assert data[i]["loss_mask"].tolist() == truth.sample.loss_mask.tolist()
        assert int(data[i]["seq_len"]) == len(truth.sample)
        for slot, key in enumerate(layout.stored):
            assert torch.equal(tensors["hidden_states"][:, slot], truth.states[key])


def test_speculators_may_keep_the_last_layer_twice(tmp_path: Path):
    layout, truths = written(tmp_path, "speculators", asked="1,5")
    assert layout.stored == ("1", "5", "5") and layout.captured == ("1", "5")
    tensors = load_file(tmp_path / "hidden_states" / "hs_2.safetensors")
    assert torch.equal(tensors["hidden_states"][:, 1], truths[2].states["5"])
    assert torch.equal(tensors["hidden_states"][:, 2], truths[2].states["5"])


def test_speculators_float8_has_a_scale_a_token(tmp_path: Path):
    layout, truths = written(tmp_path, "speculators", dtype=torch.float8_e4m3fn)
    tensors = load_file(tmp_path / "hidden_states" / "hs_2.safetensors")
    assert tensors["hidden_states"].dtype == torch.float8_e4m3fn
    assert tensors["hidden_states_scales"].shape == (30, 1, 1)
    wide = torch.stack([truths[2].states[k].float() for k in layout.stored], dim=1)
    amax = wide.abs().amax(dim=(1, 2), keepdim=True)
    assert torch.equal(tensors["hidden_states_scales"][:-1], (amax / 448)[:-1])
    loaded = layout.load(tmp_path / "hidden_states" / "hs_2.safetensors")
    assert torch.allclose(loaded.states["4"], wide[:, 2], rtol=1 / 15, atol=float(amax.max()) / 448)


def test_modelopt(tmp_path: Path):
    layout, truths = written(tmp_path, "modelopt")
    truth = truths[2]
    content = torch.load(tmp_path / layout.path(truth.sample.row, 0), weights_only=True)
    assert content["conversation_id"] == truth.sample.id
    assert content["hidden_states_prenorm"] is False
    assert content["loss_mask"].dtype == torch.int64
    assert torch.equal(content["hidden_states"], truth.states["final"])
    joined = torch.cat([truth.states[k] for k in ("1", "3", "4")], dim=-1)
    assert torch.equal(content["aux_hidden_states"], joined)


class Planted:
    """Unpickled without care, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["specforge", "modelopt"])
def test_a_file_with_code_in_it_is_unreadable(tmp_path: Path, name: str):
    layout, truths = written(tmp_path, name)
    path = tmp_path / layout.path(truths[0].sample.row, 0)
    torch.save({"input_ids": Planted(tmp_path / "ran")}, path)
    with pytest.raises(RunError, match=path.name):
        layout.load(path)
    assert not (tmp_path / "ran").exists()


def test_topk_is_refused_where_nobody_would_read_it():
    samples = make_samples()
    for name in NAMES:
        if name == "native":
            assert make_layout(name, samples=samples, topk=4).planes[-1].width == 4
            continue
        with pytest.raises(UsageError, match="reads no logits"):
            make_layout(name, samples=samples, topk=4)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "native"])
def test_no_layer_at_all_is_refused(name: str):
    with pytest.raises(UsageError, match="--layers"):
        LAYOUTS[name].stored_for(States.resolve("final", True, NUM_LAYERS))


@pytest.mark.parametrize("name", ["specforge", "specforge-dflash", "modelopt"])
def test_float8_is_refused_where_nobody_could_read_it(name: str):
    with pytest.raises(UsageError, match="no scales"):
        make_layout(name, samples=make_samples(), dtype=torch.float8_e4m3fn)
