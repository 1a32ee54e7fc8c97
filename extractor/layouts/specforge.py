"""The layouts of SpecForge's offline features (https://github.com/sgl-project/SpecForge,
specforge/runtime/data_plane/offline_reader.py and specforge/algorithms/*/data.py of 0.2.0).

There is one torch.save dict per sample, at any depth of folders. The reader sorts by path, which for
this program's names is row order. Layers are 0-based, as in this program, and stand side by side in
the order asked for. The last state is the one after the final norm. Tokens and states are not
shifted against each other, because the trainer shifts them.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from extractor.errors import UsageError
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
from extractor.prepared.vocab import TokenCounts, draft_vocabulary
from extractor.records import Sample
from extractor.states import FINAL, States


@dataclass(frozen=True, kw_only=True)
class SpecForge(Layout):
    """A dict with `input_ids` int64 [S], `loss_mask` int64 [S], and each slot [1, S, width]."""

    suffix = ".ckpt"
    reader = "SpecForge's offline reader"

    @property
    @abstractmethod
    def slots(self) -> dict[str, tuple[str, ...]]:
        """For each key in the file, the states that stand side by side in it."""

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(
            Plane(key, names, self.dtype, self.hidden * len(names))
            for key, names in self.slots.items()
        )

    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        content = {
            "input_ids": sample.input_ids.clone(),
            "loss_mask": sample.loss_mask.long(),
        }
        for key, blob in tensors.items():
            content[key] = torchzip.as_tensor(blob, 1, *blob.shape)
        return torchzip.save(content)

    def load(self, path: Path, size: int | None = None) -> Loaded:
        content = torchzip.load(path, size)
        ids = torchzip.tensor(content, "input_ids", path)
        tokens = check_ids(path, ids)
        states: dict[str, torch.Tensor] = {}
        for plane in self.planes:
            value = torchzip.tensor(content, plane.key, path)
            check_plane(path, value, plane, (1, *plane.shape(tokens)))
            states.update(split(value.squeeze(0), plane.states, self.hidden, path))
        return self.loaded(path, ids, torchzip.tensor(content, "loss_mask", path), states)


@dataclass(frozen=True, kw_only=True)
class Eagle3(SpecForge):
    """Strategy eagle3: `aux_hidden_state` [1, S, K*H] and `hidden_state` [1, S, H].

    SpecForge itself uses K = 3 layers.
    """

    name = "specforge"

    def vocabulary(self, counted: TokenCounts, size: int) -> dict[str, Parts]:
        """The mapping that SpecForge takes as `model.vocab_mapping_path`, or else derives itself.

        It holds `d2t` int64 [D] and `t2d` bool [V]. Of equally frequent tokens, the one that is seen
        first is chosen.
        """
        draft = draft_vocabulary(counted, size, ties="first_seen")
        content = {"d2t": torch.from_numpy(draft.d2t), "t2d": torch.from_numpy(draft.t2d)}
        return {"vocab/vocab_mapping.pt": torchzip.save(content)}

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        return aux_and_final(asked)

    @property
    def slots(self) -> dict[str, tuple[str, ...]]:
        return {"aux_hidden_state": self.stored[:-1], "hidden_state": self.stored[-1:]}


@dataclass(frozen=True, kw_only=True)
class DFlash(SpecForge):
    """Strategies dflash and domino: `hidden_states` [1, S, K*H] and no last state.

    Their reader refuses a sample that has no two supervised tokens in a row.
    """

    name = "specforge-dflash"

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        aux = tuple(name for name in asked.names if name != FINAL)
        if not aux:
            raise UsageError("--layout specforge-dflash holds no final state: give --layers")
        return aux

    @property
    def slots(self) -> dict[str, tuple[str, ...]]:
        return {"hidden_states": self.stored}


@dataclass(frozen=True, kw_only=True)
class DSpark(SpecForge):
    """Strategy dspark: `hidden_states` [1, S, K*H] and `target_last_hidden_states` [1, S, H]."""

    name = "specforge-dspark"

    @classmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        return aux_and_final(asked)

    @property
    def slots(self) -> dict[str, tuple[str, ...]]:
        return {"hidden_states": self.stored[:-1], "target_last_hidden_states": self.stored[-1:]}
