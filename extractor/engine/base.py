"""What the pipeline asks of an engine; small, so that a fake one can drive the whole pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from extractor.engine.layer_proof import LayerProof
from extractor.engine.selfcheck import SelfCheck
from extractor.model import ModelSpec
from extractor.ranks.place import Place
from extractor.records import Batch, CapturedBatch
from extractor.states import States

CHUNK_BYTES = 128 << 20
"""Of the logits that are there at a time, in float32."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine needs to know of a run.

    Attributes:
        max_tokens: token budget of one forward.
        max_sequences: the most sequences in a batch.
        longest: tokens of the longest sample; the KV pool holds it whole.
        topk: how many of the likeliest tokens to give beside the states; 0 for none.
        sglang_args: the user's ServerArgs fields, as text.
        as_sglang: run passes as SGLang would: none of the kernels and omissions that make ours faster.
        verbose: let SGLang log.
    """

    device: torch.device
    max_tokens: int
    max_sequences: int
    longest: int
    sglang_args: dict[str, str]
    topk: int = 0
    as_sglang: bool = False
    trust_remote_code: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Numbers:
    """What an engine's stored numbers depend on beside the model and the rows.

    Attributes:
        computed_in: the dtype that the model computes in, by name.
        given: --sglang fields that can change a number, to their values in one spelling.
    """

    computed_in: str
    given: Mapping[str, str]


class Engine(Protocol):
    """One replica's share of the model on this rank."""

    @property
    def info(self) -> EngineInfo: ...

    def forward(self, batch: Batch) -> CapturedBatch:
        """Run a batch and return its states, still on the device; may return before the device is
        done. With topk, topk_logprobs and topk_ids are among them. Every tp rank of the replica must
        be given the same batches in the same order."""
        ...

    def self_check(self) -> SelfCheck | None:
        """Prove that the states are what their names say; None when there is nothing to prove.
        All tp ranks call it together. Raises RunError."""
        ...

    def layer_proof(self) -> LayerProof | None:
        """Compare a layer of each kind with transformers' own; None when there is nothing to compare.
        All tp ranks call it together. Raises RunError."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Where engines come from: the module engine.sglang is one, and tests have another."""

    def choose_device(self, wanted: str, place: Place) -> torch.device:
        """--device to this rank's device. Raises UsageError when there is no such device."""
        ...

    def prepare_process(self, device: torch.device, place: Place, verbose: bool = False) -> None:
        """Called once in a process, before anything else of the backend's."""
        ...

    def import_modules(self, device: torch.device) -> None:
        """Import what check_model and build need, which takes a while and depends on nothing but the
        device. Those do it too, if need be."""
        ...

    def numbers(
        self, spec: ModelSpec, device: torch.device, sglang_args: Mapping[str, str]
    ) -> Numbers:
        """What this run's fingerprint has of the engine. May import what sglang_args are fields of.
        Raises UsageError for one that is none."""
        ...

    def check_model(self, spec: ModelSpec, place: Place, sglang_args: Mapping[str, str]) -> None:
        """Refuse what cannot run, before any weight is read. Raises UsageError."""
        ...

    def applies_window(self, spec: ModelSpec) -> bool:
        """Whether the model's window, which spec names, is applied: without it a sample longer than
        the window has states of another model. Asked after check_model."""
        ...

    def build(
        self, spec: ModelSpec, states: States, place: Place, options: EngineOptions
    ) -> Engine:
        """Load the weights. Process groups exist already (World.join_replica)."""
        ...
