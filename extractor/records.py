"""The words of this project as records. Each checks its own shapes when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import torch

LOGPROBS, IDS = "topk_logprobs", "topk_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence to run: a row's ids and its mask.

    Attributes:
        row: number of the input record, from 0 across the input files in the order given.
        turn: 0 when the sample is the whole conversation; with `--turns each` the 1-based number
            of the assistant turn that it ends with.
        id: the record's own id, as text; never used as a path.
        source: where the row came from, "file:line".
        input_ids: int64 [T], T >= 1.
        loss_mask: uint8 [T]; 1 where the token is supervised. Nothing is shifted: entry t speaks
            of `input_ids[t]`.
    """

    row: int
    turn: int
    id: str
    source: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.loss_mask
        assert ids.dtype == torch.int64 and ids.dim() == 1 and len(ids) > 0, (ids.dtype, ids.shape)
        assert mask.dtype == torch.uint8 and mask.shape == ids.shape, (mask.dtype, mask.shape)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        return f"Sample(row={self.row}, turn={self.turn}, tokens={len(self)}, {self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A row, or one turn of it, that was not written, and why: one line of rejects.jsonl.

    Attributes:
        row, turn, id, source: as in Sample.
        reason: a short code that can be counted, such as "not_json" or "non_finite".
        detail: a sentence for a person: what came and what was wanted.
    """

    row: int
    turn: int = 0
    id: str
    source: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Batch:
    """Sequences that go through the model in one step, packed without padding.

    A batch holds more tokens than the engine's budget only when it is one sample longer than the
    budget; the engine then runs it in chunks.

    Attributes:
        number: counts the batches of a run, from 0.
        lengths: tokens of each sequence, in order.
        input_ids: int64 [sum(lengths)] on the CPU.
        samples: what the sequences are; empty on the ranks that compute and do not write.
    """

    number: int
    lengths: tuple[int, ...]
    input_ids: torch.Tensor
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        assert self.lengths and min(self.lengths) > 0, self.lengths
        assert self.input_ids.dtype == torch.int64, self.input_ids.dtype
        assert self.input_ids.shape == (sum(self.lengths),), (self.input_ids.shape, self.lengths)
        assert not self.samples or self.lengths == tuple(map(len, self.samples))

    @classmethod
    def of(cls, number: int, samples: tuple[Sample, ...]) -> "Batch":
        ids = torch.cat([sample.input_ids for sample in samples])
        return cls(number, tuple(map(len, samples)), ids, samples)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each sequence begins, and the end: len(lengths) + 1 entries."""
        total, offsets = 0, [0]
        for length in self.lengths:
            total += length
            offsets.append(total)
        return tuple(offsets)

    def __repr__(self) -> str:
        return f"Batch({self.number}: {len(self.lengths)} sequences, {self.num_tokens} tokens)"


@dataclass(frozen=True)
class CapturedBatch:
    """A batch and the states that one pass of the model left, by name, in the order asked.

    Attributes:
        states: name ("embed", "0".."n-1", "final") to [batch.num_tokens, hidden], in the model's
            dtype, on the device that computed it. Where they were asked for, also "topk_logprobs"
            float32 and "topk_ids" int32, [batch.num_tokens, K] (extractor/engine/topk.py).
    """

    batch: Batch
    states: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        for name, state in self.states.items():
            assert state.dim() == 2 and len(state) == self.batch.num_tokens, (
                f"state {name} has shape {tuple(state.shape)} for {self.batch}"
            )


class Entry(msgspec.Struct, frozen=True, rename={"size": "bytes"}):
    """A journal line: a finished sample, or (reject set) one that this run had to leave out."""

    row: Annotated[int, msgspec.Meta(ge=0, lt=1 << 47)]  # row and turn make one key of 64 bits
    turn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 15)]
    size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    xxh3: str = ""
    reject: Reject | None = None
    tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    id: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a reject of another sample than the line's."""
        if self.reject is not None and (self.reject.row, self.reject.turn) != self.key:
            raise ValueError("the reject is of another row")

    @property
    def key(self) -> tuple[int, int]:
        """(row, turn)."""
        return self.row, self.turn
