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
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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


class Reference:
    """The states of one checkpoint by transformers, in float32 and in bfloat16.

    A model that does not fit on one device is spread over all of them, the host and the disk by
    accelerate's device_map.

    Args:
        path: the checkpoint's folder.
        device: "cpu", "cuda", or "auto" for accelerate's device_map.
    """

    def __init__(self, path: Path, device: str = "cpu", trust_remote_code: bool = False) -> None:
        self._path, self._device, self._trust = path, device, trust_remote_code
        self._models: dict[torch.dtype, Any] = {}

    def states(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
        """embed, 0 .. n-1 and final for ids [T]: float32 [T, H] each, on the CPU."""
        model = self._model(dtype)
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
            for layer in _layers(model)
        ]
        first = next(model.parameters()).device
        with torch.no_grad():
            result = model(ids.unsqueeze(0).to(first), output_hidden_states=True, use_cache=False)
        for hook in hooks:
            hook.remove()
        width = outputs[0].shape[-1]
        named = {str(i): out.reshape(-1, width) for i, out in enumerate(outputs)}
        named["embed"] = result.hidden_states[0][0]
        named["final"] = result.hidden_states[-1][0]
        return {name: state.float().cpu() for name, state in named.items()}

    def logprobs(
        self, ids: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensors:
        """Of ids [T] and chosen token ids [T, K]: their log-probabilities as "topk", the same a row
        late and a row early as "row-1" and "row+1", and the K largest as "best"; float32 [T, K], on
        the CPU."""
        model = self._model(dtype)
        first = next(model.parameters()).device
        with torch.no_grad():
            logits = model(ids.unsqueeze(0).to(first), use_cache=False).logits[0].float().cpu()
        every, chosen = logits.log_softmax(-1), chosen.long()
        moved = {TOPK: 0, "row-1": 1, "row+1": -1}
        found = {name: every.roll(by, 0).gather(-1, chosen) for name, by in moved.items()}
        return found | {"best": every.topk(chosen.shape[1], dim=-1).values}

    def judge(self, ids: torch.Tensor, states: Tensors, floor: float = FLOOR) -> list[Judgement]:
        """States [T, H] by name against those of ids [T]."""
        exact = self.states(ids)
        rounded = self.states(ids, torch.bfloat16)
        return judge(states, exact, rounded, floor)

    def forget(self) -> None:
        """Let the weights go, of both precisions."""
        self._models.clear()

    def _model(self, dtype: torch.dtype) -> Any:
        if dtype not in self._models:
            spread = {"device_map": "auto"} if self._device == "auto" else {}
            model = AutoModelForCausalLM.from_pretrained(
                self._path, dtype=dtype, trust_remote_code=self._trust, **spread
            )
            if self._device != "auto":
                model = model.to(torch.device(self._device))  # pyright: ignore[reportArgumentType]
            self._models[dtype] = model.eval()
        return self._models[dtype]


def _layers(model: Any) -> Any:
    """The decoder layers, also of a multimodal wrapper."""
    for path in ("model.layers", "model.language_model.layers", "language_model.model.layers"):
        module = model
        for part in path.split("."):
            module = getattr(module, part, None)
        if module is not None:
            return module
    raise ValueError(f"no decoder layers found in {type(model).__name__}")


def judge(
    states: Tensors, exact: Tensors, rounded: Tensors, floor: float = FLOOR
) -> list[Judgement]:
    """Each state against the float32 and the bfloat16 ones of the same ids."""
    return [
        _judge(name, state.float().cpu(), exact, rounded, floor) for name, state in states.items()
    ]


def _judge(
    name: str, state: torch.Tensor, exact: Tensors, rounded: Tensors, floor: float
) -> Judgement:
    want = exact[name]
    assert state.shape == want.shape, (name, state.shape, want.shape)
    candidates = dict(exact)
    if len(want) > 2:
        candidates["row-1"], candidates["row+1"] = want.roll(1, 0), want.roll(-1, 0)
    noise_whole = relative(rounded[name], want)
    if len(want) < FEW:
        candidates = {
            key: value
            for key, value in candidates.items()
            if key == name or relative(value, want) > most_whole(noise_whole, floor)
        }
    distances = {key: relative(state, value) for key, value in candidates.items()}
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
        noise=median(rounded[name], want),
        noise_whole=noise_whole,
        floor=floor,
    )


def judge_topk(stored: torch.Tensor, exact: Tensors, rounded: Tensors) -> Judgement:
    """Stored log-probabilities [T, K] against those of the same tokens, by Reference.logprobs in
    float32 and in bfloat16; median and noise are absolute, whole is of the probabilities."""
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


def most_whole(noise_whole: float, floor: float) -> float:
    """The most that a whole sample's relative error may be, by the second rule."""
    return max(WHOLE, floor, FACTOR * noise_whole)


def relative(state: torch.Tensor, want: torch.Tensor) -> float:
    return float((state - want).norm() / want.norm())


def median(state: torch.Tensor, want: torch.Tensor) -> float:
    return float(((state - want).norm(dim=-1) / want.norm(dim=-1)).median())
