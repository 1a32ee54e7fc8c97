"""A folder with one file damaged: each verb ends in one line that names the folder, or in a good result,
and in bounded time. Nothing of a person's is touched."""

import json
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from extractor.dataset import HiddenStates
from extractor.errors import RunError, UsageError
from extractor.output.done import find_done
from extractor.output.folder import check_output
from extractor.printable import printable
from extractor.rows.prepare import stores_in
from extractor.verbs import show as show_module
from extractor.verbs.check import check as check_verb
from extractor.verbs.convert import convert
from extractor.verbs.report.facts import gather
from extractor.verbs.report.page import render
from extractor.verbs.verify import verify
from tests.support.ledger import Injection, Ledger
from tests.support.written import make_layout, make_samples, write_folder

SECONDS = 20  # for all verbs on one damaged folder; each takes a fraction of one
DEEP = b'{"a":' + b"[" * 100_000
VALUES: list[bytes] = [
    b"null", b"true", b"-1", b"0", b"1.5", b"1e400", b"-1e400", b"NaN", b"1" + b"0" * 30,
    b"9" * 5000, b"9223372036854775807", b"4294967296", b'""', b'"x"', b'"\\ud800"', b'"\\u0000"',
    b'"\\u001b[31m"', b'"../../etc/passwd"', b"[]", b"{}", b"[[]]", b'[1,"a",null]', b'["\\u2028"]',
    DEEP, b"[" * 5000 + b"]" * 5000,
]  # fmt: skip

# For the ledger: each with all verbs over the folder, one after another.
FAULTS = {
    "damage_bytes": "a file cut, or changed in its text, header or bytes; all verbs",
    "damage_place": "a FIFO, socket, folder, link or nothing for a file; all verbs",
}


