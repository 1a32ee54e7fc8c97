"""transformers as the reference for states, and the one place that says what is close enough.

A stored state is compared with transformers' float32 states of the same ids, all of them: embedding,
every decoder layer's output, after the final norm. Two rules:

1. identity: of all reference states, and of the named one moved by a row either way, the nearest is
   the one that the name says;
2. size: the median over tokens of the relative error is at most 1.5 times that of transformers' own
   bfloat16 run (never below FLOOR, since at the first layers that noise is next to nothing), and the
   whole sample's is below WHOLE.

Medians, because single tokens with massive activations are off by a fifth in both programs. For the
same reason a sample of fewer than FEW tokens is held to identity and SHORT alone: it has no median; and
its identity is asked only against states that differ from the named one by more than the second rule
lets an error be, for a layer may add less to such a token than rounding does.
"""

from dataclasses import dataclass

import torch

FACTOR, FLOOR, WHOLE = 1.5, 0.004, 0.04
FEW, SHORT = 8, 0.2
FLOOR_FP8 = 0.04  # three bits of mantissa
FLOOR_TOPK = 0.02  # of a log-probability, absolute
TOPK = "topk"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Judgement:
    """One state of one sample.

    Attributes:
        nearest: name of the nearest reference state, or "row-1", "row+1" for a moved one.
        nearest_whole: relative error against that one.
        scale, scaled: what the reference is best multiplied by (median over tokens), and the error
            that is left then.
        median, whole: relative error against float32: median over tokens, and of the whole sample.
        noise, noise_whole: the same two of transformers' own bfloat16 run.
    """

    name: str
    tokens: int
    nearest: str
    median: float
    whole: float
    noise: float
    noise_whole: float
    floor: float = FLOOR
    nearest_whole: float = 0.0
    scale: float = 1.0
    scaled: float = 0.0

    @property
    def good(self) -> bool:
        if self.tokens < FEW:
            return self.nearest == self.name and self.whole <= SHORT
        median_good = self.median <= max(FACTOR * self.noise, self.floor)
        whole_good = self.whole <= most_whole(self.noise_whole, self.floor)
        return self.nearest == self.name and median_good and whole_good

    @property
    def verdict(self) -> str:
        """ "ok", or what is wrong, and what the state is instead when that can be told."""
        if self.good:
            return "ok"
        close = most_whole(self.noise_whole, self.floor)
        if self.nearest != self.name and self.nearest_whole <= close:
            moved = {"row-1": "this state one row late", "row+1": "this state one row early"}
            return f"WRONG: it is {moved.get(self.nearest, 'state ' + self.nearest)}"
        if self.scaled <= close and abs(self.scale - 1) > close:
            return f"WRONG: it is this state times {self.scale:.2f}"
        return "WRONG: too far from the reference"


