"""Other projects' layouts through the whole program: replicas, a kill, and going on afterwards."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from extractor.output.folder import Folder
from extractor.verbs import check
from extractor.verbs.convert import convert
from tests.integration.conftest import Bench
from tests.support import folder
from tests.support.fake_engine import LAYERS, expected
from tests.support.faults import Fault

NAMES = ["specforge", "specforge-dflash", "specforge-dspark", "speculators", "modelopt"]


def assert_right(bench: Bench) -> None:
    """Every row's file holds the ids, and the states that these ids call for."""
    source = Folder.open(bench.output)
    rows = folder.rows_of(bench.data)
    assert [entry.row for entry in source.entries] == list(range(len(rows)))
    for entry in source.entries:
        sample, states = source.load(entry)
        assert sample.input_ids.tolist() == rows[entry.row]["input_ids"]
        for name, state in states.items():
            assert torch.equal(state, expected(sample.input_ids, name)), (entry.row, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_in_the_files_of_the_layout(bench: Bench, name: str) -> None:
    run = bench.run(f"--layout={name}", "--tp=1", ranks=2)
    assert run.code == 0, run.output()
    assert_right(bench)
    layers = json.loads((bench.output / "run.json").read_text())["layers"]
    wanted = {"specforge-dflash": [], "speculators": [str(LAYERS - 1)]}.get(name, ["final"])
    assert layers == ["1", "2", "4", *wanted]
    again = bench.run(f"--layout={name}")
    assert again.code == 0 and "40 done, 0 to do" in again.output(0)


def vocabulary(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t and t2d of 600 tokens, from the files that the layout's project reads."""
    if name == "specforge":
        mapping = torch.load(folder / "vocab" / "vocab_mapping.pt", weights_only=True)
        return mapping["d2t"], mapping["t2d"]
    counts = torch.load(folder / "token_freq.pt", weights_only=True)
    assert len(counts) > 600 and all(type(k) is type(v) is int for k, v in counts.items())
    d2t, t2d = (np.load(folder / f"{key}-600.npy") for key in ("d2t", "t2d"))
    return torch.from_numpy(d2t), torch.from_numpy(t2d)


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_draft_vocabulary_as_the_project_reads_it(bench: Bench, name: str) -> None:
    """By a run, and by convert from a native folder: the same."""
    flags = ("--draft-vocab-size=600", "--layers=1,2,7")
    assert bench.run(f"--layout={name}", *flags).code == 0
    d2t, t2d = vocabulary(name, bench.output)
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(600)) and len(t2d) == 50_000
    assert check.examine(bench.output, deep=True).complete
    native, new = bench.folder / "native", bench.folder / "new"
    assert bench.run(f"--output={native}", *flags).code == 0
    assert convert([str(native), str(new), "--layout", name]) == 0
    for ours, theirs in zip(vocabulary(name, new), (d2t, t2d), strict=True):
        assert torch.equal(ours, theirs)
    assert not list(native.rglob("*.pt")) and not list(native.rglob("*.npy"))


def test_another_layout_is_another_run(bench: Bench) -> None:
    assert bench.run("--layout=modelopt").code == 0
    run = bench.run("--layout=specforge")
    assert run.code != 0 and "layout: modelopt then, specforge now" in run.output(0)


@pytest.mark.parametrize("name", ["speculators", "modelopt"])
@pytest.mark.parametrize("call", ["writev", "rename"])
def test_killed_and_started_again(bench: Bench, name: str, call: str) -> None:
    """Dies inside the 12th file; nothing finished is written twice, and no leftover stays."""
    suffix = {"speculators": "hs_", "modelopt": ".pt"}[name]
    fault = Fault(kind="os_kill", rank=0, call=call, path=suffix, at=12)
    assert bench.run(f"--layout={name}", faults=[fault]).code != 0
    before = Folder.open(bench.output)
    assert 0 < len(before.entries) < 40
    kept = {
        path: path.stat().st_ino
        for path in (bench.output / before.layout.path(e.row, e.turn) for e in before.entries)
    }
    run = bench.run(f"--layout={name}")
    assert run.code == 0, run.output()
    assert_right(bench)
    assert {path: path.stat().st_ino for path in kept} == kept
    assert not list(bench.output.rglob("*.tmp"))
