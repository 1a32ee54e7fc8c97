"""Counts supervised tokens, and chooses a draft vocabulary by these counts.

A draft vocabulary of size D holds the D most frequent supervised tokens of the target's vocabulary,
in the order of their ids. When fewer than D different tokens occur, the lowest other ids fill it up.
`d2t[i]` is the target id of draft id i, minus i. `t2d[t]` is true when target id t is in it. When
tokens of equal count compete for the last place, the lower id wins, as in speculators, or the token
that is seen first, as in SpecForge.
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
    """Counts over the supervised tokens of N samples; V is the size of the vocabulary.

    Attributes:
        counts: int64 [V], how often each token occurs.
        first_seen: int64 [V], index of the first sample that supervises the token, or N.
    """

    counts: np.ndarray
    first_seen: np.ndarray

    @classmethod
    def of(cls, store: PreparedStore, vocab_size: int) -> "TokenCounts":
        """Counts over the samples of a store, in their order."""
        ids, mask = store.tokens()
        ends = np.cumsum(store.lengths, dtype=np.int64)
        counts = np.zeros(vocab_size, np.int64)
        first_seen = np.full(vocab_size, len(ends), np.int64)
        # The mapped arrays are read block by block, so that memory stays flat.
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
        """The same counts, from samples that are read one by one."""
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
    """A draft vocabulary of D tokens out of V.

    Attributes:
        d2t: int64 [D], target id of each draft id, minus the draft id.
        t2d: bool [V], whether each target id is in it.
        share: fraction of the supervised tokens that are in it, 0 to 1.
    """

    d2t: np.ndarray
    t2d: np.ndarray
    share: float


def draft_vocabulary(counted: TokenCounts, size: int, ties: Ties = "id") -> DraftVocabulary:
    """The draft vocabulary of the `size` most frequent tokens.

    Raises:
        UsageError: size is not in [1, V].
    """
    counts = counted.counts
    if not 1 <= size <= len(counts):
        raise UsageError(f"--draft-vocab-size {size}: wanted 1 to {len(counts)}")
    ids = np.arange(len(counts))
    by_tie = counted.first_seen if ties == "first_seen" else np.zeros_like(ids)
    order = np.lexsort((ids, by_tie, -counts))  # by count, then by_tie, then id
    chosen = order[:size][counts[order[:size]] > 0]
    unused = np.setdiff1d(ids[:size], chosen, assume_unique=True)
    chosen = np.sort(np.concatenate([chosen, unused[: size - len(chosen)]]))
    t2d = np.zeros(len(counts), bool)
    t2d[chosen] = True
    share = float(counts[chosen].sum() / max(int(counts.sum()), 1))
    return DraftVocabulary(chosen - np.arange(size), t2d, share)


def write_vocab(folder: Path, counted: TokenCounts, draft: DraftVocabulary | None) -> None:
    """Write vocab_files into a folder. A file appears under its name when it is complete.

    Raises:
        OSError: a file cannot be written; it has the path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in vocab_files(counted, draft).items():
        write_whole(folder / name, parts, sync=False)


def vocab_files(
    counted: TokenCounts, draft: DraftVocabulary | None
) -> dict[str, list[bytes | memoryview]]:
    """The files of a vocabulary, name to content.

    token_freq.safetensors holds `token_freq` int64 [V]. With a draft vocabulary,
    draft_vocab.safetensors holds `d2t` int64 [D] and `t2d` bool [V].
    """
    files = {FREQUENCIES: _parts({"token_freq": counted.counts})}
    if draft is not None:
        files[MAPPING] = _parts({"d2t": draft.d2t, "t2d": draft.t2d})
    return files


def _parts(arrays: dict[str, np.ndarray]) -> list[bytes | memoryview]:
    return [save(arrays, metadata={})]
