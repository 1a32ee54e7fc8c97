"""What every part of a run on one rank has to do with."""

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
    """One rank's run, from the time that it speaks to the others.

    Attributes:
        begun: when this program began, on time.perf_counter's clock.
        device: where this rank computes.
        backend: builds its engine.
        workers: how its writer comes by threads and processes.
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
        """Where this replica's files go."""
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
