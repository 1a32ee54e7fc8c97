"""What of the rows is still to be done: the same answer for a run and for its dry run."""

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
    """This job's samples (--shard), by index in the store."""
    index, count = config.shard_index
    return batches.shard(store.rows, store.lengths, index, count)


@dataclass(frozen=True, slots=True, eq=False)
class Todo:
    """What a job has to do.

    Attributes:
        store: the prepared samples of all jobs.
        done: what the output folder holds of them.
        left: this job's samples that are neither finished nor rejected, by index in the store.
    """

    store: PreparedStore
    layout: Layout
    done: Done
    left: Ints

    @classmethod
    def of(cls, output: Path, store: PreparedStore, layout: Layout, selected: Ints) -> "Todo":
        """selected: this job's samples. What is done is looked for in the output folder now."""
        done = find_done(output, store.rows, store.turns, layout.path)
        return cls(store, layout, done, done.left_of(selected))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample that is left."""
        return self.store.lengths[self.left]

    def ask(self, wanted: Wanted, device: str, tp: int) -> Ask:
        """The question for a budget."""
        return wanted.ask(self.layout, self.lengths, device, tp)

    def batches(self, budget: Budget) -> Plan:
        """Of what is left."""
        return batches.batches(
            self.left, self.store.lengths, budget.max_tokens, budget.max_sequences
        )