@pytest.fixture(scope="module", params=["native", "speculators", "modelopt", "specforge-dspark"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder, with a prepared store and rejects."""
    output = tmp_path_factory.mktemp(request.param) / "out"
    samples = make_samples()
    layout = make_layout(request.param, asked="1,3,5", samples=samples)
    write_folder(output, layout, samples, prepared=True)
    reject = {"row": 1, "turn": 0, "source": "rows.jsonl:2", "id": "\x1b[2J"}
    line = json.dumps({**reject, "reason": "not_json", "detail": "a\nb"})
    (output / "rejects.jsonl").write_text(line + "\n")
    (output / "notes.txt").write_text("mine")
    return output


# Damage -------------------------------------------------------------------------------------------


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """One value somewhere in it replaced, or a key gone."""
    text = json.loads(data)
    mark = "@@damage@@"
    at: Any = text
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        below = at[key]
        if not isinstance(below, dict | list) or not below or chance.random() < 0.3:
            break
        at = below
    if isinstance(at, dict) and chance.random() < 0.2:
        del at[key]
        return json.dumps(text).encode()
    at[key] = mark
    return json.dumps(text).encode().replace(json.dumps(mark).encode(), chance.choice(VALUES))


def mutate_text(path: Path, data: bytes, chance: random.Random) -> bytes:
    """A change that knows what the file is."""
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = mutate_json(lines[at], chance)
        return b"\n".join(lines) + b"\n"
    if path.suffix == ".json":
        return mutate_json(data, chance)
    if path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = mutate_json(data[8 : 8 + length], chance)
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    at = chance.randrange(len(data))
    number = chance.choice([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 7])
    return data[:at] + number + data[at + 8 :]


def damage_bytes(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    at = chance.randrange(len(data))
    kind = chance.randrange(7)
    if kind == 0:
        data = data[:at]
    elif kind == 1:
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    elif kind == 2:
        data = bytes(chance.randrange(256) for _ in range(64)).ljust(len(data), b"\xff")
    elif kind == 3:
        data = chance.choice([b"", DEEP, b"\0" * len(data), chance.choice(VALUES) + b"\n"])
    else:
        data = mutate_text(path, data, chance)
    path.write_bytes(data)


def damage_place(path: Path, chance: random.Random) -> None:
    """Something else, or nothing, under its name."""
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        bound = Path(f"/tmp/extractor-{os.getpid()}.sock")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(bound))
        bound.rename(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(path.name)


# What every verb does -----------------------------------------------------------------------------


@contextmanager
def bounded() -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"not done in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read_all(output: Path, **settings: bool) -> None:
    data = HiddenStates(output, **settings)
    for index in range(len(data)):
        data[index]


def resume(output: Path) -> None:
    """What extract reads of a folder before it goes on."""
    samples = make_samples()
    layout = make_layout(samples=samples)
    check_output(output)
    for store in stores_in(output):
        list(store.rejects)
        [store.sample(i) for i in range(len(store))]
    assert layout.numbering is not None
    find_done(output, layout.numbering.rows, layout.numbering.turns, layout.path)


def show_all(output: Path) -> None:
    for row in range(4):
        show_module.show_row(output, row, write=lambda text: None)


def verbs(output: Path, new: Path, whole_report: bool) -> dict[str, Callable[[], object]]:
    return {
        "check": lambda: check_verb([str(output), "--workers", "1"]),
        "check --deep": lambda: check_verb([str(output), "--deep", "--workers", "1"]),
        "show": lambda: show_all(output),
        "resume": lambda: resume(output),
        "dataset": lambda: read_all(output),
        "dataset that verifies": lambda: read_all(output, verify=True),
        "verify": lambda: verify([str(output), "--model", str(output / "nosuchmodel")]),
        "report": lambda: render(gather(output, 3)) if whole_report else gather(output, 3),
        "convert": lambda: convert([str(output), str(new), "--workers", "1"]),
        "check --repair": lambda: check_verb([str(output), "--deep", "--repair", "--workers", "1"]),
    }


def run_all(output: Path, new: Path, what: str, whole_report: bool) -> dict[str, str]:
    """Every verb's line, where it gave one."""
    said: dict[str, str] = {}
    for verb, act in verbs(output, new, whole_report).items():
        try:
            with bounded():
                act()
        except (UsageError, RunError) as error:
            said[verb] = str(error)
            assert printable(said[verb]) == said[verb], (what, verb, said[verb])
            assert len(said[verb]) < 2000, (what, verb)
        except Exception as error:
            raise AssertionError(f"{verb} on {what}: {type(error).__name__} {error}") from error
    return said


@pytest.fixture(autouse=True)
def plain_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(model: str, trust_remote_code: bool) -> Callable[[list[int]], str]:
        return lambda ids: "x" * len(ids)

    monkeypatch.setattr(show_module, "_decoder", decoder)


def fuzz(whole: Path, tmp_path: Path, count: int, seed: int, ledger: Ledger) -> None:
    chance = random.Random(seed)
    outside = tmp_path / "outside"
    outside.mkdir()
    files = sorted(
        path.relative_to(whole)
        for path in whole.rglob("*")
        if path.is_file() and path.name != "notes.txt"
    )
    told = 0
    slowest = dict.fromkeys(FAULTS, 0.0)
    times = Counter[str]()
    for number in range(count):
        output, new = tmp_path / f"{number}" / "out", tmp_path / f"{number}" / "new"
        shutil.copytree(whole, output)
        file = chance.choice(files) if chance.random() < 0.7 else Path("run.json")
        act = damage_place if chance.random() < 0.3 else damage_bytes
        act(output / file, chance)
        what = f"{file}, {act.__name__} {number} of seed {seed}"
        # Pictures take a second: of some folders, those whose run.json the page shows among them.
        begun = time.monotonic()
        told += bool(run_all(output, new, what, whole_report=number % 12 == 11))
        assert (output / "notes.txt").read_text() == "mine"
        shutil.rmtree(output.parent)
        times[act.__name__] += 1
        slowest[act.__name__] = max(slowest[act.__name__], time.monotonic() - begun)
    assert told > count / 4  # it was noticed, often
    for name, fault in FAULTS.items():
        if times[name]:
            injected = Injection(
                group="damaged folder", fault=fault, times=times[name], slowest=slowest[name]
            )
            ledger.add(injected)


def test_some_dozen_damaged_folders(whole: Path, tmp_path: Path, ledger: Ledger) -> None:
    fuzz(whole, tmp_path, 12, seed=1, ledger=ledger)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_damaged_folders(whole: Path, tmp_path: Path, seed: int, ledger: Ledger) -> None:
    fuzz(whole, tmp_path, 200, seed, ledger)
