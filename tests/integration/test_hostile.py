"""Input that means harm: nothing outside the output folder changes, and nothing of a row becomes a
path."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from extractor.verbs import check
from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.fake_engine import make_model, make_rows
from tests.support.zygote import REPOSITORY

IDS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b\\c",
    "..",
    ".",
    "",
    "nul\0byte",
    "x" * 300,
    "same",
    "same",
    "\ud800 half a pair",
    "line\nbreak\r\u2028",
    "-rf",
    "000000001",
]


def tree(path: Path, without: Path) -> dict[str, tuple[int, int]]:
    """Everything under path but not under `without`: what must not change."""
    found: dict[str, tuple[int, int]] = {}
    for top, folders, files in os.walk(path):
        folders[:] = [name for name in folders if Path(top) / name != without]
        for name in (*folders, *files):
            stat = (Path(top) / name).lstat()
            found[str(Path(top) / name)] = (stat.st_size, stat.st_mtime_ns if name in files else 0)
    return found


def test_ids(bench: Bench) -> None:
    make_rows(bench.data, len(IDS), ids=IDS)
    (bench.folder / "runs").mkdir()
    before = tree(bench.folder, bench.output)
    run = bench.run()
    assert run.code == 0, run.output()
    after = tree(bench.folder, bench.output)
    assert {k: v for k, v in after.items() if "/runs/" not in k} == before
    assert sorted(folder.samples(bench.output)) == list(range(len(IDS)))
    for row, path in folder.samples(bench.output).items():
        with safe_open(path, "pt") as file:
            shown = IDS[row].encode("utf-8", "backslashreplace").decode()
            # A row without a usable id may be given its number.
            assert file.metadata()["id"] in (shown, str(row))
    assert check.examine(bench.output, deep=True).complete
    again = bench.run()
    assert again.code == 0 and "0 to do" in again.output(0)


@pytest.mark.parametrize("name", ["samples", "journal", "prepared", "vocab", "samples/00000"])
def test_folders_that_lead_elsewhere(bench: Bench, name: str) -> None:
    assert bench.run().code == 0
    folder.samples(bench.output)[3].unlink()
    elsewhere = bench.folder / "elsewhere"
    (bench.output / name).rename(elsewhere)
    (bench.output / name).symlink_to(elsewhere)
    before = tree(elsewhere, bench.output)
    run = bench.run()
    assert run.codes() == {0: 2}, run.output()
    assert "is a link to" in run.output(0)
    assert tree(elsewhere, bench.output) == before


@pytest.mark.parametrize(
    "name",
    [
        "samples/00000/000000003.safetensors",
        "run.json",
        "rejects.jsonl",
        "journal/0000.jsonl",
        ".lock",
    ],
)
def test_files_that_lead_elsewhere(bench: Bench, name: str) -> None:
    """Replaced or refused; what they lead to keeps every byte."""
    assert bench.run().code == 0
    victim = bench.folder / "victim"
    content = b'{"half a line'
    if name == "run.json":
        content = (bench.output / name).read_bytes()
    victim.write_bytes(content)
    (bench.output / name).unlink()
    (bench.output / name).symlink_to(victim)
    folder.samples(bench.output)[7].unlink()
    run = bench.run()
    assert run.codes()[0] in (0, 1), run.output()
    assert victim.read_bytes() == content
    if run.codes()[0] == 1:
        assert f"errno {40}" in run.output(0), run.output()


@pytest.mark.parametrize("name", ["run.json", "journal/0000.jsonl", ".lock"])
def test_a_fifo_hangs_nobody(bench: Bench, name: str) -> None:
    """And a sample's is replaced."""
    assert bench.run().code == 0
    sample = folder.samples(bench.output)[7]
    for path in (sample, bench.output / name):
        path.unlink()
        os.mkfifo(path)
    run = bench.run()
    assert run.codes()[0] in (1, 2), run.output()
    assert "FIFO" in run.output(0) and name in run.output(0), run.output()
    (bench.output / name).unlink()
    if name == ".lock":
        assert bench.run().code == 0
        folder.assert_complete(bench.output, bench.data, STATES)


def test_lying_config(bench: Bench) -> None:
    """A config of another shape than the folder's run was made with is another model."""
    assert bench.run().code == 0
    before = folder.snapshot(bench.output)
    config = json.loads((bench.model / "config.json").read_text())
    for key, value in (("hidden_size", 32), ("num_hidden_layers", 3), ("vocab_size", 10)):
        (bench.model / "config.json").write_text(json.dumps({**config, key: value}))
        run = bench.run()
        assert run.codes() == {0: 2}, run.output()
    (bench.model / "config.json").write_text("[]")
    assert bench.run().codes() == {0: 2}
    assert folder.snapshot(bench.output) == before
    make_model(bench.model)
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_check_survives_any_file(whole: Bench, data: st.DataObject) -> None:
    """Any bytes of the right size, and any JSON as a header, are called bad and nothing else."""
    path = folder.samples(whole.output)[0]
    good = path.read_bytes()
    values = st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    )
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    key = data.draw(st.sampled_from(sorted(header)))
    header[key] = data.draw(values)
    text = json.dumps(header).encode()
    bad = (len(text).to_bytes(8, "little") + text + good)[: len(good)].ljust(len(good), b"\0")
    if data.draw(st.booleans()):
        bad = data.draw(st.binary(min_size=8, max_size=64)).ljust(len(good), b"\xff")
    try:
        path.write_bytes(bad)
        findings = check.examine(whole.output, deep=True)
        assert list(findings.bad) == ["samples/00000/000000000.safetensors"]
    finally:
        path.write_bytes(good)


@pytest.fixture
def whole(bench: Bench) -> Bench:
    bench.rows(2)
    assert bench.run().code == 0
    return bench


# These speak pickle over a pipe to a process that the program started itself; no file is read so.
OWN_PIPE = {"worker.py", "work.py"}


def test_no_pickle_of_a_file_in_our_own_code() -> None:
    for path in (REPOSITORY / "extractor").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"Unpickler\(|from pickle|allow_pickle=True", text), path
        assert "pickle.load" not in text or path.name in OWN_PIPE, path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, (path, call)
        for call in re.findall(r"np\.load\([^)]*\)", text):
            assert "allow_pickle=False" in call or "mmap" in call, (path, call)
