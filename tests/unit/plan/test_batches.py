"""Properties of the plan: every sample once, in one part and one batch, within the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extractor.engine.passes import passes_of
from extractor.plan import batches as plan

lengths_of = st.lists(st.integers(1, 200), min_size=0, max_size=60)
ROWS = st.lists(st.integers(1, 4), min_size=0, max_size=40)  # samples of each row (--turns each)


def samples(turns: list[int]) -> np.ndarray:
    """The row of each sample, with rows that became no sample left out."""
    rows = np.cumsum(np.ones(len(turns), np.int64) + np.arange(len(turns)) % 3) - 1
    return np.repeat(rows, turns).astype(np.int64)


@given(ROWS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_parts_are_disjoint_and_complete(turns: list[int], count: int, chance: object) -> None:
    rows = samples(turns)
    lengths = np.array([chance.randint(1, 50) for _ in rows], np.int32)  # pyright: ignore
    parts = [plan.shard(rows, lengths, index, count) for index in range(count)]
    # One after the other: no sample is in two parts or in none.
    assert np.concatenate(parts).tolist() == list(range(len(rows)))
    of_rows = [set(rows[part].tolist()) for part in parts]
    assert sum(map(len, of_rows)) == len(set(rows.tolist())), "a row is in two parts"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(2, 9))
def test_parts_are_fair(lengths: list[int], count: int) -> None:
    """With a sample a row, no part is off its share of the tokens by more than a sample at each end."""
    sizes = np.array(lengths, np.int32)
    rows = np.arange(len(sizes), dtype=np.int64)
    share = sizes.sum() / count
    for index in range(count):
        tokens = int(sizes[plan.shard(rows, sizes, index, count)].sum())
        assert abs(tokens - share) <= 2 * sizes.max()


@given(
    lengths_of,
    st.integers(1, 300),
    st.integers(1, 12),
    st.integers(1, 70),
    st.integers(1, 5),
)
def test_batches_are_disjoint_complete_and_within_the_budget(
    lengths: list[int], budget: int, most: int, window: int, step: int
) -> None:
    sizes = np.array(lengths, np.int32)
    left = np.arange(0, len(sizes), step, dtype=np.int64)  # what is not done yet has gaps
    made = plan.batches(left, sizes, budget, most, window)
    batches = [made.batch(number).tolist() for number in range(len(made))]
    assert sorted(one for batch in batches for one in batch) == left.tolist()
    for batch, tokens in zip(batches, made.tokens(sizes).tolist(), strict=True):
        assert 1 <= len(batch) <= most
        assert tokens == sizes[batch].sum()
        assert tokens <= budget or len(batch) == 1, "only a sample too long for any may be alone"
        # Neighbours stay together: the output grows in row order, a window at a time.
        assert len({left.tolist().index(one) // window for one in batch}) == 1


@given(lengths_of, st.integers(1, 300), st.integers(1, 12))
def test_batches_are_full(lengths: list[int], budget: int, most: int) -> None:
    """No sample that is left fits into a batch before it: at most one batch of a window is less than
    half full, unless it has all the sequences that it may."""
    sizes = np.array(lengths, np.int32)
    made = plan.batches(np.arange(len(sizes), dtype=np.int64), sizes, budget, most)
    counts = np.diff(made.starts)
    slack = (made.tokens(sizes) * 2 <= budget) & (counts < most)
    assert slack.sum() <= 1


@given(lengths_of, st.integers(1, 300), st.integers(1, 12), st.integers(1, 80))
def test_every_token_goes_through_the_model_once(
    lengths: list[int], budget: int, most: int, limit: int
) -> None:
    """Plan and passes together: each sample's tokens once, in order, a long one in chunks whose
    prefixes are what went before; no pass is beyond its limit, also one that memory made shorter."""
    sizes = np.array(lengths, np.int32)
    made = plan.batches(np.arange(len(sizes), dtype=np.int64), sizes, budget, most)
    seen: list[int] = []
    for number in range(len(made)):
        batch = made.batch(number).tolist()
        waiting = [(one, int(sizes[one])) for one in batch]
        for each in passes_of([size for _, size in waiting], limit):
            assert 0 < sum(each.lengths) <= limit
            if not (each.prefix or each.more):
                seen += [one for one, _ in waiting[: len(each.lengths)]]
                del waiting[: len(each.lengths)]
                continue
            one, size = waiting[0]
            (chunk,) = each.lengths
            assert size > limit and each.prefix + chunk <= size
            assert each.more == (each.prefix + chunk < size)
            if not each.more:
                seen.append(one)
                del waiting[0]
        assert not waiting
    assert sorted(seen) == list(range(len(sizes)))


def test_an_empty_plan() -> None:
    assert not len(plan.batches(np.zeros(0, np.int64), np.zeros(0, np.int32), 10, 2))
    assert not len(plan.Plan.empty()) and not len(plan.Plan.empty().tokens(np.zeros(0, np.int32)))
