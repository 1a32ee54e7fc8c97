"""The layout of NVIDIA Model-Optimizer's offline dumps (https://github.com/NVIDIA/Model-Optimizer,
modelopt/torch/speculative/eagle/utils.py of 0.47).

There is one torch.save dict per sample, and the trainer reads every *.pt below the folder. Layers are
0-based, as in this program. The last state is the one after the final norm. The file says so with
`hidden_states_prenorm` False, because the trainer applies the norm to a state before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from extractor.layouts import torchzip
from extractor.layouts.base import (
    Layout,
    Loaded,
    Parts,
    aux_and_final,
    check_ids,
    check_plane,
    split,
)
from extractor.layouts.planes import Blob, Plane
from extractor.records import Sample
from extractor.states import States

AUX, LAST = "aux_hidden_states", "hidden_states"


@dataclass(frozen=True, kw_only=True)
class ModelOpt(Layout):
    """One torch.save dict per sample of S tokens, with K layers besides the last state.

    It holds `input_ids` int64 [S], `hidden_states` [S, H], `aux_hidden_states` [S, K*H], `loss_mask`
    int64 [S], `conversation_id` str, and `hidden_states_prenorm` False.
    """

    name = "modelopt"
    suffix = ".pt"
    reader = "Model-Optimizer's OfflineSupervisedDataset"

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        return aux_and_final(asked)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        aux, last = self.stored[:-1], self.stored[-1:]
        return (
            Plane(LAST, last, self.dtype, self.hidden),
            Plane(AUX, aux, self.dtype, self.hidden * len(aux)),
        )

    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        return torchzip.save(
            {
                "input_ids": sample.input_ids.clone(),
                **{key: torchzip.as_tensor(blob) for key, blob in tensors.items()},
                "loss_mask": sample.loss_mask.long(),
                "conversation_id": sample.id,
                "hidden_states_prenorm": False,
            }
        )

    def load(self, path: Path, size: int | None = None) -> Loaded:
        content = torchzip.load(path, size)
        ids = torchzip.tensor(content, "input_ids", path)
        tokens = check_ids(path, ids)
        aux, last = self.planes[1], self.planes[0]
        found = {plane.key: torchzip.tensor(content, plane.key, path) for plane in (aux, last)}
        for plane in (aux, last):
            check_plane(path, found[plane.key], plane, plane.shape(tokens))
        states = split(found[AUX], self.stored[:-1], self.hidden, path)
        states[self.stored[-1]] = found[LAST]
        return self.loaded(path, ids, torchzip.tensor(content, "loss_mask", path), states)
