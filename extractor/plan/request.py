"""The request: what a command line asks for, for the run, its writers and the dry run alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from extractor.config import ExtractConfig
from extractor.errors import UsageError
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.layouts.planes import DTYPES
from extractor.layouts.safetensors import Framed
from extractor.model import OVERRIDES, ModelSpec
from extractor.plan.budget import MOST_WRITERS, Ask
from extractor.prepared.store import PreparedStore
from extractor.progress import ProgressLine, say
from extractor.rows.prepare import prepare
from extractor.states import States


@dataclass(frozen=True, slots=True)
class Wanted:
    """A command line that has been checked against its model.

    Attributes:
        config: the command line.
        spec: the model.
        asked: the states that --layers and --final name.
        stored: names of the states in a file of --layout, in its order.
        dtype: dtype of the stored states, a name in DTYPES.
    """

    config: ExtractConfig
    spec: ModelSpec
    asked: States
    stored: tuple[str, ...]
    dtype: str

    @classmethod
    def of(cls, config: ExtractConfig) -> "Wanted":
        """Check a command line. Raises UsageError when the model or the layout cannot meet it."""
        spec = ModelSpec.read(config.model, config.sglang_args.get(OVERRIDES))
        asked = States.resolve(config.layers, config.final, spec.num_layers)
        stored = LAYOUTS[config.layout].stored_for(asked)
        dtype = spec.dtype if config.dtype == "auto" else config.dtype
        if dtype not in DTYPES:
            raise UsageError(f"--dtype auto: the model's own dtype is {dtype}; give --dtype")
        check_topk(config.topk_logits, spec.vocab_size)
        return cls(config, spec, asked, stored, dtype)

    def prepare(self, quiet: bool = False) -> PreparedStore:
        """The tokenized rows; they are prepared unless the output folder has them already.

        quiet: show no progress and no messages."""
        line = ProgressLine("tokenizing", None, "row", quiet=quiet)
        report = _silent if quiet else say
        try:
            return prepare(self.config, self.spec, report, lambda count, _total: line.set(count))
        finally:
            line.close()

    def layout(self, store: PreparedStore) -> Layout:
        """The layout of --layout for the states asked for."""
        return make_layout(self.config, self.spec, self.stored, self.dtype, store)

    def other_layout(self, name: str, dtype: str, store: PreparedStore) -> Layout:
        """Another layout for the same states. Raises UsageError when it cannot store them.

        name: a name in LAYOUTS. dtype: a name in DTYPES."""
        stored = LAYOUTS[name].stored_for(self.asked)
        return make_layout(replace(self.config, layout=name), self.spec, stored, dtype, store)

    def ask(self, layout: Layout, lengths: np.ndarray, device: str, tp: int) -> Ask:
        """What the budget depends on for samples of these lengths (in tokens, [samples])."""
        return Ask(
            spec=self.spec,
            device=device,
            tp=tp,
            row_bytes=layout.row_bytes,
            longest=int(lengths.max(initial=0)),
            batch_tokens=self.config.batch_tokens,
            host_gib=self.config.host_memory,
            topk=layout.topk,
            writers=self.config.writers or MOST_WRITERS,
            copied=not isinstance(layout, Framed),
        )


def make_layout(
    config: ExtractConfig,
    spec: ModelSpec,
    stored: Sequence[str],
    dtype: str,
    store: PreparedStore,
) -> Layout:
    """The layout of --layout for these states.

    stored: names of the states in a file. dtype: a name in DTYPES."""
    return LAYOUTS[config.layout](
        stored=tuple(stored),
        hidden=spec.hidden_size,
        dtype=DTYPES[dtype],
        model=spec.path.name,
        numbering=Numbering(store.rows, store.turns),
        topk=config.topk_logits,
    )


def _silent(_: str) -> None:
    return


def check_topk(k: int, vocab_size: int) -> None:
    """Raises UsageError when k is larger than the vocabulary."""
    if k > vocab_size:
        raise UsageError(f"--topk-logits {k}: the model has {vocab_size:,} tokens")
