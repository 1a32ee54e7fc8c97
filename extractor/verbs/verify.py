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

from extractor.config import parse
from extractor.errors import EXIT_FAILED, EXIT_OK, UsageError
from extractor.layerwise import LayerByLayer, NoReference
from extractor.layouts.planes import FP8
from extractor.model import ModelSpec, local_path
from extractor.output.folder import Folder
from extractor.printable import printable
from extractor.progress import ProgressLine
from extractor.records import IDS, LOGPROBS, Entry
from extractor.states import EMBED, FINAL
from extractor.values import AtLeastOne, Place
from extractor.verbs.reference import (
    FLOOR,
    FLOOR_FP8,
    Compared,
    Judgement,
    Tensors,
    judge_topk,
    logprobs,
)


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
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where layers run, one at a time; auto takes CUDA when there is one."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


def verify(argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    config = parse(VerifyConfig, argv, "extractor verify")
    folder = Folder.open(config.output)
    spec = ModelSpec.read(str(local_path(config.model or folder.run.model.path)))
    _check_shapes(folder, spec)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    stored = [_load(folder, entry) for entry in _choose(folder, config)]
    try:
        reference = LayerByLayer(spec.path, spec.num_layers, device, config.trust_remote_code)
        judged_samples = _judge_all(reference, stored)
    except NoReference as error:
        raise UsageError(f"{spec.path}: its states cannot be compared: {error}") from error
    print(_row("sample", "state", "tokens", "median", "noise", "whole", "nearest", ""))  # noqa: T201
    bad = total = 0
    for sample, judged in zip(stored, judged_samples, strict=True):
        total += len(judged)
        for judgement in judged:
            bad += not judgement.good
            print(_line(sample.name, judgement))  # noqa: T201
    print(f"{total - bad} of {total} states of {len(stored)} samples are right")  # noqa: T201
    sys.stdout.flush()
    return EXIT_FAILED if bad else EXIT_OK


def _check_shapes(folder: Folder, spec: ModelSpec) -> None:
    ours, theirs = folder.run.model, (spec.num_layers, spec.hidden_size)
    if (ours.num_layers, ours.hidden_size) != theirs:
        raise UsageError(
            f"{spec.path}: has {spec.num_layers} layers of width {spec.hidden_size}, and the states of "
            f"{printable(str(folder.path))} are of {ours.num_layers} layers of width {ours.hidden_size}"
        )


def _choose(folder: Folder, config: VerifyConfig) -> list[Entry]:
    entries = [entry for entry in folder.entries if folder.file(entry).is_file()]
    if not entries:
        raise UsageError(f"{printable(str(folder.path))}: no finished samples")
    chosen = random.Random(config.seed).sample(entries, min(config.samples, len(entries)))
    return sorted(chosen, key=lambda entry: (entry.row, entry.turn))


@dataclass(frozen=True, slots=True)
class Stored:
    """A file as it is.

    Attributes:
        name: row, and turn where there is one.
        ids: int64 [T].
        states: float32 [T, H] by name.
        floor: of the tolerance, for how they are stored.
        topk: log-probabilities and ids [T, K], where there are any.
    """

    name: str
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


def _load(folder: Folder, entry: Entry) -> Stored:
    """Raises RunError when the file is not what its journal line says."""
    sample, tensors = folder.load(entry)
    kept = {name: tensors[name] for name in (LOGPROBS, IDS) if name in tensors}
    return Stored(
        name=f"{entry.row:09d}" + (f"-{entry.turn:02d}" if entry.turn else ""),
        ids=sample.input_ids,
        states={name: x.float() for name, x in tensors.items() if name not in kept},
        floor=FLOOR_FP8 if folder.layout.dtype == FP8 else FLOOR,
        topk=(kept[LOGPROBS], kept[IDS]) if kept else None,
    )


def _line(sample: str, j: Judgement) -> str:
    numbers = (f"{j.median:.4f}", f"{j.noise:.4f}", f"{j.whole:.4f}")
    return _row(sample, j.name, str(j.tokens), *numbers, j.nearest, j.verdict)


def _row(*cells: str) -> str:
    widths = (13, 6, 7, 8, 8, 8, 8, 0)
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
