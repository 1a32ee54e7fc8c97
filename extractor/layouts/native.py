"""The native layout: safetensors with one tensor per state, so that a reader maps only its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from extractor.layouts.base import SUFFIX, Loaded, check_ids, check_plane
from extractor.layouts.planes import FP8, Plane
from extractor.layouts.safetensors import Framed, map_sample, state_of
from extractor.records import IDS, LOGPROBS, Sample
from extractor.states import States

SCHEMA = "1"


@dataclass(frozen=True, kw_only=True)
class Native(Framed):
    """One safetensors file per sample.

    It holds `input_ids` int64 [T], `hidden_states.{name}` [T, H] for each state, and `loss_mask`
    uint8 [T]. With float8, `hidden_states.{name}.scale` float32 [T] follows each state. With topk it
    also holds `topk_logprobs` float32 [T, K] and `topk_ids` int32 [T, K].
    """

    name = "native"
    ids = "input_ids"
    suffix = SUFFIX
    float8 = True
    holds_topk = True
    reader = "extractor.dataset"

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        return asked.names

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return native_planes(self.stored, self.hidden, self.dtype, self.topk)

    def metadata(self, sample: Sample) -> dict[str, str]:
        return native_metadata(sample, self.model, ",".join(self.stored))

    def load(self, path: Path, size: int | None = None) -> Loaded:
        file = map_sample(path, size)
        ids = file.tensor(self.ids)
        tokens = check_ids(path, ids)
        for plane in self.planes:
            check_plane(path, file.tensor(plane.key), plane, plane.shape(tokens))
        wide = torch.float32 if self.dtype.itemsize == 1 else None
        states = {name: state_of(file, f"hidden_states.{name}", wide) for name in self.stored}
        states |= {key: file.tensor(key) for key in (LOGPROBS, IDS) if self.topk}
        return self.loaded(path, ids, file.tensor("loss_mask"), states)


def native_planes(
    states: Sequence[str], hidden: int, dtype: torch.dtype, topk: int = 0
) -> tuple[Plane, ...]:
    """hidden_states.{name} [T, hidden] for each state, followed by its scale when dtype is float8.

    With topk, topk_logprobs and topk_ids [T, topk] come last.
    """
    planes: list[Plane] = []
    for name in states:
        key = f"hidden_states.{name}"
        planes.append(Plane(key, (name,), dtype, hidden))
        if dtype == FP8:
            planes.append(Plane(f"{key}.scale", (name,), torch.float32, 0, scale_of=key))
    if topk:
        planes.append(Plane(LOGPROBS, (LOGPROBS,), torch.float32, topk))
        planes.append(Plane(IDS, (IDS,), torch.int32, topk))
    return tuple(planes)


def native_metadata(sample: Sample, model: str, states: str) -> dict[str, str]:
    return {
        "schema": SCHEMA,
        "row": str(sample.row),
        # Readers of safetensors refuse a header that holds half a surrogate pair.
        "id": sample.id.encode("utf-8", "backslashreplace").decode(),
        "turn": str(sample.turn),
        "model": model,
        "layers": states,
    }
