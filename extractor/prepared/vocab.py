"""Token counts over supervised tokens, and the draft vocabulary that they choose.

A draft vocabulary of size D holds the D most frequent supervised tokens of the target's, in the
order of their ids; where fewer occur, the lowest ids that did not occur fill it up. `d2t[i]` is the
target id of draft id i, minus i; `t2d[t]` says whether target id t is in it. Two tokens of equal
count that compete for the last place are told apart by their ids, as speculators does, or by which
was seen first, as SpecForge does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save

from extractor.errors import UsageError
from extractor.files import write_whole
from extractor.prepared.store import PreparedStore
from extractor.records import Sample

BLOCK = 1 << 22  # tokens counted at a time
FREQUENCIES = "token_freq.safetensors"
MAPPING = "draft_vocab.safetensors"
Ties = Literal["id", "first_seen"]

VOCAB = "vocab"


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """counts int64 [V]; first_seen int64 [V], the first sample that supervises a token, or N."""

    counts: np.ndarray
    first_seen: np.ndarray

    @classmethod
    def of(cls, store: PreparedStore, vocab_size: int) -> "TokenCounts":
        """Counts over a store's samples, in their order."""
        ids, mask = store.tokens()
        ends = np.cumsum(store.lengths, dtype=np.int64)
        counts = np.zeros(vocab_size, np.int64)
        first_seen = np.full(vocab_size, len(ends), np.int64)
        for begin in range(0, len(ids), BLOCK):
            place = begin + np.flatnonzero(mask[begin : begin + BLOCK])
            tokens = ids[place]
            counts += np.bincount(tokens, minlength=vocab_size)
            present, first = np.unique(tokens, return_index=True)
            sample = np.searchsorted(ends, place[first], side="right")
            first_seen[present] = np.minimum(first_seen[present], sample)
        return cls(counts, first_seen)

    @classmethod
    def of_samples(cls, samples: Iterable[Sample], vocab_size: int) -> "TokenCounts":
        """The same, of samples one by one."""
        counts = np.zeros(vocab_size, np.int64)
        first_seen = np.full(vocab_size, -1, np.int64)
        number = 0
        for number, sample in enumerate(samples, 1):
            ids, found = np.unique(
                sample.input_ids[sample.loss_mask.bool()].numpy(), return_counts=True
            )
            counts[ids] += found
            first_seen[ids[first_seen[ids] < 0]] = number - 1
        first_seen[first_seen < 0] = number
        return cls(counts, first_seen)


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """d2t int64 [D] offsets, t2d bool [V], share: of the supervised tokens, how many are in it."""

    d2t: np.ndarray
    t2d: np.ndarray
    share: float


def draft_vocabulary(counted: TokenCounts, size: int, ties: Ties = "id") -> DraftVocabulary:
    """Raises UsageError unless 1 <= size <= V."""
    counts = counted.counts
    if not 1 <= size <= len(counts):
        raise UsageError(f"--draft-vocab-size {size}: wanted 1 to {len(counts)}")
    ids = np.arange(len(counts))
    by_tie = counted.first_seen if ties == "first_seen" else np.zeros_like(ids)
    order = np.lexsort((ids, by_tie, -counts))
    chosen = order[:size][counts[order[:size]] > 0]
    unused = np.setdiff1d(ids[:size], chosen, assume_unique=True)
    chosen = np.sort(np.concatenate([chosen, unused[: size - len(chosen)]]))
    t2d = np.zeros(len(counts), bool)
    t2d[chosen] = True
    share = float(counts[chosen].sum() / max(int(counts.sum()), 1))
    return DraftVocabulary(chosen - np.arange(size), t2d, share)


def write_vocab(folder: Path, counted: TokenCounts, draft: DraftVocabulary | None) -> None:
    """vocab_files under their names, each only when it is whole. Raises OSError with the path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in vocab_files(counted, draft).items():
        write_whole(folder / name, parts, sync=False)


def vocab_files(
    counted: TokenCounts, draft: DraftVocabulary | None
) -> dict[str, list[bytes | memoryview]]:
    """token_freq.safetensors (`token_freq` int64 [V]) and, with a draft vocabulary,
    draft_vocab.safetensors (`d2t`, `t2d`): name to content."""
    files = {FREQUENCIES: _parts({"token_freq": counted.counts})}
    if draft is not None:
        files[MAPPING] = _parts({"d2t": draft.d2t, "t2d": draft.t2d})
    return files


def _parts(arrays: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    return [save(arrays, metadata={})]
