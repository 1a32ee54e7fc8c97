"""What the pipeline asks of an engine; small, so that a fake one can drive the whole pipeline."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from extractor.records import Batch, CapturedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine turned out to be once its weights were loaded.

    Attributes:
        device: where the states appear.
        dtype: the states' dtype.
        max_tokens: the largest batch in tokens; longer samples run in chunks of this size.
        max_sequences: the most sequences of one batch.
        details: for run.json: versions, backends, memory.
    """

    device: torch.device
    dtype: torch.dtype
    max_tokens: int
    max_sequences: int
    details: dict[str, Any]


class Engine(Protocol):
    """One replica's share of the model on this rank."""

    @property
    def info(self) -> EngineInfo: ...

    def forward(self, batch: Batch) -> CapturedBatch:
        """Run a batch and return its states, still on the device; may return before the device is
        done. Every tp rank of the replica must be given the same batches in the same order."""
        ...

    def close(self) -> None: ...
