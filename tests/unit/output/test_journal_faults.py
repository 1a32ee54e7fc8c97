"""A journal whose disk fails: no line ever follows half a line."""

import errno
import os
from pathlib import Path

import pytest

from extractor.files import json_line, sweep_temporaries, write_pending, write_whole
from extractor.output.journal import Journal, read_entries
from extractor.records import Reject


def reject(row: int) -> Reject:
    return Reject(row=row, id=f"id {row} \ud800", source="f:1", reason="r", detail="d")


def test_half_a_line_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal" / "0000.jsonl")
    journal.rejected(reject(0))
    real, room = os.write, 7

    def full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = real(descriptor, bytes(data)[:room])
        room -= part
        return part

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space") as raised:
        journal.rejected(reject(1))
    assert raised.value.filename == str(tmp_path / "journal" / "0000.jsonl")
    room = 10_000
    with pytest.raises(OSError):
        journal.rejected(reject(2))
    journal.close()
    monkeypatch.undo()
    assert [entry.row for entry in read_entries(tmp_path)] == [0]
    again = Journal(tmp_path / "journal" / "0000.jsonl")
    again.rejected(reject(3))
    again.close()
    assert [entry.row for entry in read_entries(tmp_path)] == [0, 3]


LINE = json_line({"row": 0, "turn": 0, "bytes": 1, "xxh3": "0"})


@pytest.mark.parametrize("tail", [b"", b'{"row": 1', LINE[:-1], b"\0" * 100, b"x" * 200_000])
def test_a_cut_tail_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "journal" / "0000.jsonl"
    path.parent.mkdir()
    path.write_bytes(LINE * 3 + tail)
    # What reads it before the next writer comes must not count what that one drops.
    assert len(list(read_entries(tmp_path))) == 3
    Journal(path).close()
    assert path.read_bytes().endswith(b"\n") and len(list(read_entries(tmp_path))) == 3


def test_opening_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("half a line")
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0000.jsonl").symlink_to(victim)
    with pytest.raises(OSError):
        Journal(tmp_path / "journal" / "0000.jsonl")
    assert victim.read_text() == "half a line"


def test_sweeping_leaves_other_rows_alone(tmp_path: Path) -> None:
    mine = write_pending(tmp_path / "000000001.safetensors", [b"x"])
    other = write_pending(tmp_path / "000000002-01.safetensors", [b"x"])
    write_whole(tmp_path / "000000003.safetensors", [b"x"], sync=True)
    names = {"000000001.safetensors", "000000003.safetensors"}
    assert sweep_temporaries(tmp_path, names) == 1
    assert not Path(mine.temporary).exists() and Path(other.temporary).exists()
    assert (tmp_path / "000000003.safetensors").exists()
