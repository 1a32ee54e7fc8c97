"""What to run and in which batches: pure functions of numbers.

Samples are known here by their index in the prepared store (row order) and their length in tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Samples are packed within windows of this many neighbours, so that the output grows roughly in row
# order (a half-finished folder is a fair sample of the rows) and batches are full all the same.
WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches as two arrays.

    Attributes:
        order: sample indices, batch after batch, int64 [N].
        starts: where each batch begins in order, and N: int64 [batches + 1].
    """

    order: Ints
    starts: Ints

    @classmethod
    def empty(cls) -> "Plan":
        return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        assert self.starts[0] == 0 and self.starts[-1] == len(self.order)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, number: int) -> Ints:
        return self.order[self.starts[number] : self.starts[number + 1]]

    def tokens(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Tokens of each batch, int64 [batches]."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(lengths[self.order].astype(np.int64), self.starts[:-1])


def shard(rows: Ints, lengths: npt.NDArray[np.integer], index: int, count: int) -> Ints:
    """Sample indices of part index of count: contiguous, cut between rows at equal tokens.

    Depends on the input alone and not on what is done, so that the jobs of an array, which start at
    different times, agree on it: no row is in two parts or in none."""
    if count == 1 or not len(rows):
        return np.arange(len(rows), dtype=np.int64)
    total = np.cumsum(lengths, dtype=np.int64)
    edges = np.searchsorted(total, [total[-1] * i // count for i in (index, index + 1)], "right")
    begin, end = (int(edge) for edge in edges)
    if index == count - 1:
        end = len(rows)
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
    """Pack samples into batches of at most max_tokens and max_sequences.

    A sample longer than max_tokens is a batch of its own. Within a window the longest open a batch
    and the shortest fill what these leave; each sample is looked at once.
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
    """Order of positions and batch sizes for one window."""
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    sorted_lengths = lengths[by_length].astype(np.int64)
    tokens = sorted_lengths.tolist()
    total = np.concatenate([[0], np.cumsum(sorted_lengths)])
    packed: list[Ints] = []
    sizes: list[int] = []
    first, end = 0, len(sorted_lengths)
    while first < end:
        # The longest that are left, as many as fit in a row of the sorted order, ...
        stop = int(np.searchsorted(total, total[first] + max_tokens, "right")) - 1
        stop = min(max(stop, first + 1), end, first + max_sequences)
        room = max_tokens - int(total[stop] - total[first])
        # ... then the shortest ones, which fill what these leave.
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
