"""`extractor prepare`: the front end alone, rows to prepared samples."""

from extractor.config import PrepareConfig
from extractor.errors import EXIT_OK
from extractor.model import ModelSpec
from extractor.prepared.vocab import VOCAB, TokenCounts, draft_vocabulary, write_vocab
from extractor.progress import ProgressLine, say
from extractor.rows import prepare as front_end


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
