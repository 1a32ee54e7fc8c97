"""`extractor verify OUT`: stored states against transformers, sample by sample.

The reference states are computed layer by layer, in float32 and in bfloat16, for all chosen samples
before the next layer is read: a model of any size needs the memory of one of its layers. What is close
enough is decided in reference.py, the same place that the tests ask.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from safetensors import safe_open

from extractor.config import parse
from extractor.errors import EXIT_FAILED, EXIT_OK, UsageError
from extractor.journal import RUN, read_entries, read_run
from extractor.layerwise import LayerByLayer, NoReference
from extractor.model import ModelSpec, local_path
from extractor.progress import ProgressLine
from extractor.reference import (
    FLOOR,
    FLOOR_FP8,
    Compared,
    Judgement,
    Tensors,
    judge_topk,
    logprobs,
)
from extractor.states import EMBED, FINAL
from extractor.store import sample_path
from extractor.topk import IDS, LOGPROBS
from extractor.values import AtLeastOne, Place

PREFIX = "hidden_states."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Recompute stored samples with transformers and compare; exit code 1 when off."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The output folder."""
    samples: AtLeastOne = 4
    """How many, chosen at random, the same for the same seed."""
    seed: int = 0
    """Of the choice."""
    model: Place | None = None
    """The checkpoint; default: the path that run.json remembers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where layers run, one at a time; auto takes CUDA when there is one."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


def verify(argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    config = parse(VerifyConfig, argv, "extractor verify")
    paths = _choose(config)
    run = _run_of(config.output)
    model = local_path(config.model or run["model"]["path"])
    device = (
        ("cuda" if torch.cuda.is_available() else "cpu")
        if config.device == "auto"
        else config.device
    )
    stored = [_load(path) for path in paths]
    try:
        spec = ModelSpec.read(str(model))
        reference = LayerByLayer(model, spec.num_layers, device, config.trust_remote_code)
        judged_samples = _judge_all(reference, stored)
    except NoReference as error:
        raise UsageError(f"{model}: its states cannot be compared: {error}") from error
    print(_row("sample", "state", "tokens", "median", "noise", "whole", "nearest", ""))  # noqa: T201
    bad = total = 0
    for sample, judged in zip(stored, judged_samples, strict=True):
        total += len(judged)
        for judgement in judged:
            bad += not judgement.good
            print(_line(sample.path.stem, judgement))  # noqa: T201
    print(f"{total - bad} of {total} states of {len(stored)} samples are right")  # noqa: T201
    sys.stdout.flush()
    return EXIT_FAILED if bad else EXIT_OK


def _run_of(output: Path) -> dict[str, dict[str, str]]:
    runs = [output / RUN, *sorted(output.glob("run-*.json"))]
    for path in runs:
        try:
            run = read_run(path)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if run is not None:
            return run
    raise UsageError(f"{output}: no run.json in it")


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


def _judge_all(reference: LayerByLayer, stored: Sequence[Stored]) -> list[list[Judgement]]:
    """Of each sample, every state, and its log-probabilities where it has any. Raises NoReference."""
    compared = [Compared(sample.states) for sample in stored]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with reference.filled("embed", "rest"):
        for sample, one in zip(stored, compared, strict=True):
            exact = reference.embed(sample.ids)
            one.see(EMBED, exact, exact.bfloat16().float())
            pairs.append((exact, exact.bfloat16()))
    line = ProgressLine("comparing", len(reference.layers), "layer")
    try:
        for k in range(len(reference.layers)):
            with reference.filled(f"layers.{k}", "rest"):
                exact = [
                    reference.run_layer(k, s.ids, x)
                    for s, (x, _) in zip(stored, pairs, strict=True)
                ]
                reference.round_to(torch.bfloat16)
                rough = [
                    reference.run_layer(k, s.ids, x)
                    for s, (_, x) in zip(stored, pairs, strict=True)
                ]
            for one, precise, rounded in zip(compared, exact, rough, strict=True):
                one.see(str(k), precise, rounded)
            pairs = [(x, y.bfloat16()) for x, y in zip(exact, rough, strict=True)]
            line.set(k + 1)
    finally:
        line.close()
    logits = any(sample.topk is not None for sample in stored)
    found: list[list[Judgement]] = []
    with reference.filled("rest", *(("head",) if logits else ())):
        ends = [_ends(reference, s, x) for s, (x, _) in zip(stored, pairs, strict=True)]
        reference.round_to(torch.bfloat16)
        rounded_ends = [_ends(reference, s, x) for s, (_, x) in zip(stored, pairs, strict=True)]
    for sample, one, precise, rounded in zip(stored, compared, ends, rounded_ends, strict=True):
        one.see(FINAL, precise[0], rounded[0])
        found.append(one.judge(sample.floor))
        if sample.topk is not None:
            found[-1].append(judge_topk(sample.topk[0], precise[1], rounded[1]))
    return found


def _ends(
    reference: LayerByLayer, sample: Stored, state: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """What the last layer's own state becomes: after the final norm, and log-probabilities if stored."""
    final = reference.final(sample.ids, state)
    if sample.topk is None:
        return final, {}
    return final, logprobs(reference.logits(sample.ids, state), sample.topk[1])


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
