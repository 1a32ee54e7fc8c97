"""A batch in passes of bounded length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes through the model at once.

    Attributes:
        tokens: where its tokens are in the batch.
        lengths: of its sequences, or of its one sequence's chunk.
        prefix: tokens of that sequence that went before.
        more: whether more of that sequence comes.
        whole: tokens of that sequence's whole sample; 0 where its sequences are whole themselves.
    """

    tokens: slice
    lengths: tuple[int, ...]
    prefix: int = 0
    more: bool = False
    whole: int = 0


def passes_of(lengths: Sequence[int], limit: int) -> Iterator[Pass]:
    """The passes of a batch of sequences, in order, each of at most limit tokens: neighbours together
    while they fit, and a longer one by itself in chunks."""
    waiting: list[int] = []
    begin = end = 0  # of those that wait
    for length in lengths:
        if waiting and end - begin + length > limit:
            yield Pass(slice(begin, end), tuple(waiting))
            waiting, begin = [], end
        if length <= limit:
            waiting.append(length)
        else:
            for start in range(0, length, limit):
                count = min(limit, length - start)
                tokens = slice(end + start, end + start + count)
                yield Pass(tokens, (count,), start, start + count < length, length)
            begin = end + length
        end += length
    if waiting:
        yield Pass(slice(begin, end), tuple(waiting))
