"""Proof at start-up, by intervention, that the state named k is layer k's output.

A short prompt runs through the model again and again, each time with one layer's norm weights moved.
The stream after layer k must change when layer k is moved and must not when layer k+1 is: that holds
for exactly one place in the model, whatever the marks say, so an index off by one, two states
swapped or a neighbour's tensor are caught. A stream whose partial sums are all reduced is the
same on every tensor-parallel rank; one that is not, is not. What a layer adds to the stream passes
both tests, so a third asks for the stream itself: the norm that the next layer starts with, applied to
the state, must give what that layer was seen to work on; the final norm, applied to the last layer's
own state, must give `final`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from extractor.errors import RunError
from extractor.states import EMBED, FINAL, States

# Relative difference of a token's row. What must not change has come out bit-equal in every model
# tried; a layer moved by MOVE changes its output by far more than a rounding of bfloat16 (0.004).
SAME, CHANGED, RANKS_ALIKE, NORMED = 0.0005, 0.002, 0.02, 0.05
MOVE = 1.0
PROMPT_TOKENS = 16
Run = Callable[[], Mapping[str, torch.Tensor]]

# From a rank's [tokens, hidden] to the largest relative difference of any rank from the first.
AcrossRanks = Callable[[torch.Tensor], float]


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was proved, for run.json.

    Attributes:
        passes: runs of the prompt through the model.
        moved: smallest change of a state when its own layer was moved.
        kept: largest change of a state when the next layer was moved.
        ranks: largest difference of any rank's state from rank 0's.
        read: states that the next layer, or the final norm, was seen to read. The others' norms were
            fused into another kernel, out of a hook's sight.
    """

    passes: int
    moved: float
    kept: float
    ranks: float
    read: int


def self_check(
    run: Run, backbone: nn.Module, states: States, across_ranks: AcrossRanks
) -> SelfCheck:
    """Raises RunError naming the first state that is not what its name says.

    run must give the states of the same prompt, on every tp rank at the same time."""
    layers: Sequence[nn.Module] = backbone.layers  # pyright: ignore[reportAssignmentType]
    norm: nn.Module = backbone.norm  # pyright: ignore[reportAssignmentType]
    with _Doors(states, layers) as doors:
        before = _copy(run())
    passes = 1
    ranks = max(across_ranks(state) for state in before.values())
    for name, state in before.items():
        if (difference := across_ranks(state)) > RANKS_ALIKE:
            raise _wrong(
                name, f"differs between tensor-parallel ranks by {difference:.2f}: a partial sum"
            )
    moved, kept = float("inf"), 0.0
    for module, changed, same in _experiments(states, layers, norm):
        with _Moved(module):
            after = run()
            passes += 1
        for name in changed & before.keys():
            difference = _difference(after[name], before[name])
            moved = min(moved, difference)
            if difference < CHANGED:
                raise _wrong(name, "does not change when its own layer is moved")
        for name in same & before.keys():
            difference = _difference(after[name], before[name])
            kept = max(kept, difference)
            if difference > SAME:
                raise _wrong(name, f"changes by {difference:.3f} when the next layer is moved")
    last = str(states.num_layers - 1)
    if last in before and FINAL in before:
        doors.seen[last] = norm, before[FINAL]
    read = 0
    for name, (door, normed) in doors.seen.items():
        with torch.no_grad():
            alone = door(before[name].clone())
        # A norm that also quantizes gives other things; a stream sharded over ranks, fewer rows.
        if not isinstance(alone, torch.Tensor) or alone.shape != normed.shape:
            continue
        read += 1
        if (difference := _difference(alone, normed)) > NORMED:
            raise _wrong(name, f"is not the stream that was read after it ({difference:.2f})")
    return SelfCheck(passes, moved if moved < float("inf") else 0.0, kept, ranks, read)


class _Doors:
    """Within it, sees what the norms of the layers after the states give those layers.

    seen: by state, the norm and its output [tokens, hidden]."""

    def __init__(self, states: States, layers: Sequence[nn.Module]) -> None:
        self.seen: dict[str, tuple[nn.Module, torch.Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        for name in states.names:
            after = 0 if name == EMBED else int(name) + 1 if name != FINAL else len(layers)
            norm = getattr(layers[after], "input_layernorm", None) if after < len(layers) else None
            if norm is not None:
                self._hooks.append(norm.register_forward_hook(partial(self._on_norm, name)))

    def __enter__(self) -> "_Doors":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_norm(self, name: str, norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        normed = output[0] if isinstance(output, tuple) else output
        if isinstance(normed, torch.Tensor) and normed.dtype == args[0].dtype:
            self.seen[name] = norm, normed.clone()


def _experiments(
    states: States, layers: Sequence[nn.Module], norm: nn.Module
) -> list[tuple[nn.Module, set[str], set[str]]]:
    """(module to move, states that must change, states that must not) for each module that matters."""
    changed: dict[int, set[str]] = {}
    same: dict[int, set[str]] = {}
    for k in states.layers:
        changed.setdefault(k, set()).add(str(k))
        same.setdefault(k + 1, set()).add(str(k))
    if EMBED in states.names:
        same.setdefault(0, set()).add(EMBED)
    if FINAL in states.names:
        changed.setdefault(len(layers), set()).add(FINAL)
        changed.setdefault(len(layers) - 1, set()).add(FINAL)
    return [
        (norm if k == len(layers) else layers[k], changed.get(k, set()), same.get(k, set()))
        for k in sorted(changed.keys() | same.keys())
    ]


class _Moved:
    """Within it, the norm weights of a module are MOVE larger; afterwards they are as before."""

    def __init__(self, module: nn.Module) -> None:
        vectors = [p for p in module.parameters() if p.dim() == 1 and p.is_floating_point()]
        widest = max((len(p) for p in vectors), default=0)
        # The norms of the stream are as wide as it is; those of heads and biases of experts are not.
        self._weights = [p for p in vectors if len(p) == widest]
        if not self._weights:
            raise RunError(f"self-check: {type(module).__name__} has no norm to move")
        self._saved: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._saved = [weight.detach().clone() for weight in self._weights]
        with torch.no_grad():
            for weight in self._weights:
                weight.add_(MOVE)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for weight, saved in zip(self._weights, self._saved, strict=True):
                weight.copy_(saved)


def _copy(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: state.clone() for name, state in states.items()}


def _difference(state: torch.Tensor, other: torch.Tensor) -> float:
    """The median over tokens of the relative difference; infinite when values are not finite."""
    wide, base = state.float(), other.float()
    value = ((wide - base).norm(dim=-1) / base.norm(dim=-1).clamp_min(1e-30)).median()
    return float(value) if torch.isfinite(value) else float("inf")


def _wrong(name: str, what: str) -> RunError:
    return RunError(
        f"self-check: state {name} {what}. Nothing was written. This model, SGLang release or "
        "parallel layout does not hand out the states that were asked for; please report it "
        "(docs/decisions/0003-self-check.md; --no-self-check runs all the same)"
    )
