"""SGLang on a plain CPU, as an out-of-tree platform: no AMX, no CPU build of sgl-kernel.

Registered under the entry-point group `sglang.srt.platforms`, so SGLang imports this module and calls
activate() at its own import, in every program on the same Python. It answers None unless request()
was called in this process before, and it imports nothing until it is asked to act.
"""

_requested = False


def request() -> None:
    """Make SGLang, when it is next imported in this process, run on the CPU through this platform."""
    global _requested
    _requested = True


def activate() -> str | None:
    """SGLang's plugin protocol: the platform class by its dotted path, or None for "not me"."""
    return "extractor.engine.cpu.runtime.CpuPlatform" if _requested else None
