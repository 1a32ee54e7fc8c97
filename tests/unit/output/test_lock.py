"""Byte-range locks between processes; within one process they never exclude each other."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from extractor.errors import UsageError
from extractor.output.lock import ALL_ROWS, LOCK, FolderLock


def in_child(action: Callable[[], None]) -> bool:
    """Whether the action ends without UsageError, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except UsageError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1), "the child broke"
    return code == 0


def take(output: Path, begin: int, end: int) -> Callable[[], None]:
    return lambda: FolderLock(output, print).rows(begin, end)


@pytest.mark.parametrize(
    "begin, end, free",
    [(0, ALL_ROWS, False), (0, 10, True), (10, 20, False), (19, 25, False), (20, 30, True)],
)
def test_rows(tmp_path: Path, begin: int, end: int, free: bool) -> None:
    FolderLock(tmp_path, print).rows(10, 20)
    assert in_child(take(tmp_path, begin, end)) is free


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        FolderLock(tmp_path, print).rows(0, ALL_ROWS)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    assert not in_child(take(tmp_path, 0, 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert in_child(take(tmp_path, 0, 1))


def test_undo_leaves_no_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "new", print)
    lock.rows(0, ALL_ROWS)
    lock.undo()
    assert not (tmp_path / "new").exists()
    kept = FolderLock(tmp_path, print)
    kept.undo()
    assert (tmp_path / LOCK).exists()


def test_a_lock_undone_under_a_waiter(tmp_path: Path) -> None:
    output = tmp_path / "new"
    waiter = FolderLock(output, print)
    (output / LOCK).unlink()
    waiter.rows(0, 10)
    assert not in_child(take(output, 0, 10)), "two holders of one row"


def test_alone_waits(tmp_path: Path) -> None:
    said: list[str] = []

    def give_up() -> None:
        raise UsageError("waited")

    with FolderLock(tmp_path, print).alone("busy"):
        lock = FolderLock(tmp_path, said.append)

        def wait() -> None:
            with lock.alone("busy", give_up):
                raise AssertionError

        assert not in_child(wait)
    assert in_child(lambda: FolderLock(tmp_path, print).alone("busy").__enter__())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).symlink_to(victim)
    with pytest.raises(OSError):
        FolderLock(tmp_path / "out", print)
    assert not victim.exists()
