"""The writer's threads and processes, and the order of what it forces to disk."""

import ctypes
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.durability import BATCH, write
from extractor import files, pages
from extractor.errors import RunError
from extractor.files import write_files
from extractor.layouts import Layout
from extractor.layouts.planes import FP8, Plane
from extractor.layouts.safetensors import Framed
from extractor.output.journal import JOURNAL, Journal, read_entries
from extractor.records import Batch, Sample
from extractor.run import meter
from extractor.write import child
from extractor.write import process as process_module
from extractor.write.buffers import HostRing
from extractor.write.order import Group, Order, Outcome
from extractor.write.pool import Processes
from extractor.write.process import Parcel, WriterProcess, command
from extractor.write.staging import StagedBatch
from extractor.write.writer import FIRST_THREADS, Workers, Writer
from tests.support.written import make_layout, make_samples, write_folder

PIDFD_GETFD = 438  # on every architecture of Linux


def test_a_system_without_more_threads_only_has_fewer(tmp_path: Path) -> None:
    started = refused = 0

    def few(thread: threading.Thread) -> None:
        nonlocal started, refused
        if started >= FIRST_THREADS:
            refused += 1
            raise RuntimeError("can't start new thread")
        started += 1
        thread.start()

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.005)
        return write_files(*args, **more)

    workers = Workers(start=few, write=slow)  # slow, so that samples wait for threads
    write(tmp_path, "none", 6, 64, 32, workers=workers)
    assert refused == 1
    assert len(list(read_entries(tmp_path))) == 6 * BATCH
    assert len(list(tmp_path.glob("samples/*/*.safetensors"))) == 6 * BATCH


