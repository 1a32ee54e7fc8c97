"""Proof at start-up, on the real weights, that the layers compute what transformers' own layers do.

For one layer of each kind in the model, transformers' module, filled from the checkpoint alone, is
given the state that the engine captured before that layer, and must come to the state captured after
it. What is compared is what the layer adds to the stream, since a layer may add little to a large
stream. So a window, a bias, a scale, a rotary table or a tensor that SGLang treats in another way shows,
whatever it is. The samples are as long as the model's window and the length at which its rotary table
changes ask for, where the run has such long ones; they go through in a batch with short neighbours, and
in chunks. Embedding and final norm are compared as they are.

The tolerance is twice what transformers' own run of the layer in the engine's dtype is off from its
run in float32, by the median over blocks of neighbouring tokens: single tokens with massive values, or
sent to another expert by a rounding, do not decide, and a stretch of a sample does.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from extractor.errors import RunError
from extractor.layerwise import LayerByLayer, NoReference
from extractor.model import ModelSpec
from extractor.pages import available_host_bytes
from extractor.states import EMBED, FINAL

FACTOR = 2.0

# What is never asked for, by what the engine computes in: less than this is no difference.
FLOOR = {torch.float32: 0.002, torch.bfloat16: 0.02, torch.float16: 0.02}
FLOOR_QUANTIZED = 0.15  # inputs of layers are quantized too, in groups of the kernel's own
SHORT = (7, 40)  # tokens of the neighbours
LENGTH, BEYOND = 256, 64  # tokens of the long sample; past the last threshold
MOST_KINDS = 8
BLOCK, BLOCKS = 8, 8  # least tokens of a block; most blocks of a sample
MOST_ATTENTION_BYTES = 8 << 30  # of scores that transformers may hold at a time
MOST_EMBEDDING_BYTES = 4 << 30
GIB = 1 << 30
States = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """What came of the proof, for run.json.

    Attributes:
        layers: kind of layer to the number of the one that was compared.
        tokens: of the longest sample that went through.
        worst: largest difference of a block, as a part of what the layer adds, over what was allowed:
            below 1.
        seconds: that it took.
        skipped: why it was not made; then the rest is empty.
    """

    layers: Mapping[str, int]
    tokens: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"layer proof: not made: {self.skipped}"
        layers = ", ".join(f"{k} ({kind})" for kind, k in self.layers.items())
        return (
            f"layer proof: layers {layers}, embedding and final norm compute what transformers' do, "
            f"from the checkpoint alone, up to {self.tokens:,} tokens, in a batch and in chunks "
            f"({self.seconds:.1f} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way for samples to go through the engine.

    Attributes:
        name: for messages.
        lengths: of its samples.
        limit: most tokens of a pass.
    """

    name: str
    lengths: tuple[int, ...]
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPlan:
    """What is to be compared: the same on every rank.

    Attributes:
        layers: kind to layer.
        embed: whether the embedding is compared too.
        skipped: why nothing can be compared.
    """

    layers: Mapping[str, int]
    trials: tuple[Trial, ...] = ()
    embed: bool = True
    skipped: str = ""

    def states(self, num_layers: int) -> tuple[str, ...]:
        """Names of the states that it needs."""
        wanted = {str(num_layers - 1), FINAL, EMBED}
        for k in self.layers.values():
            wanted |= {str(k), str(k - 1) if k else EMBED}
        return tuple(sorted(wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine can run.

    Attributes:
        longest: tokens of the run's longest sample.
        max_tokens: of a pass.
    """

    longest: int
    max_tokens: int


class Prover:
    """The side of the proof that knows transformers: made on one rank.

    Args:
        device: where transformers' layers run; the CPU where the device lacks the memory.
        overrides: a JSON object of fields of the config that the user changed.
        load_format: how SGLang loaded the weights.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        limits: Limits,
        trust_remote_code: bool,
        overrides: str | None,
        load_format: str,
    ) -> None:
        self._begun = time.perf_counter()
        self._spec = spec
        self._reference: LayerByLayer | None = None
        try:
            if load_format == "dummy":
                raise NoReference("the weights are dummies")
            reference = LayerByLayer(
                spec.path, spec.num_layers, device, trust_remote_code, overrides
            )
            kinds = {kind: layers[0] for kind, layers in reference.kinds().items()}
            chosen = dict(list(kinds.items())[:MOST_KINDS])
            _find_room(reference, max(map(reference.layer_bytes, chosen.values())), device)
            length = _length(reference.config, limits.longest)
            self._reference = reference
            self.plan = ProofPlan(
                layers=chosen,
                trials=tuple(_trials(length, limits)),
                embed=4 * spec.vocab_size * spec.hidden_size <= MOST_EMBEDDING_BYTES,
            )
        except NoReference as error:
            self.plan = ProofPlan(layers={}, skipped=str(error))

    def judge(
        self,
        seen: Sequence[States],
        ids: Sequence[torch.Tensor],
        dtype: torch.dtype,
        quantized: bool,
    ) -> LayerProof:
        """Compare the states of each trial.

        Args:
            seen: for each trial, the states that the plan names: [tokens, H].
            ids: for each trial, of its samples one after the other: int64 [tokens].
            dtype: that the engine computes in.
            quantized: the user asked for quantization that the checkpoint does not have.

        Raises RunError naming the first layer, and the tokens, that are not transformers'."""
        assert self._reference is not None
        rounds = quantized or self._reference.rounds_inputs
        floor = FLOOR_QUANTIZED if rounds else FLOOR[dtype]
        judge = _Judge(self._reference, self._spec, dtype, floor)
        worst = 0.0
        try:
            for k in self.plan.layers.values():
                worst = max(worst, judge.layer(k, self.plan.trials, seen, ids))
            judge.ends(self.plan, seen, ids)
        except NoReference as error:
            return LayerProof(layers={}, skipped=str(error))
        return LayerProof(
            layers=self.plan.layers,
            tokens=max(max(trial.lengths) for trial in self.plan.trials),
            worst=float(f"{worst:.3g}"),
            seconds=round(time.perf_counter() - self._begun, 2),
        )


@dataclass(frozen=True, slots=True)
class _Judge:
    reference: LayerByLayer
    spec: ModelSpec
    dtype: torch.dtype
    floor: float

    def layer(
        self,
        k: int,
        trials: Sequence[Trial],
        seen: Sequence[States],
        ids: Sequence[torch.Tensor],
    ) -> float:
        """The largest difference over what is allowed. Raises RunError."""
        reference = self.reference
        before = str(k - 1) if k else EMBED
        rows = [
            (trial, span, tokens[span], states[before][span], states[str(k)][span])
            for trial, states, tokens in zip(trials, seen, ids, strict=True)
            for span in _spans(trial.lengths)
        ]
        device = reference.device
        with reference.filled(f"layers.{k}", "rest"):
            exact = [
                reference.run_layer(k, tokens, state.to(device).float())
                for _, _, tokens, state, _ in rows
            ]
            rough = exact
            if self.dtype != torch.float32:
                reference.round_to(self.dtype)
                rough = [
                    reference.run_layer(k, tokens, state.to(device, self.dtype))
                    for _, _, tokens, state, _ in rows
                ]
        worst = 0.0
        for (trial, span, _, state, after), want, noisy in zip(rows, exact, rough, strict=True):
            base = state.to(device).float()
            off = _blocks_off(after.to(device).float() - base, want - base)
            noise = _blocks_off(noisy - base, want - base)
            for (begin, end, error), (*_, rounding) in zip(off, noise, strict=True):
                allowed = max(FACTOR * rounding, self.floor)
                worst = max(worst, error / allowed)
                if not error <= allowed:
                    raise self._unlike(k, trial, span, begin, end, error, allowed)
        return worst

    def ends(self, plan: ProofPlan, seen: Sequence[States], ids: Sequence[torch.Tensor]) -> None:
        """The embedding and the final norm. Raises RunError."""
        reference, last = self.reference, str(self.spec.num_layers - 1)
        parts = ("rest", "embed") if plan.embed else ("rest",)
        with reference.filled(*parts):
            for states, tokens in zip(seen, ids, strict=True):
                state = states[last].to(reference.device).float()
                self._same(FINAL, states[FINAL], reference.final(tokens, state))
                if plan.embed:
                    self._same(EMBED, states[EMBED], reference.embed(tokens))

    def _same(self, name: str, state: torch.Tensor, want: torch.Tensor) -> None:
        error = _relative(state.to(want.device).float(), want).median()
        if not float(error) <= self.floor:
            raise RunError(
                f"layer proof: {name} differs from transformers' by {float(error):.3f} (at most "
                f"{self.floor}). Nothing was written; --no-layer-proof runs without it"
            )

    def _unlike(
        self, k: int, trial: Trial, span: slice, begin: int, end: int, error: float, allowed: float
    ) -> RunError:
        return RunError(
            f"layer proof: what layer {k} adds to tokens {begin} to {end - 1} of a sample of "
            f"{span.stop - span.start} tokens, {trial.name}, differs from transformers' "
            f"{self.reference.layer_class} by {error:.3f} of it (at most {allowed:.3f}): SGLang "
            f"computes this model's {self.spec.architecture} in another way. Nothing was written; "
            "docs/reliability.md says what to try"
        )


def _find_room(reference: LayerByLayer, layer: int, device: torch.device) -> None:
    """Move the reference to the CPU where a layer does not fit beside the engine. Raises NoReference
    where it fits nowhere."""
    if device.type == "cuda" and 2 * layer > torch.cuda.mem_get_info(device)[0]:
        reference.move("cpu")
    if reference.device.type == "cpu" and 2 * layer > available_host_bytes():
        raise NoReference(
            f"one layer takes {layer / GIB:.0f} GiB in float32, and neither the device nor the host "
            "has twice that free"
        )


def _length(config: Any, longest: int) -> int:
    """Tokens of the long sample: past every length at which the model changes what it does, as far as
    the run has samples of that length."""
    thresholds = [n for n in _thresholds(config) if n < longest]
    wanted = max([LENGTH, *(n + BEYOND for n in thresholds)])
    heads = getattr(config, "num_attention_heads", 1) or 1
    most = int((MOST_ATTENTION_BYTES / (4 * heads)) ** 0.5)
    return max(min(wanted, longest, most), 1)


def _thresholds(config: Any) -> Iterator[int]:
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            yield value
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in [given, *(v for v in given.values() if isinstance(v, dict))]:
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su", "dynamic"):
            name = "original_max_position_embeddings"
            for value in (rope.get(name), getattr(config, name, None)):
                if isinstance(value, int):
                    yield value


def _trials(length: int, limits: Limits) -> Iterator[Trial]:
    short = [min(n, limits.longest) for n in SHORT]
    room = limits.max_tokens - sum(short)
    if room > 0:
        lengths = (short[0], min(length, room), short[1])
        yield Trial(name="in a batch with shorter ones", lengths=lengths, limit=sum(lengths))
    if length > 1:
        chunk = min(length // 2 + 1, limits.max_tokens)
        yield Trial(name=f"in chunks of {chunk}", lengths=(length,), limit=chunk)


def _spans(lengths: Sequence[int]) -> Iterator[slice]:
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length


def _blocks_off(found: torch.Tensor, want: torch.Tensor) -> list[tuple[int, int, float]]:
    """(first token, end, median over its tokens of the relative difference) of each block."""
    size = max(BLOCK, -(-len(want) // BLOCKS))
    each = _relative(found, want)
    blocks: list[tuple[int, int, float]] = []
    for begin in range(0, len(want), size):
        end = min(begin + size, len(want))
        if len(want) - end < BLOCK:  # what is left is too short for a median of its own
            end = len(want)
        blocks.append((begin, end, float(each[begin:end].median())))
        if end == len(want):
            break
    return blocks


def _relative(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[tokens]: relative difference; infinite where a number is not finite."""
    error = (found - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    return torch.where(torch.isfinite(error), error, torch.inf)
