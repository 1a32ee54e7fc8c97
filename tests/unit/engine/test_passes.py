from hypothesis import given
from hypothesis import strategies as st

from extractor.engine.passes import passes_of


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 60))
def test_every_token_once_in_order(lengths: list[int], limit: int) -> None:
    passes = list(passes_of(lengths, limit))
    at, rest = 0, list(lengths)
    for each in passes:
        assert each.tokens == slice(at, at + sum(each.lengths))
        assert 0 < sum(each.lengths) <= limit
        at = each.tokens.stop
        if each.prefix or each.more:
            assert rest[0] > limit and len(each.lengths) == 1
            assert each.more == (each.prefix + each.lengths[0] < rest[0])
            if not each.more:
                assert each.prefix + each.lengths[0] == rest.pop(0)
        else:
            assert each.lengths == tuple(rest[: len(each.lengths)])
            del rest[: len(each.lengths)]
    assert at == sum(lengths) and not rest


def test_whole_sequences_are_not_cut() -> None:
    assert [each.lengths for each in passes_of((3, 4, 5, 9, 1), 8)] == [
        (3, 4),
        (5,),
        (8,),
        (1,),
        (1,),
    ]


def test_a_batch_within_the_limit_is_one_pass() -> None:
    (one,) = passes_of((3, 4, 1), 8)
    assert one.tokens == slice(0, 8) and not one.prefix and not one.more
