"""The fake engine drives the whole program: the ground that the fault tests stand on."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from extractor.output import run_json
from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.fake_engine import HIDDEN
from tests.support.faults import PROCESSES, Fault, to_json
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import REPOSITORY


@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("by", [[], [PROCESSES]], ids=["threads", "processes"])
def test_every_sample_once_and_right(bench: Bench, ranks: int, tp: int, by: list[Fault]) -> None:
    run = bench.run(f"--tp={tp}", ranks=ranks, faults=by)
    assert run.code == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    assert len(list((bench.output / "journal").iterdir())) == ranks // tp


def test_nothing_left_is_no_work(bench: Bench) -> None:
    assert bench.run().code == 0
    before = folder.snapshot(bench.output)
    for ranks in (1, 2, 2):
        run = bench.run(ranks=ranks)
        assert run.code == 0
        assert "40 done, 0 to do" in run.output(0)
    assert folder.snapshot(bench.output) == before


def test_a_file_holds_its_own_states_and_no_more(bench: Bench) -> None:
    """Case 35: a short sample of a batch of long ones is a short file, byte for byte."""
    bench.rows(30)
    assert bench.run("--batch-tokens=4096").code == 0
    rows = folder.rows_of(bench.data)
    sizes: set[int] = set()
    for row, path in folder.samples(bench.output).items():
        tokens = len(rows[row]["input_ids"])  # pyright: ignore[reportArgumentType]
        content = path.read_bytes()
        header = int.from_bytes(content[:8], "little")
        states = len(STATES) * HIDDEN * 2
        assert len(content) == 8 + header + tokens * (states + 8 + 1)
        metadata = json.loads(content[8 : 8 + header])["__metadata__"]
        assert all(isinstance(value, str) for value in metadata.values())
        sizes.add(len(content))
    assert min(sizes) * 3 < max(sizes), "no short sample was in a batch of long ones"


@pytest.mark.slow
def test_under_torchrun(bench: Bench) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["tests/support/fake_extract.py", *bench.argv("--tp=1")]
    # Slurm's variables say something else: torchrun's win.
    environment = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    folder.assert_complete(bench.output, bench.data, STATES)
    assert json.loads((bench.output / "run.json").read_text())["world"]["replicas"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_restarts_under_torchrun(bench: Bench, nodes: int, ledger: Ledger) -> None:
    """A rank dies, torchrun starts all again, and the rest is done; over two nodes, which are two
    agents that meet on the loopback, as well."""
    bench.rows(200)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # After a restart agents may change their ranks, and each counts its own restarts.
    faults = [Fault(kind="kill", rank=1, at=2, restart=0), Fault(kind="slow_pass", seconds=0.1)]
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2"]
    command += [f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1"]
    command += ["tests/support/fake_extract.py", "--faults", to_json(faults)]
    agents = [
        subprocess.Popen(
            [*command, *bench.argv("--tp=1")],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(nodes)
    ]  # fmt: skip
    texts = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * nodes, texts
    lives = re.findall(r"([0-9,]+) done, [0-9,]+ to do", "".join(texts))
    assert len(lives) > 1 and any(life != "0" for life in lives), texts
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="--max-restarts", fault=f"real torchrun, {nodes} nodes, one dies"))


@pytest.mark.slow
def test_torchruns_own_port_is_taken(bench: Bench) -> None:
    """Case 31 (a): torchrun says so at once. With --standalone (README) the same command runs, for
    nothing here listens on a port of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    script = ["tests/support/fake_extract.py", *bench.argv("--tp=1")]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, code in (([f"--master-port={port}"], 1), (["--standalone"], 0)):
            done = subprocess.run(
                [*command, *flags, *script],
                cwd=REPOSITORY,
                env={**os.environ, "MASTER_PORT": str(port)},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == code, done.stderr
            if code:
                assert "EADDRINUSE" in done.stderr and not bench.output.exists()
    folder.assert_complete(bench.output, bench.data, STATES)


@pytest.mark.slow
def test_torchrun_names_the_rank_that_failed(bench: Bench) -> None:
    """Its report has that rank as the root cause, with its own error."""
    fault = Fault(kind="raise", rank=1, at=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["tests/support/fake_extract.py", "--faults", to_json([fault])]
    done = subprocess.run(
        [*command, *bench.argv()], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    report = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in report and "injected at pass 1" in report, done.stderr


def test_run_json_keeps_what_the_run_before_said(bench: Bench) -> None:
    """A start that finds nothing to do says so, and not in the place of the run that wrote."""
    assert bench.run(ranks=2).code == 0
    first = run_json.find(bench.output)
    assert first.earlier is None and first.replicas
    assert bench.run().code == 0
    again = run_json.find(bench.output)
    assert again.status == "complete" and again.replicas is None and again.earlier is not None
    (kept,) = again.earlier
    whole = run_json.as_json(first)
    assert kept == json.loads(json.dumps(whole)) and kept["world"]["ranks"] == 2
    assert again.last_work == first.last_work
