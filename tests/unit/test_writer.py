"""The writer's threads and the order of what it forces to disk."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.durability import BATCH, write
from extractor import writer
from extractor.errors import RunError
from extractor.journal import read_entries
from extractor.store import write_pending


def test_a_system_without_more_threads_only_has_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = writer.Writer._start_thread, 0

    def few(self: writer.Writer) -> None:
        nonlocal refused
        if len(self._threads) >= writer.FIRST_THREADS:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(self)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.005)
        return write_pending(*args, **more)

    monkeypatch.setattr(writer.Writer, "_start_thread", few)
    monkeypatch.setattr(writer, "write_pending", slow)  # so that samples wait for threads
    write(tmp_path, "none", 6, 64, 32)
    assert refused == 1
    assert len(list(read_entries(tmp_path))) == 6 * BATCH
    assert len(list(tmp_path.glob("samples/*/*.safetensors"))) == 6 * BATCH


def test_no_line_for_a_file_whose_folder_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Any, named: Any = None) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(writer, "sync_path", broken)
    with pytest.raises(RunError, match="Input/output error"):
        write(tmp_path, "file", 1, 4, 2)
    assert not list(read_entries(tmp_path))
