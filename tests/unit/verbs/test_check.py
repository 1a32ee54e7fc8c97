"""check on folders that the real writer wrote: what --repair may touch, links, and converted folders."""

import json
import shutil
from pathlib import Path

import pytest

from extractor.errors import UsageError
from extractor.layouts import LAYOUTS, Layout
from extractor.output import run_json
from extractor.output.run_json import RUN
from extractor.verbs import check as module
from extractor.verbs.check import check, examine, repair
from extractor.verbs.convert import convert
from extractor.verbs.report import report
from tests.support.ledger import Injection, Ledger
from tests.support.written import make_layout, make_samples, write_folder


def make(output: Path, name: str = "native") -> Layout:
    samples = make_samples()
    layout = make_layout(name, asked="1,3,5", samples=samples)
    write_folder(output, layout, samples, prepared=True)
    return layout


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Names that look like this program's, and are not quite.
MINE = [
    "notes.txt", "mine.tmp", ".mine.tmp", "000000003.safetensors.bak", "00000003.safetensors",
    "000000003-2.safetensors", "000000003.pt.safetensors", ".000000003.safetensors.tmp",
    ".notes.txt.0123abcd.tmp", "hs_3.safetensors.old", "000000003.tmp", ".mine.0123abcd-1.tmp",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_repair_touches_no_name_that_this_program_does_not_make(tmp_path: Path, name: str) -> None:
    layout = make(tmp_path, name)
    samples = (tmp_path / layout.path(2, 0)).parent
    places = [tmp_path, tmp_path / layout.root, samples, samples / "mine", tmp_path / "journal"]
    (samples / "mine").mkdir()
    for place in places:
        for file in MINE:
            (place / file).write_text("mine")
    # A row's number in the folder of another thousand, and files as another layout names them.
    for file in ("samples/00007/000000003.safetensors", "hidden_states/hs_x.safetensors"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("mine")
    path = tmp_path / layout.path(2, 0)
    whole = path.read_bytes()
    path.write_bytes(b"cut")
    left = path.with_name(f".{path.name}.0123abcd12f-3.tmp")
    left.write_bytes(b"half")
    (tmp_path / ".run.json.0123abcd12f-0.tmp").write_bytes(b"{")
    before = everything(tmp_path)
    assert check([str(tmp_path), "--deep", "--repair"]) == 1
    gone = {str(left.relative_to(tmp_path)), layout.path(2, 0), ".run.json.0123abcd12f-0.tmp"}
    after = everything(tmp_path)
    assert {k: v for k, v in before.items() if k not in gone} == {
        k: v for k, v in after.items() if k != ".lock"
    }
    assert not gone & set(after) and whole


@pytest.mark.parametrize("inside", ["samples", "samples/00000", "journal", "prepared"])
@pytest.mark.parametrize("flags", [[], ["--repair"], ["--deep", "--repair"]])
def test_a_folder_that_is_a_link_is_refused(
    tmp_path: Path, inside: str, flags: list[str], ledger: Ledger
) -> None:
    make(tmp_path / "out")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "out" / inside).rename(elsewhere)
    (tmp_path / "out" / inside).symlink_to(elsewhere)
    (elsewhere / "thesis.safetensors").write_text("mine")
    before = everything(elsewhere)
    with pytest.raises(UsageError, match="is a link to"):
        check([str(tmp_path / "out"), *flags])
    assert everything(elsewhere) == before
    ledger.add(Injection(group="damaged folder", fault="a link for a folder inside, check"))


@pytest.mark.parametrize("inside", ["samples", "samples/00000"])
def test_a_folder_that_becomes_a_link_meanwhile(
    tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """Between the look and the removal; the link's target has the very names that are to go."""
    layout = make(tmp_path / "out")
    (tmp_path / "out" / layout.path(2, 0)).write_bytes(b"cut")
    findings = examine(tmp_path / "out")
    assert list(findings.bad) == [layout.path(2, 0)]
    folder = module.Folder.open(tmp_path / "out")
    shutil.copytree(tmp_path / "out" / inside, tmp_path / "elsewhere")
    before = everything(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "out" / inside)
    (tmp_path / "out" / inside).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(module, "_facts", lambda output: folder)
    repair(tmp_path / "out", findings)
    assert findings.repaired == 0 and everything(tmp_path / "elsewhere") == before
    ledger.add(Injection(group="damaged folder", fault="a link appears during check --repair"))


def test_a_link_under_a_samples_name_goes_and_its_target_stays(tmp_path: Path) -> None:
    layout = make(tmp_path / "out")
    path = tmp_path / "out" / layout.path(2, 0)
    path.rename(tmp_path / "thesis")
    path.symlink_to(tmp_path / "thesis")
    assert check([str(tmp_path / "out"), "--repair"]) == 1
    assert not path.is_symlink() and (tmp_path / "thesis").exists()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_converted_folder(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "out")
    argv = [str(tmp_path / "out"), str(tmp_path / "new"), "--layout", name]
    assert convert(argv) == 0
    new = tmp_path / "new"
    assert check([str(new), "--deep"]) == 0
    # A file that is gone, one that changed, and a line that is lost: the numbers of others stay.
    layout = module.Folder.open(new).layout
    (new / layout.path(3, 0)).unlink()
    changed = bytearray((new / layout.path(4, 0)).read_bytes())
    changed[len(changed) // 2] ^= 1
    (new / layout.path(4, 0)).write_bytes(changed)
    journal = new / "journal" / "0000.jsonl"
    lines = [line for line in journal.read_text().splitlines(True) if json.loads(line)["row"] != 0]
    journal.write_text("".join(lines))
    findings = examine(new, deep=True)
    assert findings.missing == ["3"] and list(findings.bad) == [layout.path(4, 0)]
    assert findings.unjournalled == [layout.path(0, 0)] and not findings.strays
    assert check([str(new), "--deep", "--repair"]) == 1
    assert convert(argv) == 0 and check([str(new), "--deep"]) == 0
    assert "complete: 7 of 7 samples whole" in capsys.readouterr().err


def test_a_conversion_that_was_interrupted_is_not_complete(tmp_path: Path) -> None:
    make(tmp_path / "out")
    convert([str(tmp_path / "out"), str(tmp_path / "new")])
    journal = tmp_path / "new" / "journal" / "0000.jsonl"
    lines = journal.read_text().splitlines(True)
    journal.write_text("".join(lines[:3]))
    findings = examine(tmp_path / "new")
    assert not findings.complete and findings.samples == 7 and findings.written == 3


def test_a_stale_record_of_another_shard_count_does_not_answer(tmp_path: Path) -> None:
    make(tmp_path, "modelopt")
    run = run_json.find(tmp_path)
    stale = run_json.replace(run, layout="native", dtype="float32", layers=("1",))
    run_json.write(tmp_path / "run-0-of-4.json", stale)
    assert check([str(tmp_path), "--deep"]) == 0


def test_a_report_in_the_folder_is_ours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make(tmp_path)
    assert report([str(tmp_path)]) == 0
    assert check([str(tmp_path)]) == 0


def test_any_of_several_journals_may_tell_the_truth(tmp_path: Path) -> None:
    """A repaired folder: the line of a journal that comes last by name is the older one."""
    make(tmp_path)
    line = json.loads((tmp_path / "journal" / "0000.jsonl").read_text().splitlines()[2])
    stale = {**line, "xxh3": "0" * 16}
    (tmp_path / "journal" / "s1of2-0000.jsonl").write_text(json.dumps(stale) + "\n")
    assert check([str(tmp_path), "--deep"]) == 0
    assert convert([str(tmp_path), str(tmp_path.with_name("new"))]) == 0


def test_a_line_of_rubbish_in_a_journal_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    with (tmp_path / "journal" / "0000.jsonl").open("a") as journal:
        journal.write("\x1b[2J{\n")
    assert check([str(tmp_path)]) == 0
    assert "no journal line: journal/0000.jsonl, byte" in capsys.readouterr().err


def test_names_of_files_do_not_move_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    (tmp_path / "samples" / "00000" / "\x1b[31m\nextractor: all is well").write_text("")
    assert check([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "\x1b" not in error and "\nextractor" not in error


@pytest.mark.parametrize("flags", [["--repair"], []])
def test_nothing_is_made_where_no_folder_of_ours_is(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "nosuch", tmp_path / "mine"):
        with pytest.raises(UsageError):
            check([str(folder), *flags])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["mine"]
    assert not (tmp_path / RUN).exists()


def test_a_folder_that_was_sent_without_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """check cannot say what is missing; what reads samples needs no rows."""
    make(tmp_path / "out", "speculators")
    shutil.rmtree(tmp_path / "out" / "prepared")
    with pytest.raises(UsageError, match=r"store\.json: is not there.*same extract command"):
        check([str(tmp_path / "out")])
    assert convert([str(tmp_path / "out"), str(tmp_path / "new")]) == 0
    assert check([str(tmp_path / "new"), "--deep"]) == 0
    assert "complete: 7 of 7" in capsys.readouterr().err
