"""What reaches a terminal: escaped, whatever the encoding, and no traceback when nobody reads."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extractor import progress, terminal
from extractor.progress import ProgressLine, say
from extractor.terminal import complain, readable

ROOT = Path(__file__).parents[2]
# A verb that prints more than a pipe holds.
PRINTS = """
from extractor import cli
def run(verb, arguments):
    for number in range(50_000):
        print(f"{number} caf\\u00e9 \\ud800 \\u2713")
    return 0
cli._run = run
cli.main(["show"])
"""


def test_a_value_cannot_pass_for_a_message() -> None:
    forged = readable("rejected a\x1b[2J\nextractor: complete\r\x9b1A\u202e\u2028\ud800b")
    assert forged.split("\n") == [
        r"rejected a\x1b[2J",
        r"  extractor: complete\r\x9b1A\u202e\u2028\ud800b",
    ]


def test_own_tables_stay_readable() -> None:
    assert readable("two bad rows:\n  a.jsonl:1\n  a.jsonl:2") == (
        "two bad rows:\n  a.jsonl:1\n  a.jsonl:2"
    )


def test_every_way_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = "a\x1b]0;x\x07\nb"
    say(bad)
    complain(bad)
    line = ProgressLine(bad, None, "row")
    monkeypatch.setattr(progress, "PLAIN_SECONDS", -1.0)
    line.set(3, lambda: bad)
    line.close()
    record = logging.LogRecord("x", logging.WARNING, "", 0, "id %s", (bad,), None)
    said = capsys.readouterr().err + terminal._Readable("%(message)s").format(record)
    assert not set(said) & {"\x1b", "\x07"}
    assert said.count(r"a\x1b]0;x\x07") == 5
    assert all(not part.startswith("b") for part in said.split("\n"))


def started(**environment: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", PRINTS],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_reader_that_has_enough() -> None:
    process = started()
    assert process.stdout and process.stderr
    assert process.stdout.readline().startswith(b"0 caf")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 141  # as the shell says of any program that SIGPIPE ended


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", 1, "extractor: reading or writing failed: No space left on device\n"),
        (">&-", 0, ""),
        (">/dev/null 2>&-", 0, ""),
    ],
)
def test_a_stdout_that_takes_nothing(redirected: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$0" {redirected}', PRINTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_an_encoding_that_lacks_characters(environment: dict[str, str]) -> None:
    out, err = started(**environment).communicate(timeout=30)
    assert err == b""
    lines = out.splitlines()
    assert len(lines) == 50_000 and rb"\ud800" in lines[-1] and rb"\u2713" in lines[-1]


def test_a_log_that_takes_no_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("one")
        complain("two")
        ProgressLine("three", 3, "row").close()
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_help_needs_no_torch() -> None:
    code = "import sys; from extractor import cli\ntry:\n cli.main(sys.argv[1:])\n"
    code += "finally:\n assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    for words in (["--help"], ["extract", "--help"], ["prepare", "--help"], ["show", "--help"]):
        subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, stdout=-3)
    for words in (["extract", "--limit", "0"], ["show", "--row", "x"], ["shw"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("extractor: ") and done.stderr.count("\n") == 1
