"""Which samples are still to be done, for the run and its dry run alike."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from extractor.config import ExtractConfig
from extractor.layouts import Layout
from extractor.output.done import Done, find_done
from extractor.plan import batches
from extractor.plan.batches import Ints, Plan
from extractor.plan.budget import Ask, Budget
from extractor.plan.request import Wanted
from extractor.prepared.store import PreparedStore


def part_of(config: ExtractConfig, store: PreparedStore) -> Ints:
    """Indices in the store of this job's samples (--shard), int64 [samples]."""
    index, count = config.shard_index
    return batches.shard(store.rows, store.lengths, index, count)


@dataclass(frozen=True, slots=True, eq=False)
class Todo:
    """What a job has to do.

    Attributes:
        store: the prepared samples of all jobs.
        layout: what a file holds and where it lies.
        done: which samples the output folder holds, and which are rejected.
        left: indices in the store of this job's samples that are neither finished nor rejected, int64.
    """

    store: PreparedStore
    layout: Layout
    done: Done
    left: Ints

    @classmethod
    def of(cls, output: Path, store: PreparedStore, layout: Layout, selected: Ints) -> "Todo":
        """Look in the output folder for what is done. selected: indices of this job's samples."""
        done = find_done(output, store.rows, store.turns, layout.path)
        return cls(store, layout, done, done.left_of(selected))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample that is left, [samples]."""
        return self.store.lengths[self.left]

    def ask(self, wanted: Wanted, device: str, tp: int) -> Ask:
        """What the budget for the samples that are left depends on."""
        return wanted.ask(self.layout, self.lengths, device, tp)

    def batches(self, budget: Budget) -> Plan:
        """The batches of the samples that are left."""
        return batches.batches(
            self.left, self.store.lengths, budget.max_tokens, budget.max_sequences
        )