def test_no_line_for_a_file_whose_folder_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Any, named: Any = None) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(files, "sync_path", broken)
    with pytest.raises(RunError, match="Input/output error"):
        write(tmp_path, "file", 1, 4, 2)
    assert not list(read_entries(tmp_path))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in ("samples", "hidden_states", "data")
        for path in (folder / name).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("mode", ["none", "file", "group"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("native", {}),
        ("native", {"topk": 3}),
        ("native", {"dtype": FP8, "topk": 2}),
        ("speculators", {}),
        ("speculators", {"dtype": FP8}),
        ("specforge", {}),
    ],
)
def test_processes_write_what_threads_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    more: dict[str, Any],
    mode: files.Durability,
) -> None:
    samples = make_samples()
    layout = make_layout(name, samples=samples, **more)
    write_folder(tmp_path / "threads", layout, samples, durability=mode)
    sent, real = [], WriterProcess.send

    def send(self: WriterProcess, parcel: Parcel) -> None:
        sent.extend(parcel.files)
        real(self, parcel)

    monkeypatch.setattr(WriterProcess, "send", send)
    write_folder(tmp_path / "processes", layout, samples, durability=mode, processes=True)
    here, there = files_of(tmp_path / "threads"), files_of(tmp_path / "processes")
    assert len(here) >= len(samples) and here == there
    assert len(sent) == (len(samples) if isinstance(layout, Framed) else 0)
    lines = [
        {(entry.row, entry.turn): entry for entry in read_entries(tmp_path / folder)}
        for folder in ("threads", "processes")
    ]
    assert len(lines[0]) == len(samples) and lines[0] == lines[1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_processes_threads_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system that starts none, and one where they end before they can write."""

    def none(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    none_begins = Workers(command=lambda *_: ["/bin/false"])
    write(tmp_path / "end", "none", 2, 4, 2, processes=True, workers=none_begins)
    monkeypatch.setattr(subprocess, "Popen", none)
    write(tmp_path / "none", "none", 2, 4, 2, processes=True)
    said = [text for text in caplog.messages if "threads write instead" in text]
    assert "did not start" in said[0] and "Resource temporarily unavailable" in said[-1]
    for name in ("end", "none"):
        assert len(files_of(tmp_path / name)) == 2 * BATCH


def test_a_process_that_dies_ends_the_run_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    real = WriterProcess.receive

    def then_killed(self: WriterProcess) -> Outcome | None:
        outcome = real(self)
        if outcome is None:
            started.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return outcome

    monkeypatch.setattr(WriterProcess, "receive", then_killed)
    with pytest.raises(RunError, match="a writer process ended by signal 9"):
        write(tmp_path, "none", 2, 4, 2, processes=True)
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_a_folder_that_is_no_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"folder\xe9")
    write(folder, "group", 1, 4, 2, processes=True)
    assert len(files_of(folder)) == BATCH
    (folder / "samples" / "00000").rename(folder / "samples" / "moved")
    (folder / "samples" / "00000").write_text("in the way")
    with pytest.raises(RunError, match="errno 20"):
        write(folder, "none", 1, 4, 2, processes=True)


def test_a_disk_error_of_a_process_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "00000").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write .*samples/00000/.*errno 20"):
        write(tmp_path, "none", 1, 4, 2, processes=True)


def staged_alone(
    team: Writer,
    ring: HostRing,
    layout: Layout,
    number: int,
    sample: Sample,
    of_device: Sequence[torch.Tensor] = (),
) -> StagedBatch:
    """A batch of one sample, landed, of whatever its buffer held."""
    buffer = ring.acquire(layout.row_bytes * len(sample), team.check)
    finite = torch.ones(len(layout.planes), len(sample), dtype=torch.bool)
    part = Batch.of(number, (sample,))
    return StagedBatch(part, layout.planes, buffer, finite, None, list(of_device))


def test_what_is_in_no_slot_is_written_by_a_thread(tmp_path: Path) -> None:
    samples = make_samples((7, 1, 300, 12, 5))
    layout = make_layout("native", samples=samples)
    ring = HostRing(layout.row_bytes * 40, 2, pinned=False, shared=True)
    lines = Journal(tmp_path / JOURNAL / "0000.jsonl")
    team = Writer(tmp_path, lines, ring, layout=layout, threads=2, processes=True)
    team.wait_until_ready()
    slots: list[bool] = []
    for number, sample in enumerate(samples):
        staged = staged_alone(team, ring, layout, number, sample)
        staged.buffer.tensor.fill_(number)
        slots.append(staged.buffer.slot is not None)
        team.submit(staged)
    team.close()
    lines.close()
    assert slots == [True, True, False, True, True]
    for number, sample in enumerate(samples):
        file = tmp_path / layout.path(sample.row, sample.turn)
        loaded = layout.load(file)
        assert torch.equal(loaded.input_ids, sample.input_ids)
        assert all((s.view(torch.uint8) == number).all() for s in loaded.states.values())


def ready_process() -> WriterProcess:
    process = WriterProcess()
    assert process.receive() is None and process.ready
    return process


def mapped_slots() -> int:
    return sum("memfd:extractor-states" in line for line in Path("/proc/self/maps").open())


def test_a_writer_holds_no_slots_that_the_ring_gave_up(tmp_path: Path) -> None:
    """Or a long sample's buffer would come on top of them."""
    before = mapped_slots()  # of failed runs of other tests, whose tracebacks hold them
    samples = make_samples()
    layout = make_layout("native", samples=samples)
    ring = HostRing(1 << 20, 4, pinned=False, shared=True)
    lines = Journal(tmp_path / JOURNAL / "0000.jsonl")
    team = Writer(tmp_path, lines, ring, layout=layout, threads=3, processes=True)
    for number, sample in enumerate(samples):
        team.submit(staged_alone(team, ring, layout, number, sample))
    large = ring.acquire(4 << 20, team.check)  # comes when nothing else is in flight
    end = time.monotonic() + 10
    while mapped_slots() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert mapped_slots() <= before and ring.shared_bytes == 0
    ring.release(large)
    team.close()
    lines.close()
    assert len(files_of(tmp_path)) == len(samples)


def test_a_signal_to_every_process_does_not_end_it() -> None:
    process = ready_process()
    for number in child.IGNORED:
        os.kill(process.pid, number)
    time.sleep(0.2)
    assert not process.has_ended()
    process.hang_up()
    process.join()
    assert process._process.returncode == 0


def test_a_python_without_shared_memory_writes_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.can_share()
    monkeypatch.delattr(os, "memfd_create")
    assert not pages.can_share()


def test_processes_that_cannot_begin_end_the_run(tmp_path: Path) -> None:
    def broken(*_: int) -> list[str]:
        raise KeyError("a bug")

    with pytest.raises(RunError, match="a bug"):
        write(tmp_path, "none", 6, 4, 2, processes=True, workers=Workers(command=broken))


def slow_to_start(descriptor: int, parent: int) -> list[str]:
    first, *rest = command(descriptor, parent)
    return ["/bin/sh", "-c", 'sleep 2; exec "$@"', "sh", first, *rest]


def test_batches_land_while_the_first_process_starts(tmp_path: Path) -> None:
    """Or the device would hold what was captured until then."""
    samples = make_samples()
    layout = make_layout("native", samples=samples)
    ring = HostRing(1 << 20, len(samples), pinned=False, shared=True)
    lines = Journal(tmp_path / JOURNAL / "0000.jsonl")
    team = Writer(
        tmp_path,
        lines,
        ring,
        layout=layout,
        threads=2,
        processes=True,
        workers=Workers(command=slow_to_start),
    )
    staged: list[StagedBatch] = []
    for number, sample in enumerate(samples):
        staged.append(staged_alone(team, ring, layout, number, sample, [torch.zeros(4)]))
        team.submit(staged[-1])
    time.sleep(0.5)
    assert not files_of(tmp_path) and not any(batch._sources for batch in staged)
    team.close()
    lines.close()
    assert len(files_of(tmp_path)) == len(samples)


@dataclass
class Around:
    """A layout of whose files only the bytes around the states are asked for."""

    inline: int

    def frame(self, sample: Sample) -> tuple[bytes, bytes]:
        return bytes(self.inline), b""


class Pool:
    """Worker processes without a writer, and what came of their orders."""

    def __init__(self, count: int, inline: int = 100) -> None:
        self.errors: list[BaseException] = []
        self.settled: list[Outcome] = []
        self.ring = HostRing(1 << 16, 1, pinned=False, shared=True)
        self.layout = Around(inline)
        self.processes = Processes(
            cast(Framed, self.layout),
            self.ring,
            "none",
            count,
            count,
            go_on=lambda: not self.errors,
            settle=lambda _, outcome: self.settled.append(outcome),
            decline=lambda _: None,
            fail=self.errors.append,
        )

    def orders(self, folder: Path, count: int) -> list[Order]:
        """Of a file of one token each."""
        buffer = self.ring.acquire(self.ring.slot_bytes, lambda: None)
        self.ring.release(buffer)  # there for as long as the ring is
        sample = make_samples((1, 1, 1))[0]
        planes = (Plane("", (), torch.float32, 0),)
        batch = Batch.of(0, (sample,))
        staged = StagedBatch(batch, planes, buffer, torch.ones(1, 1, dtype=torch.bool))
        paths = [str(folder / str(number)) for number in range(count)]
        return [Order(staged, Group(1), 1, [(0, sample, path)]) for path in paths]


def test_a_process_that_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    """In a file, say; what it is sent meanwhile may be longer than a socket holds."""
    pool = Pool(3)
    team, settled = pool.processes, pool.settled
    team.wait_until_ready()
    assert team.size == len(team._processes)
    stopped = team._processes[0].pid
    os.kill(stopped, signal.SIGSTOP)
    for folder in (tmp_path / "small", tmp_path / "large"):
        folder.mkdir()
    try:
        team.put(pool.orders(tmp_path / "small", 3))  # one each
        wait_for(lambda: len(settled) == 2)
        pool.layout.inline = 300_000
        team.put(pool.orders(tmp_path / "large", 20))
        wait_for(lambda: len(settled) == 22)
    finally:
        os.kill(stopped, signal.SIGCONT)
    team.close()
    assert len(settled) == 23 and not pool.errors and len(list(tmp_path.glob("*/*"))) == 23


def test_all_is_settled_before_the_processes_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their maps of whole buffers take a while to go, which is no time of a run's files."""
    may_go, join = threading.Event(), WriterProcess.join

    def late(process: WriterProcess, seconds: float) -> None:
        may_go.wait(20)
        join(process, seconds)

    monkeypatch.setattr(WriterProcess, "join", late)
    pool = Pool(2)
    team = pool.processes
    team.put(pool.orders(tmp_path, 5))
    team.drain()
    assert len(pool.settled) == 5 and team._thread.is_alive() and not pool.errors
    may_go.set()
    team.close()
    assert not team._thread.is_alive() and not team._processes


def test_a_runs_memory_has_its_processes_in_it(tmp_path: Path) -> None:
    ring = HostRing(1 << 20, 2, pinned=False, shared=True)
    lines = Journal(tmp_path / JOURNAL / "0000.jsonl")
    layout = make_layout("native", samples=make_samples())
    team = Writer(tmp_path, lines, ring, layout=layout, threads=3, at_once=True, processes=True)
    team.wait_until_ready()
    ring.make_ready(2)
    seen = meter.HostMemory(bound=0, before=0)
    seen.look(ring, team)
    alone = meter.resident_bytes()
    team.close()
    lines.close()
    each = (seen.most - alone - (2 << 20)) / 3
    assert 4 << 20 < each < 40 << 20 and not team.pids


def wait_for(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_end_that_the_socket_does_not_tell_is_noticed(tmp_path: Path) -> None:
    """Another child may hold the other side open; and the pool is never idle meanwhile."""
    pool = Pool(2)
    team, errors = pool.processes, pool.errors
    team.wait_until_ready()
    assert team.size == len(team._processes)
    victim = team._processes[0]
    held = Path(f"/proc/{victim.pid}/fd")
    numbers = [int(fd.name) for fd in held.iterdir() if str(fd.readlink()).startswith("socket:")]
    opened = os.pidfd_open(victim.pid)
    other = _take_descriptor(opened, numbers[0])
    try:
        os.kill(victim.pid, signal.SIGKILL)
        end = time.monotonic() + 15
        for order in pool.orders(tmp_path, 1000):
            if errors or time.monotonic() > end:
                break
            team.put([order])
            time.sleep(0.1)
        assert errors and "signal 9" in str(errors[0])
    finally:
        os.close(other)
        os.close(opened)
    team.close()


def _take_descriptor(process: int, number: int) -> int:
    """A copy of another process's descriptor, as a child forked at the wrong moment would have."""
    found = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    if found < 0:
        pytest.skip(os.strerror(ctypes.get_errno()))
    return found


def test_a_descriptor_that_does_not_arrive_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(process_module.socket, "send_fds", refuse)
    with pytest.raises(RunError, match="errno 24"):
        write(tmp_path, "group", 6, 4, 2, processes=True)


def test_a_thread_with_a_bug_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise KeyError("a bug")

    monkeypatch.setattr(Group, "add", broken)
    with pytest.raises(RunError, match="a bug"):
        write(tmp_path, "none", 6, 4, 2)


def test_slots_given_back_take_no_memory(tmp_path: Path) -> None:
    """A sample over the budget gets a buffer in place of the slots, which a process still maps."""

    def shared() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["Shmem"].split()[0]) << 10

    size = 256 << 20
    process = ready_process()
    ring = HostRing(size, 2, pinned=False, shared=True)
    buffer = ring.acquire(size, lambda: None)
    buffer.tensor.fill_(1)
    slot = buffer.slot
    assert slot is not None
    files = [(os.fsencode(tmp_path / "file"), b"top:", [(size - 4, 4)], b":end")]
    process.send(Parcel(slot, 0, files, "none", cast(Order, None)))
    outcome = process.receive()
    assert outcome is not None and outcome.error is None and len(outcome.done) == 1
    assert (tmp_path / "file").read_bytes() == b"top:\1\1\1\1:end"
    filled = shared()
    ring.release(buffer)
    assert ring.acquire(size + 1, lambda: None).slot is None
    assert ring.shared_bytes == 0 and filled - shared() > size * 3 // 4
    process.hang_up()
    process.join()
