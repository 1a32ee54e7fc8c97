"""A disk that is full, read-only, over quota or broken: every rank ends in time, with one line that
names the path and the errno; after room is made the same command completes."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import PROCESSES, Fault
from tests.support.ledger import Injection, Ledger
from tests.support.zygote import Run

IN_TIME = 30.0


def fault(call: str, path: str, number: int, **where: int) -> Fault:
    return Fault(kind="os_error", rank=None, call=call, path=path, errno=number, **where)


CASES = {
    "full at the first byte": fault("writev", "samples/", errno.ENOSPC, byte=0),
    "full in mid-sample": fault("writev", "samples/", errno.ENOSPC, byte=50_001),
    "full in the journal": fault("write", "journal/", errno.ENOSPC, byte=333),
    "quota in mid-sample": fault("writev", "samples/", errno.EDQUOT, byte=70_003),
    "EIO on a write": fault("writev", "samples/", errno.EIO, at=11),
    "EIO on fsync": fault("fsync", "samples/", errno.EIO, at=7),
    "EIO on fsync of the journal": fault("fsync", "journal/", errno.EIO, at=1),
    "read-only in mid-run": fault("open", "samples/", errno.EROFS, at=13),
    "no permission in mid-run": fault("open", "samples/", errno.EACCES, at=5),
    "EIO on rename": fault("rename", "samples/", errno.EIO, at=9),
}


def assert_one_line(run: Run, number: int, output: Path) -> None:
    lines = [line for line in run.output().splitlines() if line.startswith("extractor: ")]
    assert len(lines) == 1, run.output()
    assert f"errno {number}" in lines[0] and str(output) in lines[0], lines[0]
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("ranks, tp, by", [(2, 2, []), (2, 1, []), (2, 2, [PROCESSES])])
@pytest.mark.parametrize("case", CASES)
def test_faulty_disk(
    bench: Bench, case: str, ranks: int, tp: int, by: list[Fault], ledger: Ledger
) -> None:
    wanted = CASES[case]
    mode = "group" if wanted.call == "fsync" else "none"
    flags = (f"--tp={tp}", f"--durability={mode}")
    slow = Fault(kind="slow_pass", rank=ranks - 1, seconds=0.3)  # the other rank has work left
    begun = time.monotonic()
    run = bench.start(*flags, ranks=ranks, faults=[slow, wanted, *by])
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    assert all(code == 1 for code in run.codes().values()), run.codes()
    if tp == 2:  # with two writers both may run into it
        assert_one_line(run, wanted.errno, bench.output)
    assert any(f"errno {wanted.errno}" in text for text in run.errors().values()), run.errors()
    folder.assert_whole(bench.output, bench.data, STATES)
    assert not list((bench.output / "samples").rglob("*.tmp"))
    before = folder.snapshot(bench.output)
    assert bench.run(*flags, ranks=ranks, faults=by).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    after = folder.snapshot(bench.output)
    assert {row: after[row] for row in before} == before
    ledger.add(Injection(group="disk", fault=case, slowest=seconds))


@pytest.fixture
def small_disk(bench: Bench) -> Iterator[Path]:
    """A real filesystem of 200 KiB under the output folder."""
    bench.output.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=598k", "none", str(bench.output)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield bench.output
    subprocess.run(["umount", str(bench.output)], check=True)


def test_real_full_disk(bench: Bench, small_disk: Path, ledger: Ledger) -> None:
    """Case 34."""
    begun = time.monotonic()
    run = bench.start(ranks=2)
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    assert_one_line(run, errno.ENOSPC, bench.output)
    assert folder.samples(bench.output), "the disk was full before the first sample"
    folder.assert_whole(bench.output, bench.data, STATES)
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert bench.run(ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="disk", fault="a real full filesystem (tmpfs)", slowest=seconds))


def test_real_read_only_disk(bench: Bench, small_disk: Path, ledger: Ledger) -> None:
    subprocess.run(["mount", "-o", "remount,ro,size=20m", str(small_disk)], check=True)
    begun = time.monotonic()
    run = bench.start(ranks=2)
    assert run.wait(IN_TIME) == 1
    seconds = time.monotonic() - begun
    assert_one_line(run, errno.EROFS, bench.output)
    subprocess.run(["mount", "-o", "remount,rw,size=20m", str(small_disk)], check=True)
    assert bench.run(ranks=2).code == 0
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="disk", fault="a read-only filesystem", slowest=seconds))


def test_output_is_a_file(bench: Bench) -> None:
    bench.output.write_text("mine")
    run = bench.run(ranks=2)
    assert run.codes()[0] == 2 and "is a file" in run.output(0)
    assert bench.output.read_text() == "mine"


def test_slow_disk_is_only_slow(bench: Bench, ledger: Ledger) -> None:
    """The model waits for the disk and memory stays flat; nobody takes it for stuck."""
    slow = Fault(kind="slow_os", rank=None, call="writev", path="samples/", seconds=0.5)
    flags = ("--stuck-after=2", "--host-memory=0.0003", "--writers=1")
    run = bench.start(*flags, ranks=2, faults=[slow])
    assert run.wait(90) == 0, run.output()
    folder.assert_complete(bench.output, bench.data, STATES)
    ledger.add(Injection(group="disk", fault="a disk slower than the model"))
