"""The writer's threads and the order of what it forces to disk."""

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.durability import BATCH, write
from extractor import files, pages, scribe, writer, writer_process
from extractor.errors import RunError
from extractor.files import write_files
from extractor.journal import JOURNAL, Journal, read_entries
from extractor.layouts import LAYOUTS
from extractor.records import Batch
from extractor.transfer import HostRing, StagedBatch
from tests.support.written import make_layout, make_samples, write_folder


def test_a_system_without_more_threads_only_has_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = writer.Writer._start_thread, 0

    def few(self: writer.Writer, by_process: bool) -> None:
        nonlocal refused
        if len(self._threads) >= writer.FIRST_THREADS:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(self, by_process)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.005)
        return write_files(*args, **more)

    monkeypatch.setattr(writer.Writer, "_start_thread", few)
    monkeypatch.setattr(writer, "write_files", slow)  # so that samples wait for threads
    write(tmp_path, "none", 6, 64, 32)
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
@pytest.mark.parametrize("name", LAYOUTS)
def test_processes_write_what_threads_write(
    tmp_path: Path, name: str, mode: files.Durability
) -> None:
    samples = make_samples()
    layout = make_layout(name, samples=samples)
    write_folder(tmp_path / "threads", layout, samples, durability=mode)
    write_folder(tmp_path / "processes", layout, samples, durability=mode, processes=True)
    here, there = files_of(tmp_path / "threads"), files_of(tmp_path / "processes")
    assert len(here) >= len(samples) and here == there
    lines = [
        {(entry.row, entry.turn): entry for entry in read_entries(tmp_path / folder)}
        for folder in ("threads", "processes")
    ]
    assert len(lines[0]) == len(samples) and lines[0] == lines[1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_processes_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that starts none, and one where they end before they can write."""

    def none(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(writer_process, "command", lambda *_: ["/bin/false"])
    write(tmp_path / "end", "none", 2, 4, 2, processes=True)
    monkeypatch.setattr(subprocess, "Popen", none)
    write(tmp_path / "none", "none", 2, 4, 2, processes=True)
    for name in ("end", "none"):
        assert len(files_of(tmp_path / name)) == 2 * BATCH


def test_a_process_that_dies_ends_the_run_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    real = writer_process.WriterProcess.is_ready

    def then_killed(self: writer_process.WriterProcess) -> bool:
        good = real(self)
        started.append(self._process.pid)
        os.kill(self._process.pid, signal.SIGKILL)
        return good

    monkeypatch.setattr(writer_process.WriterProcess, "is_ready", then_killed)
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


def test_what_is_in_no_slot_is_written_by_the_thread(tmp_path: Path) -> None:
    process = writer_process.WriterProcess()
    assert process.is_ready()
    ring = HostRing(1 << 16, 1, pinned=False, shared=True)
    buffer = ring.acquire(1 << 16, lambda: None)
    slot = ring.slot_of(buffer)
    assert slot is not None
    inside, outside = buffer.numpy().data[5:9], bytes(writer_process.MOST_INLINE)
    path = str(tmp_path / "file")
    assert process.write(slot, 0, [(path, [outside, b"x"])], "none") is None
    assert not Path(path).exists()
    inside[:] = b"in##"
    done, error = process.write(slot, 0, [(path, [b"top:", inside, b":end"])], "none") or ([], None)
    assert error is None and len(done) == 1 and Path(path).read_bytes() == b"top:in##:end"
    process.close()


def mapped_slots() -> int:
    return sum("memfd:extractor-states" in line for line in Path("/proc/self/maps").open())


def test_a_writer_holds_no_slots_that_the_ring_gave_up(tmp_path: Path) -> None:
    """Or a long sample's buffer would come on top of them."""
    before = mapped_slots()  # of failed runs of other tests, whose tracebacks hold them
    samples = make_samples()
    layout = make_layout("native", samples=samples)
    ring = HostRing(1 << 20, 4, pinned=False, shared=True)
    lines = Journal(tmp_path / JOURNAL / "0000.jsonl")
    team = writer.Writer(tmp_path, lines, ring, layout=layout, threads=3, processes=True)
    for number, sample in enumerate(samples):
        part = Batch.of(number, (sample,))
        buffer = ring.acquire(layout.row_bytes * len(sample), team.check)
        finite = torch.ones(len(layout.planes), len(sample), dtype=torch.bool)
        team.submit(StagedBatch(part, layout.planes, buffer, finite))
        del buffer
    large = ring.acquire((1 << 20) + 1, team.check)  # comes when nothing else is in flight
    end = time.monotonic() + 10
    while mapped_slots() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert mapped_slots() <= before and ring.shared_bytes == 0
    ring.release(large)
    team.close()
    lines.close()
    assert len(files_of(tmp_path)) == len(samples)


def test_a_signal_to_every_process_does_not_end_it() -> None:
    process = writer_process.WriterProcess()
    assert process.is_ready()
    for number in scribe.IGNORED:
        os.kill(process._process.pid, number)
    time.sleep(0.2)
    assert process._process.poll() is None
    process.close()
    assert process._process.returncode == 0


def test_a_python_without_shared_memory_writes_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.can_share()
    monkeypatch.delattr(os, "memfd_create")
    assert not pages.can_share()


def test_a_thread_that_cannot_begin_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(writer, "start_process", broken)
    with pytest.raises(RunError, match="a bug"):
        write(tmp_path, "none", 6, 4, 2, processes=True)


def test_slots_given_back_take_no_memory(tmp_path: Path) -> None:
    """A sample over the budget gets a buffer in place of the slots, which a process still maps."""

    def shared() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["Shmem"].split()[0]) << 10

    size = 256 << 20
    process = writer_process.WriterProcess()
    assert process.is_ready()
    ring = HostRing(size, 2, pinned=False, shared=True)
    buffer = ring.acquire(size, lambda: None)
    buffer.fill_(1)
    slot = ring.slot_of(buffer)
    assert slot is not None
    part = buffer.numpy().data[-4:]
    process.write(slot, ring.oldest_slot, [(str(tmp_path / "file"), [part])], "none")
    filled = shared()
    ring.release(buffer)
    del buffer, part
    assert ring.slot_of(ring.acquire(size + 1, lambda: None)) is None
    assert ring.shared_bytes == 0 and filled - shared() > size * 3 // 4
    process.close()
