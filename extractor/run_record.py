"""run.json: what a run says of itself."""

import contextlib
import importlib.metadata
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from extractor import fingerprint
from extractor.config import ExtractConfig, invocation
from extractor.data.store import PreparedStore
from extractor.journal import RUN, read_run, write_run
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.topology import Place


def run_path(config: ExtractConfig) -> Path:
    index, count = config.shard_index
    return config.output / (RUN if count == 1 else f"run-{index}-of-{count}.json")


def describe(
    config: ExtractConfig,
    spec: ModelSpec,
    layout: Layout,
    store: PreparedStore,
    place: Place,
    *,
    device: torch.device,
    parts: dict[str, str],
    dtype: str,
) -> dict[str, Any]:
    """run.json as it stands before the first forward.

    parts: of the fingerprint. dtype: of the stored states, by name."""
    packages = ("sglang", "torch", "transformers", "safetensors", "hidden-state-extractor")
    values = asdict(config)
    return {
        "schema": 1,
        "status": "running",
        "fingerprint": fingerprint.digest(parts),
        "parts": parts,
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in values.items()},
        "argv": invocation(),
        "layers": list(layout.stored),
        "dtype": dtype,
        "layout": config.layout,
        "topk_logits": layout.topk,
        "model": {
            "path": str(spec.path),
            "architecture": spec.architecture,
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
        },
        "prepared": str(store.path.relative_to(config.output)),
        "world": {"ranks": place.world_size, "tp": place.tp, "replicas": place.replicas},
        "device": str(device.type),
        "versions": {name: _version(name) for name in packages},
        "git_commit": _git_commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": store.summary(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def process_age() -> float:
    """Seconds since this process began, by the kernel's clock (proc(5): starttime, ticks after boot)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def mark_end(path: Path, status: str, reason: str) -> None:
    """run.json's last word from a run that cannot write its own: as well as it can be done.

    A run stopped before it knew its fingerprint leaves one without, for whoever looks whether it is
    to be started again."""
    with contextlib.suppress(OSError, ValueError):
        run = read_run(path)
        if run is None and status != "stopped":
            return
        run = run or {"schema": 1, "fingerprint": "", "parts": {}}
        run["status"] = status
        if reason:
            run["error"] = reason
        write_run(path, run)
