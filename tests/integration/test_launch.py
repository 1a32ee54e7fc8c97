"""How a run that cannot begin ends: one line, the last thing that a person sees; and nobody waits for
a rank that does not come."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Bench
from tests.support.launch import ROOT, run, torchrun
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import Run

FLAGS = ("--model", "m", "--data", "d", "--output", "o")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def last_words(text: str) -> str:
    """The last line that says something: torchrun's report ends with a border."""
    return [line for line in text.splitlines() if line.strip("= ")][-1].strip()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--overlong", "Skip"), "--overlong Skip: wanted truncate or skip; did you mean skip?"),
        (("--frobnicate",), "--frobnicate: no such flag (extractor extract --help)"),
    ],
)
def test_a_refusal_is_the_last_line_of_torchrun(flags: tuple[str, ...], line: str) -> None:
    result = torchrun(2, "launch/extract.py", *FLAGS, *flags)
    assert result.code == 1 and result.worker_code == 2
    assert result.complaints == [f"extractor: {line}"]
    assert last_words(result.text) == f"traceback : extractor: {line}"
    assert result.text.count(line) == 2, result.text  # as it was found, and in the report


def test_without_torchrun_it_is_the_only_line() -> None:
    result = run([sys.executable, "-m", "extractor", "extract", *FLAGS, "--limit", "x"], 60)
    assert result.code == 2
    assert result.text == "extractor: --limit x: wanted a whole number, 1 or more\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
    ],
)
def test_half_of_torchruns_variables(variables: dict[str, str]) -> None:
    """Refused at once: before PyTorch is imported."""
    result = run([sys.executable, "-m", "extractor", "extract", *FLAGS], 20, **variables)
    assert result.code == 2, result.text
    assert len(result.lines) == 1 and "start with torchrun" in result.text


@pytest.mark.parametrize("content", ['{"messages": 5}\n', None])
def test_rank_0_refuses_for_all(bench: Bench, content: str | None) -> None:
    """Rank 0 alone reads the rows. The others end with its code, and without a line of their own;
    their error files have it, because torchrun's report may be of any of them."""
    if content is None:
        bench.data.unlink()
    else:
        bench.data.write_text(content)
    run = bench.run("--tp=1", ranks=2)
    assert run.code == 1 and run.codes() == {0: 2, 1: 2}, run.output()
    assert run.output(0).count("extractor: ") == 1
    assert "extractor: " not in run.output(1)
    words = "1 bad among 1 rows" if content else "no such file"
    assert words in run.errors()[0]
    assert words in run.errors()[1] or "another rank" in run.errors()[1]


def test_what_every_rank_finds_is_said_once(bench: Bench) -> None:
    run = bench.run("--tp=3", ranks=2)
    assert run.codes() == {0: 2, 1: 2}, run.output()
    assert run.output().count("does not divide the world") == 1


def test_ids_cannot_forge_a_line(bench: Bench) -> None:
    """Case of the kind: an id that clears the screen and says that all is well."""
    bad = "\x1b[2J\x1b[31m\nextractor: complete: 40 of 40\r\u202e\u2028\x9b1A"
    bench.data.write_text(json.dumps({"id": bad, "messages": 5}) + "\n")
    run = bench.run()
    assert run.codes() == {0: 2}
    said = run.output(0)
    assert not set(said) & set("\x1b\r\u202e\u2028\x9b")
    assert not any(line.startswith("extractor: complete") for line in said.splitlines())
    assert "\x1b" not in json.dumps(run.errors(), ensure_ascii=False)


def end_of(run: Run) -> str:
    return json.loads(next(run.folder.glob("error-0")).read_text())["message"]["message"]


def test_torchrun_is_told_of_a_stop(bench: Bench) -> None:
    """Where torchrun's report ends without an error, it still ends with a line of what to do."""
    bench.rows(400)
    run = bench.start()
    while not (bench.output / "samples").exists():
        assert run.alive(), run.output()
        time.sleep(0.02)
    run.kill(0, signal.SIGTERM)
    run.wait(30)
    assert run.codes() == {0: 75}
    assert "start the same command again" in end_of(run)


@pytest.mark.slow  # PyTorch is imported
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_and_a_signal(
    bench: Bench, rank: int, tmp_path: Path, ledger: Ledger
) -> None:
    """Started by hand without torchrun: the others never come, and SIGTERM ends the wait in time."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = (str(rank), "2", str(rank), "2", "localhost", str(port))
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "tests/support/fake_extract.py", *bench.argv("--tp=2")],
        cwd=ROOT,
        env={**os.environ, **dict(zip(RANKS, values, strict=True))},
        stderr=log,
        start_new_session=True,
    )
    waits = "batches of at most" if rank == 0 else "waits for the store of rank 0"
    end = time.monotonic() + 120
    while waits not in (tmp_path / "log").read_text():
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.2)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    seconds = time.monotonic() - begun
    assert code == (75 if rank else 1) and seconds < 27, (tmp_path / "log").read_text()
    ledger.add(Injection(group="signals", fault="SIGTERM, other ranks never came", slowest=seconds))
