"""Each sbatch file, submitted to a real Slurm on this machine: with the real program and a tiny model
on the CPU platform, and with the fake engine where a fault needs its timing."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from extractor.verbs import check
from tests.integration.conftest import STATES, Bench
from tests.slurm.cluster import NEEDED, Cluster
from tests.support import folder
from tests.support.faults import PROCESSES, Fault, to_json
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import REPOSITORY

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid():
        if os.environ.get("EXTRACTOR_REQUIRE_SLURM") == "1":
            pytest.fail(f"no Slurm here: {missing or 'not root'}")
        pytest.skip(f"needs root and Debian's slurm-wlm and munge: {missing}")
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def variables(seconds: float, ranks: int = 1, by: Sequence[Fault] = ()) -> dict[str, str]:
    """A stand-in for extract whose passes take seconds, in the place that job.sh leaves for it.

    The first start of a job is slow and a restart is not; restart counts torchrun's, so all are."""
    slow = Fault(kind="slow_pass", rank=None, seconds=seconds, restart=None)
    faults = to_json([slow, *by])
    assert " " not in faults.replace(", ", ",").replace(": ", ":")
    text = faults.replace(", ", ",").replace(": ", ":")
    return {
        "NPROC": str(ranks),
        "TORCHRUN": f"{sys.executable} -m torch.distributed.run",
        "EXTRACT": f"tests/support/fake_extract.py --faults {text}",
    }


def status(bench: Bench) -> str:
    try:
        return json.loads((bench.output / "run.json").read_text())["status"]
    except FileNotFoundError:
        return ""


def until_samples(bench: Bench, cluster: Cluster) -> None:
    end = time.monotonic() + 90
    while not folder.samples(bench.output):
        assert time.monotonic() < end, cluster.output()
        time.sleep(0.2)


@pytest.mark.parametrize(
    "file, flags",
    [
        ("one_node", ()),
        ("many_nodes", ("--tp=2",)),
        pytest.param("array", (), marks=pytest.mark.slow),
    ],
)
def test_the_real_program(
    build_model: Callable[[str], Path],
    tmp_path: Path,
    cluster: Cluster,
    file: str,
    flags: tuple[str, ...],
) -> None:
    """On the CPU platform; over two nodes with the model's two halves on one each."""
    output = tmp_path / "out"
    job = cluster.submit(
        REPOSITORY,
        f"launch/{file}.sbatch",
        f"--model={build_model('tiny_qwen3')}",
        f"--data={REPOSITORY / 'tests/data/cases/31_ports/input.jsonl'}",
        f"--output={output}",
        "--layers=1,2,4",
        "--device=cpu",
        *flags,
        variables={**variables(0), "EXTRACT": "-m extractor extract", "OMP_NUM_THREADS": "1"},
    )
    ended = {"COMPLETED", "FAILED", "COMPLETED,FAILED"}
    assert cluster.until(job, ended, 400) == "COMPLETED", cluster.output()
    findings = check.examine(output, deep=True)
    assert findings.complete and findings.written == 12, cluster.output()


def test_one_node_completes(bench: Bench, cluster: Cluster) -> None:
    job = cluster.submit(
        REPOSITORY, "launch/one_node.sbatch", *bench.argv(), variables=variables(0)
    )
    assert cluster.until(job, {"COMPLETED", "FAILED"}) == "COMPLETED", cluster.output()
    folder.assert_complete(bench.output, bench.data, STATES)


def test_signalled_before_the_limit(bench: Bench, cluster: Cluster, ledger: Ledger) -> None:
    """What --signal=B:USR2@120 sends: drained, queued again by itself, finished."""
    bench.rows(200)
    job = cluster.submit(
        REPOSITORY, "launch/one_node.sbatch", *bench.argv(), variables=variables(0.5)
    )
    until_samples(bench, cluster)
    cluster.call("scancel", "--batch", "--signal=USR2", job)
    before: dict[int, folder.Seen] = {}
    end = time.monotonic() + 60
    while cluster.restarts(job) == 0:
        assert time.monotonic() < end, cluster.output()
        if status(bench) == "stopped":
            before = folder.snapshot(bench.output)
        time.sleep(0.1)
    assert "requeueing" in cluster.output() and 0 < len(before) < 200
    assert cluster.until(job, {"COMPLETED", "FAILED"}, 240) == "COMPLETED", cluster.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    ledger.add(Injection(group="Slurm", fault="USR2 before the time limit, requeued"))


@pytest.mark.parametrize("by", [[], [PROCESSES]], ids=["threads", "processes"])
def test_preempted(bench: Bench, cluster: Cluster, ledger: Ledger, by: list[Fault]) -> None:
    """scontrol requeue is what a preemption does: SIGTERM to every process of the steps, also to those
    that write, then the queue again."""
    bench.rows(200)
    job = cluster.submit(
        REPOSITORY, "launch/one_node.sbatch", *bench.argv(), variables=variables(0.4, by=by)
    )
    until_samples(bench, cluster)
    cluster.call("scontrol", "requeue", job)
    assert cluster.until(job, {"COMPLETED", "FAILED"}, 240) == "COMPLETED", cluster.output()
    assert cluster.restarts(job) == 1
    folder.assert_complete(bench.output, bench.data, STATES)
    how = ", files by processes" if by else ""
    ledger.add(Injection(group="Slurm", fault=f"preempted and requeued{how}"))


def test_an_array_of_four(bench: Bench, cluster: Cluster, ledger: Ledger) -> None:
    bench.rows(100)
    job = cluster.submit(REPOSITORY, "launch/array.sbatch", *bench.argv(), variables=variables(0))
    ended = {"COMPLETED", "FAILED", "COMPLETED,FAILED"}
    assert cluster.until(job, ended, 240) == "COMPLETED", cluster.output()
    findings = check.examine(bench.output, deep=True)
    assert findings.complete and findings.written == 100
    ledger.add(Injection(group="Slurm", fault="an array of four", times=4))


def test_two_nodes(bench: Bench, cluster: Cluster, ledger: Ledger) -> None:
    """Two slurmd of one host, a replica on each; stopped by a signal that the first node gets."""
    bench.rows(200)
    job = cluster.submit(
        REPOSITORY, "launch/many_nodes.sbatch", *bench.argv("--tp=1"), variables=variables(0.7)
    )
    until_samples(bench, cluster)
    cluster.call("scancel", "--batch", "--signal=USR2", job)
    assert cluster.until(job, {"COMPLETED", "FAILED"}, 300) == "COMPLETED", cluster.output()
    assert cluster.restarts(job) == 1
    assert json.loads((bench.output / "run.json").read_text())["world"]["replicas"] == 2
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="Slurm", fault="two nodes, signalled and requeued"))
