"""extractor.dataset over folders that the real writer wrote."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from extractor.dataset import HiddenStates, LengthBatchSampler, Pad
from extractor.errors import RunError, UsageError
from extractor.output import run_json
from tests.support.written import LENGTHS, make_layout, make_samples, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = make_samples()
    write_folder(tmp_path / "out", make_layout(samples=samples), samples)
    return tmp_path / "out"


def truth_of(folder: Path, **kwargs):
    samples = make_samples()
    return write_folder(folder, make_layout(samples=samples, **kwargs), samples)


def test_items_are_what_was_written(tmp_path: Path):
    truths = truth_of(tmp_path)
    data = HiddenStates(tmp_path)
    assert len(data) == len(LENGTHS)
    assert data.lengths.tolist() == list(LENGTHS)
    assert list(zip(data.rows, data.turns, strict=True)) == [
        (t.sample.row, t.sample.turn) for t in truths
    ]
    for item, truth in zip((data[i] for i in range(len(data))), truths, strict=True):
        assert torch.equal(item["input_ids"], truth.sample.input_ids)
        assert torch.equal(item["loss_mask"], truth.sample.loss_mask)
        for name in ("1", "3", "4", "final"):
            assert torch.equal(item[f"hidden_states.{name}"], truth.states[name])


def test_states_are_chosen_by_name_and_joined_in_the_order_asked(tmp_path: Path):
    truths = truth_of(tmp_path)
    data = HiddenStates(tmp_path, {"aux": ("4", "1"), "target": ("final",)}, dtype=torch.float32)
    item, states = data[2], truths[2].states
    assert set(item) == {"input_ids", "loss_mask", "aux", "target", "index"}
    assert torch.equal(item["aux"], torch.cat([states["4"], states["1"]], dim=-1).float())
    assert torch.equal(item["target"], states["final"].float())
    only = HiddenStates(tmp_path, ("3",), max_tokens=5)
    assert only.lengths.max() == 5 and only[2]["hidden_states.3"].shape[0] == 5


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_float8_is_unscaled(tmp_path: Path, dtype: torch.dtype | None):
    truths = truth_of(tmp_path, dtype=torch.float8_e4m3fn)
    item = HiddenStates(tmp_path, dtype=dtype)[2]
    for name in ("1", "final"):
        got, wanted = item[f"hidden_states.{name}"], truths[2].states[name].float()
        assert got.dtype == (dtype or torch.bfloat16)
        # Three bits of mantissa: half a step of 1/8, and the smallest step of the token's scale.
        step = wanted.abs().amax(dim=-1, keepdim=True) / 448 * 2**-9
        assert bool(((got.float() - wanted).abs() <= wanted.abs() / 15 + step).all())
        assert bool((got[-1] == 0).all())


def test_a_growing_folder_is_taken_in_and_indices_stay(tmp_path: Path):
    samples = make_samples()
    layout = make_layout(samples=samples)
    write_folder(tmp_path, layout, samples[3:])
    data = HiddenStates(tmp_path)
    before = [data.path(i) for i in range(len(data))]
    # A line that is still being written is no sample yet.
    with (tmp_path / "journal" / "0000.jsonl").open("a") as handle:
        handle.write('{"row": 99, "turn": 0, "tok')
    write_folder(tmp_path, layout, samples[:3], journal="0001")
    assert data.refresh() == 3 and data.refresh() == 0
    assert [data.path(i) for i in range(len(before))] == before
    assert len(data) == len(samples)
    assert data[len(before)]["input_ids"].tolist() == samples[0].input_ids.tolist()


def test_reading_is_lazy_and_private(folder: Path):
    data = HiddenStates(folder)
    item = data[2]
    item["hidden_states.1"][0] = 7  # a trainer may write in place; the file does not change
    assert not torch.equal(item["hidden_states.1"][0], data[2]["hidden_states.1"][0])


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_damaged_file_is_named(folder: Path, damage: str):
    data = HiddenStates(folder)
    path = data.path(2)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(RunError, match=path.name):
        data[2]


def test_what_is_not_there_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="it has 1, 3, 4, final"):
        HiddenStates(folder, ("2",))
    with pytest.raises(UsageError, match="wanted a sequence"):
        HiddenStates(folder, "1")
    with pytest.raises(UsageError, match=r"no run\.json"):
        HiddenStates(tmp_path)
    samples = make_samples()
    write_folder(tmp_path / "other", make_layout("modelopt", samples=samples), samples)
    with pytest.raises(UsageError, match="convert"):
        HiddenStates(tmp_path / "other")
    with pytest.raises(IndexError):
        HiddenStates(folder)[len(LENGTHS)]


def test_checksums_are_checked_when_asked_for(folder: Path):
    path = HiddenStates(folder).path(2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    HiddenStates(folder)[2]
    data = HiddenStates(folder, ("1",), verify=True)
    with pytest.raises(RunError, match=rf"{path.name}: its checksum"):
        data[2]
    for index in (0, 1, 3, 4, 5, 6):
        assert len(data[index]["input_ids"]) == LENGTHS[index]
    loader = DataLoader(data, num_workers=1, batch_size=None, sampler=[0, 1, 2])
    with pytest.raises(RunError, match="its checksum"):
        list(loader)


def test_a_journal_that_lies_about_the_tokens(folder: Path):
    journal = folder / "journal" / "0000.jsonl"
    journal.write_text(journal.read_text().replace('"tokens":30', '"tokens":31'))
    with pytest.raises(RunError, match=r"000000003.*the journal says 31 tokens"):
        HiddenStates(folder)[2]


def test_a_stale_record_does_not_answer(folder: Path):
    run = run_json.find(folder)
    run_json.write(folder / run_json.RUN, run_json.replace(run, started="2026-11-30T00:00:00+0000"))
    stale = run_json.replace(run, layers=("5",), started="2020-01-01T00:00:00+0000")
    run_json.write(folder / "run-0-of-4.json", stale)
    assert set(HiddenStates(folder).states) == {
        f"hidden_states.{n}" for n in ("1", "3", "4", "final")
    }


def test_files_may_be_links_as_in_a_hub_cache_and_folders_may_not(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "snapshot"
    for number, file in enumerate(sorted(folder.rglob("*"))):
        if file.is_file():
            (tmp_path / "blobs").mkdir(exist_ok=True)
            file.rename(tmp_path / "blobs" / str(number))
            link = snapshot / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(tmp_path / "blobs" / str(number))
    data = HiddenStates(snapshot, verify=True)
    assert [len(data[i]["input_ids"]) for i in range(len(data))] == list(LENGTHS)
    (snapshot / "samples").rename(tmp_path / "elsewhere")
    (snapshot / "samples").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a link to"):
        HiddenStates(snapshot)


def test_pad_masks_what_it_adds(folder: Path):
    data = HiddenStates(folder, ("final",))
    batch = Pad(pad_id=9, multiple_of=8)([data[0], data[2], data[1]])
    assert batch["input_ids"].shape == (3, 32)
    assert batch["lengths"].tolist() == [7, 30, 1]
    assert batch["index"].tolist() == [0, 2, 1]
    for row, length in enumerate((7, 30, 1)):
        assert batch["attention_mask"][row].sum() == length
        assert batch["input_ids"][row, length:].eq(9).all()
        assert batch["loss_mask"][row, length:].eq(0).all()
        assert batch["hidden_states.final"][row, length:].eq(0).all()
        assert torch.equal(
            batch["hidden_states.final"][row, :length],
            data[(0, 2, 1)[row]]["hidden_states.final"],
        )


def test_worker_processes_give_the_same_batches(folder: Path):
    data = HiddenStates(folder)
    sampler = LengthBatchSampler(data.lengths, max_tokens=40)
    alone = list(DataLoader(data, batch_sampler=sampler, collate_fn=Pad()))
    for method in ("fork", "spawn"):
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=Pad(),
            num_workers=2,
            multiprocessing_context=method,
        )
        for one, other in zip(alone, loader, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    assert len(pickle.dumps(data)) < 10_000


def test_accelerate_prepares_and_shares_the_batches(folder: Path):
    data = HiddenStates(folder, ("final",))
    loader = DataLoader(
        data,
        batch_sampler=LengthBatchSampler(data.lengths, batch_size=2, drop_last=True),
        collate_fn=Pad(),
    )
    prepared = Accelerator(cpu=True).prepare(loader)
    epochs = [[b["index"].tolist() for b in prepared] for _ in range(3)]
    assert all(len(epoch) == len(LENGTHS) // 2 for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1, "set_epoch did not reach the sampler"
    seen = [
        index
        for rank in range(2)
        for batch in prepare_data_loader(
            loader, num_processes=2, process_index=rank, put_on_device=False, even_batches=False
        )
        for index in batch["index"].tolist()
    ]
    assert len(seen) == len(set(seen))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=400),
    by=st.sampled_from([("batch_size", 1), ("batch_size", 7), ("max_tokens", 256)]),
    shuffle=st.booleans(),
)
def test_every_sample_is_in_one_batch(lengths: list[int], by: tuple[str, int], shuffle: bool):
    sampler = LengthBatchSampler(lengths, **{by[0]: by[1]}, shuffle=shuffle)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        if by[0] == "batch_size":
            assert len(batch) <= by[1]
        else:
            assert len(batch) == 1 or longest * len(batch) <= by[1]
    assert list(LengthBatchSampler(lengths, **{by[0]: by[1]}, shuffle=shuffle)) == batches


def test_batches_of_like_length_waste_little():
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 20_000).astype(int) + 1

    def padding(batches: list[list[int]]) -> float:
        padded = sum(int(lengths[b].max()) * len(b) for b in batches)
        return 1 - lengths.sum() / padded

    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    plain = [order[i : i + 16] for i in range(0, len(order), 16)]
    assert padding(plain) > 0.4
    assert padding(list(LengthBatchSampler(lengths, batch_size=16))) < 0.12
    sampler = LengthBatchSampler(lengths, max_tokens=16_384)
    first = list(sampler)
    sampler.set_epoch(1)
    assert padding(first) < 0.12 and list(sampler) != first
