"""What the benchmarks of several GPUs stand on: rates on one clock, children that end, results that
outlive a late end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_gpus, gpu_watch
from benchmarks.bench_gpus import Machine, Replicas, Row, Setting, slow_together
from benchmarks.children import Child, Deadline, Failed, alive, run
from benchmarks.together import Together, together
from tests.support.launch import ROOT

SOON = 20.0


# Rates --------------------------------------------------------------------------------------------


def replica(began: float, seconds: float, rate: float) -> dict[str, Any]:
    """A replica of run.json with ten points."""
    points = [[i * seconds / 10, round(rate * i * seconds / 10)] for i in range(11)]
    return {"began": 1000.0 + began, "timeline": points}


def test_replicas_side_by_side_add_up() -> None:
    found = together([replica(0, 10, 400), replica(1, 9, 300)])
    assert found.rates == (pytest.approx(400), pytest.approx(300))
    assert found.rate == pytest.approx(700)
    assert (found.begin, found.end) == (pytest.approx(1001.9), pytest.approx(1010))
    assert found.share == pytest.approx(0.81)


def test_a_replica_that_came_late_is_no_half_of_the_machine() -> None:
    """Each one's own rate would add up to two machines', of which one was idle all the time."""
    found = together([replica(0, 10, 400), replica(9, 1, 400)])
    assert found.share < 0.1
    problems = slow_together(Replicas(80, found, 0.0, {}), part=1.0)
    assert problems == ["all worked in 9% of the run only"]


def test_replicas_that_never_met_have_no_rate() -> None:
    never = {"began": 1010.0, "timeline": [[0.0, 0]]}
    assert together([replica(0, 10, 400), never]).rate == 0.0


def test_what_is_wrong_with_slow_replicas() -> None:
    both = Together(0.0, 9.0, (200.0, 200.0), 0.9)
    assert slow_together(Replicas(80, both, 0.01, {}), part=0.97) == []
    assert slow_together(Replicas(80, both, 0.2, {}), part=0.5) == [
        "50% of their number times one",
        "writers ended 20.0% apart",
    ]


def test_nvidia_smi_by_gpu_and_time() -> None:
    text = "GPU-a, 90, 1980, 650.5\nGPU-b, [N/A], 1980, 600\nGPU-b, 40, 1200, 300\n"
    samples = [each for at in (1.0, 2.0, 9.0) for each in gpu_watch.parse(text, at)]
    assert len(samples) == 6
    assert gpu_watch.means(samples, 0.5, 2.5) == [
        gpu_watch.Mean("GPU-a", 2, 90, 1980, 650),
        gpu_watch.Mean("GPU-b", 2, 40, 1200, 300),
    ]


# Attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "asked", "family", "backend"),
    [
        ("9.0", (), "tiny_dsv3", ("attention_backend=triton",)),
        ("9.0", (), "tiny_llama", ()),
        ("9.0", ("attention_backend=flashinfer",), "tiny_dsv3", ()),
        ("10.0", (), "tiny_dsv3", ()),
        ("", (), "tiny_dsv3", ()),
    ],
)
def test_no_fa3_where_it_has_no_kernel(
    tmp_path: Path, capability: str, asked: tuple[str, ...], family: str, backend: tuple[str, ...]
) -> None:
    machine = Machine(2, "GPU", 140.0, capability)
    assert setting(tmp_path, machine, asked).attention(family) == backend


def setting(folder: Path, machine: Machine, sglang: tuple[str, ...] = ()) -> Setting:
    return Setting(
        machine=machine,
        work=folder,
        output=folder / "out",
        small=folder,
        large=folder,
        layers="1",
        longest=10,
        batch_tokens=None,
        samples=1,
        repeats=1,
        jobs=1,
        sglang=sglang,
        dummy=True,
        families=(),
    )


# Children -----------------------------------------------------------------------------------------

# Starts helpers and says their ids; then does what its last line says.
PARENT = """
import subprocess, sys, time
def helper(code, **how):
    started = subprocess.Popen([sys.executable, "-c", code], **how)
    print(started.pid, flush=True)
