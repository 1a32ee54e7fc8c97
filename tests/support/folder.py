"""What a right output folder is, said once: by content, not by what the program says of itself."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from tests.support.fake_engine import expected


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as the system sees it; equal only while nobody writes it again."""

    inode: int
    mtime_ns: int
    size: int


def samples(output: Path) -> dict[int, Path]:
    """Row to file, of the final names."""
    found = sorted((output / "samples").rglob("*.safetensors"))
    return {int(path.stem[:9]): path for path in found if not path.name.startswith(".")}


def rows_of(data: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in data.read_text().splitlines()]


def journalled(output: Path) -> dict[int, dict[str, object]]:
    """Row to its last whole journal line."""
    lines: dict[int, dict[str, object]] = {}
    for path in sorted((output / "journal").glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:  # what has no newline is no line
            try:
                value = json.loads(line)
                lines[value["row"]] = value
            except (ValueError, KeyError, TypeError):
                continue
    return lines


def snapshot(output: Path) -> dict[int, Seen]:
    """Finished samples: a journal line, and a file of that size."""
    seen: dict[int, Seen] = {}
    lines = journalled(output)
    for row, path in samples(output).items():
        stat = path.lstat()
        if row in lines and lines[row]["bytes"] == stat.st_size:
            seen[row] = Seen(stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return seen


def assert_sample(path: Path, row: dict[str, object], names: list[str]) -> None:
    """Every number of a file is the one that its ids call for."""
    with safe_open(path, "pt") as file:
        ids = file.get_tensor("input_ids")
        assert ids.tolist() == row["input_ids"], path
        assert file.metadata()["id"] == str(row["id"]).encode("utf-8", "backslashreplace").decode()
        wanted = {"input_ids", "loss_mask", *(f"hidden_states.{name}" for name in names)}
        assert set(file.keys()) == wanted, path
        for name in names:
            state = file.get_tensor(f"hidden_states.{name}")
            assert torch.equal(state, expected(ids, name, state.shape[1])), (path, name)


def assert_whole(output: Path, data: Path, names: list[str]) -> None:
    """Every final name is a whole, right file, whatever was done to the run."""
    rows = rows_of(data)
    for row, path in samples(output).items():
        assert_sample(path, rows[row], names)


def assert_complete(output: Path, data: Path, names: list[str]) -> None:
    """Every row once, right, with a line that tells its size and checksum; nothing else there."""
    rows, found, lines = rows_of(data), samples(output), journalled(output)
    assert sorted(found) == list(range(len(rows)))
    assert_whole(output, data, names)
    for row, path in found.items():
        content = path.read_bytes()
        assert lines[row]["bytes"] == len(content)
        assert lines[row]["xxh3"] == xxhash.xxh3_64(content).hexdigest()
    assert json.loads((output / "run.json").read_text())["status"] == "complete"
    assert not list(output.rglob("*.tmp")), "temporary files are left"
