"""Other projects' layouts through the whole program: replicas, a kill, and going on afterwards."""

import json

import pytest
import torch

from extractor.folder import Folder
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
