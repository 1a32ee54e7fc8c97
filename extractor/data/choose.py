"""--limit and --shuffle-seed: which rows are used."""

from collections.abc import Iterator, Sequence

import numpy as np

from extractor.data.read import Source, read_rows
from extractor.data.rows import RawRow


def chosen_rows(count: int, limit: int, seed: int) -> np.ndarray:
    """int64 [min(limit, count)], ascending: rows with the smallest keys, where a key is a row's
    number and the seed through splitmix64. The same on every machine and version, for ever."""
    with np.errstate(over="ignore"):
        key = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        key += np.uint64(seed % (1 << 64)) * np.uint64(0xD1342543DE82EF95)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key ^= key >> np.uint64(31)
    return np.sort(np.argsort(key, kind="stable")[:limit])


def selected(sources: Sequence[Source], limit: int | None, seed: int | None) -> Iterator[RawRow]:
    """The rows to use, in order, with the numbers that they have in the whole input."""
    if limit is None:
        yield from read_rows(sources)
        return
    if seed is None:
        for _, row in zip(range(limit), read_rows(sources), strict=False):
            yield row
        return
    total = sum(1 for _ in read_rows(sources))
    wanted = iter(chosen_rows(total, limit, seed).tolist())
    following = next(wanted, None)
    for row in read_rows(sources):
        if row.number == following:
            yield row
            following = next(wanted, None)
            if following is None:
                return
