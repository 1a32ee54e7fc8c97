"""The verbs `prepare` and `show`: the data front end alone, on a machine without a GPU."""

import dataclasses
import sys
from pathlib import Path

from extractor.config import DataConfig, PrepareConfig, ShowConfig
from extractor.data import prepare as front_end
from extractor.data.show import show as show_row
from extractor.data.vocab import TokenCounts, draft_vocabulary, write_vocab
from extractor.errors import EXIT_OK
from extractor.model import ModelSpec
from extractor.progress import ProgressLine, say
from extractor.store import VOCAB


def prepare(config: PrepareConfig) -> int:
    """Returns the exit code; raises UsageError."""
    spec = ModelSpec.read(config.model)
    line = ProgressLine("tokenizing", None, "row")
    try:
        store = front_end.prepare(config, spec, say, lambda count, _total: line.set(count))
    finally:
        line.close()
    counts = TokenCounts.of(store, spec.vocab_size)
    size = config.draft_vocab_size
    write_vocab(config.output / VOCAB, counts, draft_vocabulary(counts, size) if size else None)
    say(f"prepared in {store.path}")
    return EXIT_OK


def show(config: ShowConfig) -> int:
    """Returns 0, or 1 for a rejected row; raises UsageError."""
    data = None
    if config.model is not None:
        same = {f.name for f in dataclasses.fields(DataConfig)} & {
            f.name for f in dataclasses.fields(ShowConfig)
        }
        values = {name: getattr(config, name) for name in same}
        data = DataConfig(**values, data=(config.target,), output=Path("unused"), bad_rows="skip")
    return show_row(
        config.target,
        config.row,
        write=lambda text: print(text),  # noqa: T201
        config=data,
        ids=config.ids,
        colour=sys.stdout.isatty(),
    )
