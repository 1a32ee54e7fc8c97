"""What the C library does with memory that is freed."""

import ctypes
import subprocess
import sys

import pytest

from extractor import pages

FAULTS = """
import resource, sys, torch
from extractor import pages
if sys.argv[1] == "keep":
    pages.keep_heap()

def use():
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)

for _ in range(10):  # until the heap has found its size
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("keep", 0, 100), ("plain", 300, 1 << 20)])
def test_pages_of_freed_memory_are_kept(how: str, least: int, most: int) -> None:
    """64 MiB ten times over are 320 faults at least, in pages of 2 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
    )
    assert least <= int(done.stdout) <= most


@pytest.mark.parametrize(
    ("limit", "asked"),
    [
        (1 << 31, [(-3, 1 << 30), (-1, -1)]),
        (32 << 20, [(-3, 1 << 30), (-3, 32 << 20), (-1, -1)]),
        (0, [(-3, 1 << 30), (-3, 32 << 20)]),
    ],
)
def test_a_libc_that_allows_less(
    limit: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimming alone must not be set, or every tensor would be a mapping of its own."""
    calls: list[tuple[int, int]] = []

    class Libc:
        def mallopt(self, what: int, value: int) -> int:
            calls.append((what, value))
            return int(value <= limit)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    pages.keep_heap()
    assert calls == asked
