"""Our own layout: safetensors, one tensor a state, so that a reader maps only what it needs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from extractor.layout import Plane, native_planes
from extractor.layouts.base import Loaded, check_ids, check_plane
from extractor.layouts.framed import Framed
from extractor.reader import map_sample, state_of
from extractor.records import Sample
from extractor.states import States
from extractor.store import SUFFIX, native_metadata
from extractor.topk import IDS, LOGPROBS


@dataclass(frozen=True, kw_only=True)
class Native(Framed):
    """`input_ids` i64 [T], `hidden_states.{name}` [T, H] each, `loss_mask` u8 [T]; with float8
    `hidden_states.{name}.scale` f32 [T] after each state; with topk, `topk_logprobs` f32 [T, K] and
    `topk_ids` i32 [T, K]."""

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
