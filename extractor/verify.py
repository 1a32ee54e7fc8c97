"""`extractor verify OUT`: stored states against transformers, sample by sample.

Float32 and bfloat16 reference states of the chosen samples are computed one precision after the
other, so that one copy of the model is in memory at a time. What is close enough is decided in
reference.py, the same place that the tests ask.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from safetensors import safe_open

from extractor import run_file
from extractor.config import parse
from extractor.errors import EXIT_FAILED, EXIT_OK, UsageError
from extractor.journal import read_entries
from extractor.model import local_path
from extractor.reference import (
    FLOOR,
    FLOOR_FP8,
    Judgement,
    Reference,
    Tensors,
    judge,
    judge_topk,
)
from extractor.store import refuse_links, sample_path
from extractor.topk import IDS, LOGPROBS

PREFIX = "hidden_states."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Recompute stored samples with transformers and compare; exit code 1 when off."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The output folder."""
    samples: int = 4
    """How many, chosen at random, the same for the same seed."""
    seed: int = 0
    """Of the choice."""
    model: str | None = None
    """The checkpoint; default: the path that run.json remembers."""
    device: str = "auto"
    """cpu, cuda, or auto: accelerate spreads the model over GPUs, host memory and disk."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


def verify(argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    config = parse(VerifyConfig, argv, "extractor verify")
    refuse_links(config.output)
    paths = _choose(config)
    run = run_file.find(config.output)
    model = local_path(config.model or run.model.path)
    device = "cpu" if config.device == "auto" and not torch.cuda.is_available() else config.device
    stored = [_load(path) for path in paths]
    reference = Reference(model, device, config.trust_remote_code)
    exact = [_reference(reference, sample, torch.float32) for sample in stored]
    reference.forget()
    rounded = [_reference(reference, sample, torch.bfloat16) for sample in stored]
    reference.forget()
    print(_row("sample", "state", "tokens", "median", "noise", "whole", "nearest", ""))  # noqa: T201
    bad = total = 0
    for sample, precise, rough in zip(stored, exact, rounded, strict=True):
        judged = judge(sample.states, precise[0], rough[0], sample.floor)
        if sample.topk is not None:
            judged.append(judge_topk(sample.topk[0], precise[1], rough[1]))
        total += len(judged)
        for judgement in judged:
            bad += not judgement.good
            print(_line(sample.path.stem, judgement))  # noqa: T201
    print(f"{total - bad} of {total} states of {len(stored)} samples are right")  # noqa: T201
    sys.stdout.flush()
    return EXIT_FAILED if bad else EXIT_OK


def _choose(config: VerifyConfig) -> list[Path]:
    entries = sorted({(e.row, e.turn) for e in read_entries(config.output) if e.reject is None})
    paths = [config.output / sample_path(row, turn) for row, turn in entries]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise UsageError(f"{config.output}: no finished samples in the native layout")
    return sorted(random.Random(config.seed).sample(paths, min(config.samples, len(paths))))


@dataclass(frozen=True, slots=True)
class Stored:
    """A file as it is.

    Attributes:
        ids: int64 [T].
        states: float32 [T, H] by name.
        floor: of the tolerance, for how they are stored.
        topk: log-probabilities and ids [T, K], where there are any.
    """

    path: Path
    ids: torch.Tensor
    states: Tensors
    floor: float
    topk: tuple[torch.Tensor, torch.Tensor] | None


def _reference(reference: Reference, sample: Stored, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """States, and where they are stored log-probabilities."""
    states = reference.states(sample.ids, dtype)
    if sample.topk is None:
        return states, {}
    return states, reference.logprobs(sample.ids, sample.topk[1], dtype)


def _load(path: Path) -> Stored:
    floor = FLOOR
    with safe_open(path, "pt") as file:
        names = [n for n in file.keys() if n.startswith(PREFIX) and not n.endswith(".scale")]  # noqa: SIM118
        states: dict[str, torch.Tensor] = {}
        for name in names:
            value = file.get_tensor(name)
            if value.dtype == torch.float8_e4m3fn:
                value = value.float() * file.get_tensor(f"{name}.scale").unsqueeze(-1)
                floor = FLOOR_FP8
            states[name.removeprefix(PREFIX)] = value.float()
        topk = None
        if LOGPROBS in file.keys():  # noqa: SIM118
            topk = file.get_tensor(LOGPROBS), file.get_tensor(IDS)
        return Stored(path, file.get_tensor("input_ids"), states, floor, topk)


def _line(sample: str, j: Judgement) -> str:
    numbers = (f"{j.median:.4f}", f"{j.noise:.4f}", f"{j.whole:.4f}")
    return _row(sample, j.name, str(j.tokens), *numbers, j.nearest, j.verdict)


def _row(*cells: str) -> str:
    widths = (13, 6, 7, 8, 8, 8, 8, 0)
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
