"""From sharded, padded logits to the top k: the same as log_softmax and topk of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.engine.topk import Candidates, Part, candidates, merge
from extractor.errors import UsageError
from extractor.plan.request import check_topk

WORST = 1e4  # what padding holds: it must not be chosen, and not be in any normalizer


def shards(logits: torch.Tensor, ranks: int, padded: int) -> list[tuple[torch.Tensor, Part]]:
    """Columns of logits [T, V] shared among ranks, each padded to the same width."""
    columns = logits.shape[1]
    width = -(-columns // ranks)
    found: list[tuple[torch.Tensor, Part]] = []
    for rank in range(ranks):
        begin, end = min(rank * width, columns), min((rank + 1) * width, columns)
        wide = torch.full((len(logits), width + padded), WORST)
        wide[:, : end - begin] = logits[:, begin:end]
        spans = ((0, end - begin, begin),) if end > begin else ()
        found.append((wide, Part(spans)))
    return found


def together(found: list[Candidates]) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(
        torch.stack([c.logits for c in found]),
        torch.stack([c.ids for c in found]),
        torch.stack([c.normalizer for c in found]),
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 5),
    columns=st.integers(1, 40),
    ranks=st.integers(1, 5),
    padded=st.integers(0, 3),
    seed=st.integers(0, 1000),
    share=st.floats(0, 1),
)
def test_as_of_the_whole(
    tokens: int, columns: int, ranks: int, padded: int, seed: int, share: float
) -> None:
    k = max(1, round(share * columns))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, columns, generator=generator) * 5
    found = [candidates(wide, part, k) for wide, part in shards(logits, ranks, padded)]
    logprobs, ids = together(found)
    wanted = logits.log_softmax(-1).topk(k, dim=-1)
    assert logprobs.dtype == torch.float32 and ids.dtype == torch.int32
    torch.testing.assert_close(logprobs, wanted.values, atol=1e-5, rtol=0)
    assert torch.equal(ids.long(), wanted.indices)


def test_tokens_added_behind_the_padding() -> None:
    """A shard of tokens 10 to 12, two columns of padding, and tokens 50 and 51."""
    logits = torch.tensor([[1.0, 5.0, 2.0, WORST, WORST, 4.0, 6.0]])
    part = Part(((0, 3, 10), (5, 7, 50)))
    logprobs, ids = together([candidates(logits, part, 4)])
    assert len(part) == 5
    assert ids.tolist() == [[51, 11, 50, 12]]
    real = torch.tensor([6.0, 5.0, 4.0, 2.0, 1.0]).log_softmax(-1)
    torch.testing.assert_close(logprobs[0], real[:4])


def test_what_is_not_finite_stays_visible() -> None:
    """The writer rejects such a sample: it must not come out as an ordinary number."""
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    logprobs, _ = together([candidates(logits, Part(((0, 3, 0),)), 2)])
    assert torch.isnan(logprobs[0]).all() and torch.isfinite(logprobs[1]).all()


def test_more_than_the_vocabulary_is_refused() -> None:
    check_topk(100, 100)
    with pytest.raises(UsageError, match="--topk-logits 101: the model has 100 tokens"):
        check_topk(101, 100)
