"""What run.json says about a run: its record before the first forward pass, and how it ended."""

import contextlib
import importlib.metadata
import os
import secrets
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch

from extractor.config import ExtractConfig, invocation
from extractor.errors import RunError
from extractor.layouts import Layout
from extractor.model import ModelSpec
from extractor.output import run_json
from extractor.output.run_json import Run, RunModel, World
from extractor.plan import fingerprint
from extractor.prepared.store import PreparedStore
from extractor.ranks.place import Place

_SALT = secrets.token_hex(8)


def run_id() -> str:
    """An id by which this process knows its own record. No other process has it, not even a fork."""
    return f"{_SALT}-{os.getpid():x}"


def run_path(config: ExtractConfig) -> Path:
    """Path of this job's run.json; each shard has its own."""
    return config.output / run_json.name_of(*config.shard_index)


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
) -> Run:
    """The record as it is before the first forward pass.

    parts: the parts of the fingerprint. dtype: name of the dtype of the stored states."""
    packages = ("sglang", "torch", "transformers", "safetensors", "hidden-state-extractor")
    values = asdict(config)
    return Run(
        status="running",
        fingerprint=fingerprint.digest(parts),
        parts=parts,
        run_id=run_id(),
        config={k: str(v) if isinstance(v, Path) else v for k, v in values.items()},
        argv=tuple(invocation()),
        layers=tuple(layout.stored),
        dtype=dtype,
        layout=config.layout,
        topk_logits=layout.topk,
        model=RunModel(
            path=str(spec.path),
            architecture=spec.architecture,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
        ),
        prepared=str(store.path.relative_to(config.output)),
        world=World(ranks=place.world_size, tp=place.tp, replicas=place.replicas),
        device=str(device.type),
        versions={name: _version(name) for name in packages},
        git_commit=_git_commit(),
        started=now(),
        data=store.summary(),
    )


def now() -> str:
    """Local time with its offset, to the second."""
    return time.strftime(run_json.WHEN)


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
    """Seconds since this process began.

    The start comes from /proc/self/stat (proc(5): field 22, starttime, in clock ticks since boot)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def mark_end(path: Path, status: str, reason: str) -> None:
    """Record in run.json how a run ended that cannot write its full record any more.

    Errors are ignored. The record of an earlier run stays, under `earlier`. When the folder has no
    record yet, only a stopped run writes one, without a fingerprint, so that a scheduler sees that it is
    to be started again."""
    with contextlib.suppress(OSError, ValueError, RunError):
        run = run_json.read(path)
        if run is None and status != "stopped":
            return
        run_json.write(path, ended(run, status, reason))


def ended(before: Run | None, status: str, reason: str) -> Run:
    """This run's record with its end.

    before: the record in the file, if any. When it is an earlier run's, only what holds for the whole
    folder is taken from it."""
    error = reason or None
    if before is not None and before.run_id == run_id():
        return run_json.replace(before, status=status, finished=now(), error=error)
    blank = Run(fingerprint="") if before is None else before.of_folder()
    own = run_json.replace(
        blank,
        run_id=run_id(),
        status=status,
        argv=tuple(invocation()),
        started=_began(),
        finished=now(),
        error=error,
    )
    return own.after(before)


def _began() -> str:
    """When this process began: local time with its offset, to the second."""
    return time.strftime(run_json.WHEN, time.localtime(time.time() - process_age()))
