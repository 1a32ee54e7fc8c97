"""Which samples a job runs and in which batches: pure functions of numbers.

A sample is given by its index in the prepared store (in row order) and its length in tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Samples are packed within windows of this many neighbours. Windows keep the output roughly in row
# order, so that a half-finished folder does not hold the longest samples only, and they are large
# enough for full batches.
WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches as two arrays.

    Attributes:
        order: sample indices, batch after batch, int64 [N] for N samples.
        starts: where each batch begins in `order`, and N at the end, int64 [batches + 1].
    """

    order: Ints
    starts: Ints

    @classmethod
    def empty(cls) -> "Plan":
        """A plan without batches."""
        return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        assert self.starts[0] == 0 and self.starts[-1] == len(self.order)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, number: int) -> Ints:
        """Sample indices of one batch, int64 [samples]."""
        return self.order[self.starts[number] : self.starts[number + 1]]

    def tokens(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Tokens of each batch, int64 [batches]. lengths: tokens of every sample of the store."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(lengths[self.order].astype(np.int64), self.starts[:-1])


def shard(rows: Ints, lengths: npt.NDArray[np.integer], index: int, count: int) -> Ints:
    """Sample indices of part `index` of `count`, int64 [samples].

    The parts are contiguous and cut between rows, at about the same number of tokens each.

    It depends on the rows alone and not on what is done already. The jobs of an array start at
    different times and still agree, so that each row is in exactly one part.

    rows, lengths: row and tokens of every sample of the store, in row order, [samples]."""
    if count == 1 or not len(rows):
        return np.arange(len(rows), dtype=np.int64)
    total = np.cumsum(lengths, dtype=np.int64)
    edges = np.searchsorted(total, [total[-1] * i // count for i in (index, index + 1)], "right")
    begin, end = (int(edge) for edge in edges)
    if index == count - 1:
        end = len(rows)
    # Both edges move to the next row, so that all samples of one row are in the same part.
    while 0 < begin < len(rows) and rows[begin] == rows[begin - 1]:
        begin += 1
    while 0 < end < len(rows) and rows[end] == rows[end - 1]:
        end += 1
    return np.arange(begin, end, dtype=np.int64)


def batches(
    indices: Ints,
    lengths: npt.NDArray[np.integer],
    max_tokens: int,
    max_sequences: int,
    window: int = WINDOW,
) -> Plan:
    """Pack samples into batches of at most max_tokens tokens and max_sequences samples.

    A sample longer than max_tokens is a batch of its own. Within a window a batch takes the longest
    samples that are left, then the shortest ones that fit into the rest. Each sample is looked at once.

    indices: samples to pack, int64 [N]. lengths: tokens of every sample of the store.
    """
    order: list[Ints] = []
    sizes: list[int] = []
    for begin in range(0, len(indices), window):
        part = indices[begin : begin + window]
        packed, counts = _pack(lengths[part], max_tokens, max_sequences)
        order.append(part[packed])
        sizes.extend(counts)
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    joined = np.concatenate(order) if order else np.zeros(0, np.int64)
    return Plan(joined, starts)


def _pack(
    lengths: npt.NDArray[np.integer], max_tokens: int, max_sequences: int
) -> tuple[Ints, list[int]]:
    """Pack one window: positions in it, batch after batch, int64 [N], and the samples of each batch."""
    # Positions are sorted by length, longest first. total[i] is the tokens of the first i of them, so
    # that a binary search finds how many successive samples fit.
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    sorted_lengths = lengths[by_length].astype(np.int64)
    tokens = sorted_lengths.tolist()
    total = np.concatenate([[0], np.cumsum(sorted_lengths)])
    packed: list[Ints] = []
    sizes: list[int] = []
    first, end = 0, len(sorted_lengths)
    while first < end:
        # First the longest samples that are left, as many successive ones as fit.
        stop = int(np.searchsorted(total, total[first] + max_tokens, "right")) - 1
        stop = min(max(stop, first + 1), end, first + max_sequences)
        room = max_tokens - int(total[stop] - total[first])
        # Then the shortest samples that are left, as long as the next one fits.
        tail = end
        count = stop - first
        while tail > stop and count < max_sequences and tokens[tail - 1] <= room:
            room -= tokens[tail - 1]
            tail -= 1
            count += 1
        packed.append(by_length[first:stop])
        packed.append(by_length[tail:end])
        sizes.append(count)
        first, end = stop, tail
    return np.concatenate(packed) if packed else np.zeros(0, np.int64), sizes