SLEEP = "import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
LEAVE = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', %r], "
LEAVE += "start_new_session=True).pid, flush=True)"
"""
HELPERS = {
    "of its group": "helper(SLEEP)",
    "a session of its own": "helper(SLEEP, start_new_session=True)",
    "deaf": "helper(DEAF, start_new_session=True)",
    "an orphan": "subprocess.run([sys.executable, '-c', LEAVE % SLEEP])",
}


@pytest.mark.parametrize("end", ["pass", "time.sleep(600)"], ids=["by itself", "too late"])
@pytest.mark.parametrize("helper", HELPERS.values(), ids=HELPERS)
def test_nothing_that_a_child_started_outlives_it(tmp_path: Path, helper: str, end: str) -> None:
    script = f"{PARENT}\n{helper}\ntime.sleep(0.5)\n{end}"
    child = Child([sys.executable, "-c", script], tmp_path / "log")
    until = Deadline.after(SOON)
    while not child.text.strip() and until.left:
        time.sleep(0.02)
    time.sleep(0.2)  # for the deaf one to be deaf
    processes = child.pids
    assert len(processes) == 2 and int(child.text.split()[-1]) in processes
    begun = time.monotonic()
    if end == "pass":
        assert child.wait(Deadline.after(SOON)) == 0
    else:
        with pytest.raises(Failed, match="did not end within"):
            child.wait(Deadline.after(0.1))
    assert not alive(processes)
    assert time.monotonic() - begun < SOON


def test_a_child_that_was_killed_leaves_no_orphans(tmp_path: Path) -> None:
    """As torchrun's ranks are left, when it is torchrun that dies."""
    script = f"{PARENT}\n{HELPERS['a session of its own']}\ntime.sleep(600)"
    child = Child([sys.executable, "-c", script], tmp_path / "log")
    until = Deadline.after(SOON)
    while not child.text.strip() and until.left:
        time.sleep(0.02)
    orphan = int(child.text)
    processes = child.pids
    os.kill(min(processes.keys() - {orphan}), signal.SIGKILL)
    while not child.ended:
        time.sleep(0.02)
    assert alive(processes) == [orphan]
    child.end()
    assert not alive(processes)


def test_nothing_is_started_when_no_time_is_left(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no time was left"):
        run([sys.executable, "-c", "pass"], tmp_path / "log", Deadline.after(0))
    assert not (tmp_path / "log").exists()


# Results that outlive what ends them ------------------------------------------------------------


def test_a_part_that_fails_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(_: Setting, __: Deadline) -> Iterator[Row]:
        yield Row("first", bench_gpus.OK, "measured")
        raise Failed("the second did not end")

    monkeypatch.setitem(bench_gpus.PARTS, "kill", (part, 1.0))
    found = bench_gpus.attempt("kill", setting(tmp_path, Machine(2, "", 0.0)), Deadline.after(1))
    assert found["status"] == bench_gpus.FAILED
    assert [(row["what"], row["status"]) for row in found["rows"]] == [
        ("first", "ok"),
        ("kill", "failed"),
    ]
    assert "measured" in capsys.readouterr().out


# The benchmark with parts that need no model.
INTERRUPTED = """
import sys
from benchmarks import bench_gpus
from benchmarks.children import run
def quick(setting, deadline):
    yield bench_gpus.Row("quick", bench_gpus.OK, "measured")
def endless(setting, deadline):
    yield bench_gpus.Row("begun", bench_gpus.OK, "measured")
    run([sys.executable, "-c", "import time; time.sleep(600)"], setting.work / "log", deadline)
bench_gpus.PARTS |= {"startup": (quick, 60), "kill": (endless, 600), "share": (quick, 60)}
bench_gpus.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_signal_leaves_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-c",
        INTERRUPTED,
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "o"),
    ]
    process = subprocess.Popen(
        [*command, "--only", "startup,kill,share"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("kill "):
            break
    # What ended is there before the signal comes.
    parts = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(part["part"], part["status"]) for part in parts] == [("startup", "ok")]
    begun = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert time.monotonic() - begun < SOON
    assert process.returncode == 1
    found = json.loads(rest.splitlines()[-1])
    assert found["ended_by"] == number.name and not found["ok"]
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "startup": "ok",
        "kill": "failed",
    }
    assert [row["what"] for row in found["parts"]["kill"]["rows"]] == ["begun", "kill"]