class Compared:
    """One sample's stored states while its reference states come by, layer by layer.

    Of the reference states only those are kept that are stored too; of the others, how far each stored
    state is from them. A sample too short for a median keeps all.

    Args:
        states: stored ones, float32 [T, H] by name.
    """

    def __init__(self, states: Tensors) -> None:
        self._states = states
        self._distances: dict[str, dict[str, float]] = {name: {} for name in states}
        self._exact: Tensors = {}
        self._rounded: Tensors = {}

    def see(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """A reference state: float32 [T, H] computed in float32, and computed in bfloat16."""
        exact, rounded = exact.cpu(), rounded.cpu()
        if name in self._states or len(exact) < FEW:
            self._exact[name], self._rounded[name] = exact, rounded
        for stored, state in self._states.items():
            assert state.shape == exact.shape, (stored, state.shape, exact.shape)
            self._distances[stored][name] = relative(state, exact)

    def judge(self, floor: float = FLOOR) -> list[Judgement]:
        """Once all reference states were seen. Raises KeyError for a stored one that never came."""
        return [self._judge(name, floor) for name in self._states]

    def _judge(self, name: str, floor: float) -> Judgement:
        state, want, rough = self._states[name], self._exact[name], self._rounded[name]
        distances = dict(self._distances[name])
        noise_whole = relative(rough, want)
        if len(want) > 2:
            distances["row-1"] = relative(state, want.roll(1, 0))
            distances["row+1"] = relative(state, want.roll(-1, 0))
        if len(want) < FEW:
            moved = {"row-1": want.roll(1, 0), "row+1": want.roll(-1, 0)}
            apart = most_whole(noise_whole, floor)
            distances = {
                key: value
                for key, value in distances.items()
                if key == name or relative((self._exact | moved)[key], want) > apart
            }
        nearest = min(distances, key=lambda key: distances[key])
        scale = float(((state * want).sum(-1) / want.square().sum(-1)).median())
        return Judgement(
            name=name,
            tokens=len(want),
            nearest=nearest,
            nearest_whole=distances[nearest],
            scale=scale,
            scaled=relative(state / scale, want) if scale else float("inf"),
            median=median(state, want),
            whole=distances[name],
            noise=median(rough, want),
            noise_whole=noise_whole,
            floor=floor,
        )


def judge(
    states: Tensors, exact: Tensors, rounded: Tensors, floor: float = FLOOR
) -> list[Judgement]:
    """Each state against the float32 and the bfloat16 ones of the same ids; bfloat16 is wanted of those
    alone that are in states."""
    compared = Compared({name: state.float().cpu() for name, state in states.items()})
    for name, state in exact.items():
        compared.see(name, state, rounded.get(name, state))
    return compared.judge(floor)


def judge_topk(stored: torch.Tensor, exact: Tensors, rounded: Tensors) -> Judgement:
    """Stored log-probabilities [T, K] against those of the same tokens, by logprobs in float32
    and in bfloat16; median and noise are absolute, whole is of the probabilities."""
    names = (TOPK, "row-1", "row+1") if len(stored) > 2 else (TOPK,)
    distances = {name: float((stored - exact[name]).abs().mean()) for name in names}
    nearest = min(distances, key=lambda name: distances[name])

    def off(value: torch.Tensor, of_best: torch.Tensor) -> float:
        # Both what these tokens have, and that no other tokens have more.
        error = torch.maximum((value - exact[TOPK]).abs(), (of_best - exact["best"]).abs())
        return float(error.amax(-1).median())

    return Judgement(
        name=TOPK,
        tokens=len(stored),
        nearest=nearest,
        median=off(stored, stored),
        whole=relative(stored.exp(), exact[TOPK].exp()),
        noise=off(rounded[TOPK], rounded["best"]),
        # Of the row that they are nearest to: at another's tokens there is little probability.
        noise_whole=relative(rounded[nearest].exp(), exact[nearest].exp()),
        floor=FLOOR_TOPK,
        nearest_whole=relative(stored.exp(), exact[nearest].exp()),
    )


def logprobs(logits: torch.Tensor, chosen: torch.Tensor) -> Tensors:
    """Of logits [T, V] and chosen token ids [T, K]: their log-probabilities as "topk", the same a row
    late and a row early as "row-1" and "row+1", and the K largest as "best"; float32 [T, K], on the
    CPU."""
    every, chosen = logits.float().log_softmax(-1).cpu(), chosen.long()
    moved = {TOPK: 0, "row-1": 1, "row+1": -1}
    found = {name: every.roll(by, 0).gather(-1, chosen) for name, by in moved.items()}
    return found | {"best": every.topk(chosen.shape[1], dim=-1).values}


def most_whole(noise_whole: float, floor: float) -> float:
    """The most that a whole sample's relative error may be, by the second rule."""
    return max(WHOLE, floor, FACTOR * noise_whole)


def relative(state: torch.Tensor, want: torch.Tensor) -> float:
    return float((state - want).norm() / want.norm())


def median(state: torch.Tensor, want: torch.Tensor) -> float:
    return float(((state - want).norm(dim=-1) / want.norm(dim=-1)).median())
