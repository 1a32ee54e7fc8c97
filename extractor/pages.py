"""Host memory: asked for in huge pages, where the system has them, and not given back when it will be
wanted again. Fresh pages of 4 KiB cost more to fill than the copy that fills them."""

import contextlib
import ctypes
import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
NEVER = -1

# Releases of glibc that follow mallopt(3) to the letter allow the second at most.
LARGEST_FROM_HEAP = (1 << 30, 32 << 20)

GIB = 1 << 30


def keep_heap() -> None:
    """Have malloc keep what is freed, for a process that computes on its CPU and frees the same sizes
    again and again: glibc would give each back to the system, whose pages must be found anew
    (docs/performance.md). mallopt(3); another C library stays as it is."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        # Not the second without the first: it fixes the threshold where it is, at 128 KiB.
        if any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_FROM_HEAP):
            libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def anonymous(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, its content zeros, given back when nothing refers to it."""
    return _in_huge_pages(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def can_share() -> bool:
    """Whether shared() works here: not on a Python built for an old C library, nor under every filter of
    system calls."""
    try:
        os.close(os.memfd_create("extractor-probe", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        logger.warning("no shared memory for writer processes (%s): threads write instead", error)
        return False
    return True


def shared(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that another process can map too, by the descriptor beside it, its content zeros.

    To be ended with give_back(). Raises OSError where the system has none."""
    descriptor = os.memfd_create("extractor-states", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    return _in_huge_pages(memory), descriptor


def give_back(descriptor: int) -> None:
    """Give shared memory back to the system and close its descriptor, whoever still maps it: they must
    not touch it any more."""
    os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def available_host_bytes() -> int:
    """Memory that can still be had: the machine's, or less under a cgroup's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
