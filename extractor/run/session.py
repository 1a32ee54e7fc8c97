"""The objects that every part of a run on one rank uses."""

from dataclasses import dataclass

import torch

from extractor.config import ExtractConfig
from extractor.engine.base import Backend, EngineOptions
from extractor.plan.budget import Budget
from extractor.ranks.place import Place
from extractor.ranks.watch import Watch
from extractor.ranks.world import World
from extractor.run.loop import Sink
from extractor.write.writer import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank's run, once it is connected to the other ranks.

    Attributes:
        config: the command line.
        place: which rank this is.
        world: how it talks to the other ranks.
        watch: watches the other ranks, and this rank's own steps.
        device: where this rank computes.
        backend: builds its engine.
        workers: how its writer starts threads and processes.
        begun: when run() began, on the clock of time.perf_counter.
    """

    config: ExtractConfig
    place: Place
    world: World
    watch: Watch
    device: torch.device
    backend: Backend
    workers: Workers
    begun: float

    @property
    def sink(self) -> Sink:
        """Where this replica's files go. The journal's name has the shard and the replica in it, so that
        no two writers share a journal."""
        index, count = self.config.shard_index
        prefix = "" if count == 1 else f"s{index}of{count}-"
        return Sink(
            output=self.config.output,
            journal=f"{prefix}{self.place.replica:04d}.jsonl",
            durability=self.config.durability,
            threads=self.config.writers,
            workers=self.workers,
        )

    def engine_options(self, budget: Budget) -> EngineOptions:
        """What the engine is built with: the budget's sizes and the command line's settings."""
        return EngineOptions(
            device=self.device,
            max_tokens=budget.max_tokens,
            max_sequences=budget.max_sequences,
            longest=budget.longest,
            sglang_args=self.config.sglang_args,
            topk=self.config.topk_logits,
            trust_remote_code=self.config.trust_remote_code,
            verbose=self.config.verbose,
        )
