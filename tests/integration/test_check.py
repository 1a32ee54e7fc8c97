"""`extractor check`: what it finds, what it misses without --deep, and what repair leaves to redo."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from extractor.cli import main
from extractor.layouts.base import sample_path
from extractor.prepared.store import PreparedStore
from extractor.verbs import check
from tests.integration.conftest import STATES, Bench
from tests.support import folder


def damage_first_value(path: Path, value: bytes) -> None:
    """Overwrite the last state's first value; size and header stay."""
    content = bytearray(path.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    at = (
        8 + int.from_bytes(content[:8], "little") + header["hidden_states.final"]["data_offsets"][0]
    )
    content[at : at + len(value)] = value
    path.write_bytes(content)


def test_a_whole_folder(bench: Bench) -> None:
    assert bench.run(ranks=2).code == 0
    findings = check.examine(bench.output, deep=True)
    assert findings.complete and findings.written == findings.samples == 40


def test_each_kind_of_damage(bench: Bench) -> None:
    assert bench.run().code == 0
    files = folder.samples(bench.output)
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    files[2].symlink_to("/etc/passwd")
    files[3].with_name("notes.txt").write_text("mine")
    files[3].with_name(f".{files[3].name}.0123abcd.tmp").write_bytes(b"x")
    journal = bench.output / "journal" / "0000.jsonl"
    lines = [line for line in journal.read_text().splitlines() if json.loads(line)["row"] != 4]
    journal.write_text("\n".join(lines) + "\n")
    before = folder.snapshot(bench.output)
    findings = check.examine(bench.output)
    assert findings.missing == ["0", "2"]
    assert list(findings.bad) == [sample_path(1, 0)]
    assert findings.unjournalled == [sample_path(4, 0)]
    assert len(findings.strays) == 3
    check.repair(bench.output, findings)
    assert Path("/etc/passwd").exists()
    notes = files[3].with_name("notes.txt")
    assert notes.read_text() == "mine" and findings.kept == ["samples/00000/notes.txt"]
    notes.unlink()
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    assert check.examine(bench.output, deep=True).complete
    after = folder.snapshot(bench.output)
    kept = set(before) - {1, 4}
    assert {row: after[row] for row in kept} == {row: before[row] for row in kept}


@pytest.mark.parametrize(
    "value, wrong", [(b"\xc0\x7f", "not finite"), (b"\x01\x02", "checksum")], ids=["nan", "flip"]
)
def test_only_deep_sees_content(bench: Bench, value: bytes, wrong: str) -> None:
    assert bench.run().code == 0
    damage_first_value(folder.samples(bench.output)[7], value)
    assert check.examine(bench.output).complete
    findings = check.examine(bench.output, deep=True)
    assert list(findings.bad) == [sample_path(7, 0)] and wrong in findings.bad[sample_path(7, 0)]


def test_zeros_after_a_power_cut(bench: Bench) -> None:
    """What --durability none does not promise, and what brings it back."""
    assert bench.run().code == 0
    for row in (3, 9):
        path = folder.samples(bench.output)[row]
        path.write_bytes(b"\0" * path.stat().st_size)
    findings = check.examine(bench.output, deep=True)
    assert len(findings.bad) == 2
    check.repair(bench.output, findings)
    assert bench.run().code == 0
    folder.assert_complete(bench.output, bench.data, STATES)


def test_shards(bench: Bench) -> None:
    for index in (0, 1, 3):
        assert bench.run(f"--shard={index}/4").code == 0
    missing = check.examine(bench.output).missing
    assert 0 < len(missing) < 20
    assert bench.run("--shard=2/4").code == 0
    assert check.examine(bench.output).complete


@pytest.mark.parametrize("layout", ["specforge", "speculators", "modelopt"])
def test_other_layouts(bench: Bench, layout: str) -> None:
    run = bench.run(f"--layout={layout}")
    assert run.code == 0, run.output()
    assert check.examine(bench.output, deep=True).complete
    journal = (bench.output / "journal" / "0000.jsonl").read_text().splitlines()
    assert len(journal) == 40
    facts = check._facts(bench.output)
    path = bench.output / facts.layout.path(5, 0)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    (bench.output / facts.layout.path(6, 0)).unlink()
    findings = check.examine(bench.output, deep=True)
    assert list(findings.bad) == [facts.layout.path(5, 0)] and findings.missing == ["6"]
    check.repair(bench.output, findings)
    assert bench.run(f"--layout={layout}").code == 0
    assert check.examine(bench.output, deep=True).complete


def test_verb(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run().code == 0

    def code(*flags: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["check", str(bench.output), *flags])
        return ended.value.code

    assert code() == 0 and "complete: 40 of 40" in capsys.readouterr().err
    folder.samples(bench.output)[5].unlink()
    assert code("--json") == 1
    assert json.loads(capsys.readouterr().out)["missing"] == ["5"]
    assert code("--deep", "--repair") == 1
    with pytest.raises(SystemExit) as ended:
        main(["check", str(bench.folder)])
    assert ended.value.code == 2


@pytest.mark.slow
def test_a_million_by_journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work by journal for a million samples, without the disk's part: under a minute."""
    assert bench.run().code == 0
    count = 1_000_000
    rows = np.arange(count)
    facts = check._facts(bench.output)
    monkeypatch.setattr(facts.store, "rows", rows)
    monkeypatch.setattr(facts.store, "turns", np.zeros(count, np.int16))
    journal = bench.output / "journal" / "0000.jsonl"
    line = '{{"row": {}, "turn": 0, "id": "x", "tokens": 5, "bytes": 9, "xxh3": "00"}}\n'
    journal.write_text("".join(line.format(row) for row in range(count)))
    sizes = {sample_path(row, 0): 9 for row in range(count)}
    begun = time.monotonic()
    findings = check.Findings()
    good = check._by_journal(bench.output, facts, sizes, findings)
    assert len(good) == count and not findings.missing
    assert time.monotonic() - begun < 60
    assert isinstance(facts.store, PreparedStore)
