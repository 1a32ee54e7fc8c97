"""The verbs `prepare` and `show`: the data front end alone, on a machine without a GPU."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from extractor.config import DataConfig, parse
from extractor.data.read import check_names
from extractor.errors import EXIT_OK
from extractor.progress import ProgressLine, say


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(DataConfig):
    """Tokenize and mask the rows, beside the output; extract goes on from there."""


def prepare(argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    config = parse(PrepareConfig, argv, "extractor prepare")
    check_names(config.data)  # before imports that take seconds
    from extractor.data import prepare as front_end  # noqa: PLC0415
    from extractor.data.vocab import (  # noqa: PLC0415
        TokenCounts,
        draft_vocabulary,
        write_vocab,
    )
    from extractor.model import ModelSpec  # noqa: PLC0415
    from extractor.store import VOCAB  # noqa: PLC0415

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """A sample in the terminal, its supervised text coloured; a rejected row says why."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """An output folder, or a data file (then give --model)."""
    row: int = 0
    """Number of the row, from 0."""
    model: str | None = None
    """Where the tokenizer comes from, for a data file or a folder that was moved."""
    ids: bool = False
    """Also a line a token: position, id, mask, text."""
    chat_template: Path | None = None
    """As in extract, for a data file."""
    turns: str = "whole"
    """As in extract, for a data file."""
    supervise: str = "assistant"
    """As in extract, for a data file."""
    trust_remote_code: bool = False
    """As in extract."""


def show(argv: Sequence[str]) -> int:
    """Returns 0, or 1 for a rejected row; raises UsageError."""
    config = parse(ShowConfig, argv, "extractor show")
    if not Path(config.target).expanduser().exists():
        check_names([config.target])
    from extractor.data.show import show as show_row  # noqa: PLC0415

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
