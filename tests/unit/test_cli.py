"""How a verb's end becomes an exit code and a line."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from extractor import cli
from extractor.errors import PeerError, RunError, SharedUsageError, UsageError
from extractor.ranks.signals import Stopped
from extractor.torchrun import ERROR_FILE


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What torchrun is told of this rank."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setattr(cli, "FIRST_WORD_SECONDS", 0.0)
    path = tmp_path / "error.json"
    return lambda: (
        json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
        if path.exists()
        else ""
    )


def raising(error: BaseException) -> Callable[[], int]:
    def verb() -> int:
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("--limit 0: no"), 2, "extractor: --limit 0: no"),
        (RunError("the disk"), 1, "extractor: the disk"),
        (OSError(13, "Permission denied", "/x\n"), 1, r"extractor: /x\n: Permission denied"),
        (PeerError("rank 1: the disk", elsewhere=True), 1, "extractor: rank 1: the disk"),
        (PeerError("rank 1: the disk", elsewhere=False), 1, ""),
        (PeerError("rows", elsewhere=False, code=2), 2, ""),
        (Stopped("SIGTERM"), 75, ""),
    ],
)
def test_ends(
    error: BaseException,
    code: int,
    said: str,
    report: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.outcome(raising(error)) == code
    shown = capsys.readouterr().err.rstrip("\n").replace("\n  ", r"\n")
    assert shown == said
    assert report() and "Traceback" not in report()


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_what_all_ranks_find_one_shows(
    rank: str,
    times: int,
    report: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert cli.outcome(raising(SharedUsageError("--tp 3"))) == 2
    assert capsys.readouterr().err.count("--tp 3") == times
    assert report() == "extractor: --tp 3"


def test_a_rank_waits_for_the_one_that_has_the_word(
    report: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's SIGTERM says that it has spoken, and ends the wait."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "FIRST_WORD_SECONDS", 60.0)
    monkeypatch.setattr(cli.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    try:
        assert cli.outcome(raising(SharedUsageError("--tp 3"))) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report() == "extractor: refused, for the reason that another rank gives"


@pytest.mark.parametrize(("code", "said"), [(0, ""), (3, "rejects.jsonl"), (75, "same command")])
def test_ends_that_are_no_errors(code: int, said: str, report: Callable[[], str]) -> None:
    assert cli.outcome(lambda: code) == code
    assert said in report() and bool(said) == bool(report())


def test_a_bug_is_shown_whole(
    report: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.outcome(raising(ZeroDivisionError("\x1b[2J"))) == 1
    said = capsys.readouterr().err
    assert "test_cli.py" in said and r"ZeroDivisionError: \x1b[2J" in said.splitlines()[-1]
    assert r"ZeroDivisionError: \x1b[2J" in report()


def test_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["extrcat"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "extractor: extrcat: no such verb; did you mean extract? (extractor --help)\n"
    )
