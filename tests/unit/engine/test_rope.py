"""Rotary embeddings choose by each sample, whatever else is in its pass; unknown ones are refused."""

from typing import Any

import pytest
import torch
from torch import nn

from extractor.engine.rope import SampleRope, unknown_rope

ORIGINAL, MOST, HEAD = 16, 64, 8


class LongRope(nn.Module):
    """What SGLang's module has: the short table, and behind it the long one."""

    def __init__(self) -> None:
        super().__init__()
        self.original_max_position_embeddings = ORIGINAL
        self.head_size = self.rotary_dim = HEAD
        angle = torch.arange(ORIGINAL + MOST).float()[:, None].expand(-1, HEAD // 2)
        self.register_buffer("long_short_cos_sin_cache", torch.cat([angle, -angle], dim=-1))


class DynamicNTKScalingRotaryEmbedding(nn.Module):
    base = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.full((MOST, HEAD), 7.0))

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1 / base ** (torch.arange(0, HEAD, 2).float() / HEAD)


def rows_used(rope: SampleRope, module: nn.Module, positions: list[int], whole: list[int]) -> Any:
    """Which row of the table each token took: its cosine is the row's own number."""
    rope.whole = torch.tensor(whole)
    ones = torch.zeros(len(positions), HEAD)
    ones[:, 0] = 1.0
    query, key = module.forward(torch.tensor(positions), ones, ones)
    assert torch.equal(query, key)
    return query[:, 0].int().tolist()


def test_each_token_takes_the_factors_of_its_own_sample() -> None:
    module = LongRope()
    rope = SampleRope(nn.ModuleList([module]))
    assert rope.found == 1
    # A short sample beside a long one, and one of exactly the original context.
    assert rows_used(rope, module, [0, 1, 0, 20, 15], [2, 2, 21, 21, 16]) == [0, 1, 16, 36, 15]
    # The first chunk of a long sample, whose positions are all below the threshold.
    assert rows_used(rope, module, [0, 5], [17, 17]) == [16, 21]


def test_dynamic_ntk_has_the_plain_table() -> None:
    module = DynamicNTKScalingRotaryEmbedding()
    SampleRope(nn.ModuleList([module]))
    angles = torch.outer(torch.arange(MOST).float(), module._compute_inv_freq(100.0))
    assert torch.equal(module.cos_sin_cache, torch.cat([angles.cos(), angles.sin()], dim=-1))


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
        {"type": "yarn", "factor": 2.0},
        {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear"}},
    ],
)
def test_known_ones_pass(rope: dict[str, Any]) -> None:
    assert unknown_rope(rope) is None


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"full_attention": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_type": "default", "use_fope": True}, "Fourier"),
        ({"dual_chunk_attention_config": {"chunk_size": 4}}, "dual chunk"),
    ],
)
def test_others_are_named(rope: dict[str, Any], said: str) -> None:
    assert said in (unknown_rope(rope) or "")
