"""What torchrun says in variables, and what a rank says in torchrun's error file."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from extractor.errors import RunError, UsageError
from extractor.ranks import world
from extractor.ranks.place import Place
from extractor.ranks.signals import Stopped
from extractor.ranks.world import World
from extractor.torchrun import ADDRESS, ERROR_FILE, RANKS, Launch, record_error

WORLD = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_world() -> None:
    launch = Launch.from_environment(WORLD)
    assert (launch.rank, launch.world_size, launch.nodes, launch.restart) == (1, 4, 2, 3)
    assert (launch.local_rank, launch.local_size) == (1, 2)
    assert (launch.host, launch.port, launch.agent_has_store) == ("localhost", 29500, True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "somewhere"},
        {"MASTER_ADDR": "x", "MASTER_PORT": "y", "SLURM_PROCID": "3"},
    ],
)
def test_a_process_alone(environment: dict[str, str]) -> None:
    """Clusters export an address for programs of all kinds."""
    assert Launch.from_environment(environment) == Launch()


def test_a_world_of_one() -> None:
    launch = Launch.from_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (launch.rank, launch.world_size, launch.host) == (0, 1, "")


@pytest.mark.parametrize("missing", [*RANKS, *ADDRESS])
def test_one_variable_is_missing(missing: str) -> None:
    environment = {name: value for name, value in WORLD.items() if name != missing}
    with pytest.raises(UsageError, match=f"without {missing}: start with torchrun"):
        Launch.from_environment(environment)


@pytest.mark.parametrize("only", RANKS)
def test_one_variable_is_alone(only: str) -> None:
    with pytest.raises(UsageError, match="start with torchrun"):
        Launch.from_environment({only: "1"} if only != "WORLD_SIZE" else {only: "2"})


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4: wanted less than 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2"),
        (
            {"LOCAL_WORLD_SIZE": "5"},
            "LOCAL_WORLD_SIZE=5 does not fit WORLD_SIZE=4: wanted at most 4",
        ),
        ({"GROUP_WORLD_SIZE": "9"}, "GROUP_WORLD_SIZE=9 does not fit"),
        ({"RANK": "-1"}, "RANK=-1: wanted a whole number, 0 or more"),
        ({"RANK": "one"}, "RANK=one: wanted a whole number"),
        ({"RANK": "1.0"}, "RANK=1.0: wanted a whole number"),
        ({"RANK": "\u0661"}, "wanted a whole number"),
        ({"RANK": "9" * 5000}, "wanted a whole number"),
        ({"RANK": ""}, "without RANK"),
        ({"RANK": "1\nextractor: fine"}, r"RANK=1\nextractor: fine: wanted"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: wanted a whole number, 1 or more"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE=x: wanted"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: wanted"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: wanted"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: wanted"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT=x: wanted"),
    ],
)
def test_variables_that_do_not_fit(changed: dict[str, str], wanted: str) -> None:
    with pytest.raises(UsageError) as refused:
        Launch.from_environment(WORLD | changed)
    assert wanted in str(refused.value) and "\n" not in str(refused.value)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Rank 1 of a world whose rank 0, which would host the store, does not come."""
    for name in (*WORLD, ERROR_FILE):
        monkeypatch.delenv(name, raising=False)
    own = {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": "1"}
    for name, value in (WORLD | own).items():
        monkeypatch.setenv(name, value)
    return Place.from_environment(None)


def test_no_rank_0(
    nobody: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "HOST_SECONDS", 1.0)
    monkeypatch.setattr(world, "SAID_AFTER_SECONDS", 0.3)
    with pytest.raises(RunError, match="has not reached the store of rank 0 at localhost:1 in 1 s"):
        World(nobody)
    assert "rank 1 waits for the store of rank 0" in capsys.readouterr().err


def test_no_rank_0_and_a_signal(nobody: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "HOST_SECONDS", 2.0)
    with pytest.raises(Stopped):
        World(nobody, stopping=lambda: True)


def test_a_port_that_is_taken(nobody: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RunError, match="cannot reach the store of rank 0") as refused:
            World(Place.from_environment(None))
    assert "\n" not in str(refused.value)


def shown_by_torchrun(path: Path) -> list[str]:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    return ChildFailedError("launch/extract.py", {0: failure}).format_msg().splitlines()


def test_torchruns_report_ends_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun makes of the file, by torchrun's own code."""
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    record_error(UsageError("--limit 0: wanted more"))
    assert shown_by_torchrun(path)[-2:] == [
        "  traceback : extractor: --limit 0: wanted more",
        "=" * 60,
    ]
    record_error(RunError("id \x1b[2J\nextractor: complete"))
    *_, first, second, _ = shown_by_torchrun(path)
    assert first == r"  traceback : extractor: id \x1b[2J"
    assert second == "    extractor: complete"  # indented: no line of its own


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    try:
        raise ZeroDivisionError("\x1b[2J")
    except ZeroDivisionError as error:
        record_error(error)
    text = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "test_torchrun.py" in text and text.endswith(r"ZeroDivisionError: \x1b[2J" + "\n  ")


def test_no_torchrun_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_error(UsageError("x"))
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "gone" / "error.json"))
    record_error(UsageError("x"))
    assert list(tmp_path.iterdir()) == []
