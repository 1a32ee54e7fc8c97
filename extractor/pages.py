"""Host memory asked for in huge pages, where the system has them: fresh pages of 4 KiB cost more to fill
than the copy that fills them."""

import contextlib
import mmap


def anonymous(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, its content zeros, given back when nothing refers to it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
