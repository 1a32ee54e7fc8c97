"""Rotary embeddings that look at the whole pass, made to look at each sample by itself.

transformers, and the model as it was trained, choose by the length of the sequence. SGLang's modules
see a pass that packs many sequences, and one chunk of a sequence that is longer than a pass:

- LongRoPE takes the long factors for every token of a pass in which one position is beyond the
  original context. Here each token takes those of its own sample, also in the sample's first chunk.
- Dynamic NTK has one table, made for the longest context, for sequences of any length. Up to the
  context that the config names transformers uses the plain table, and so does this; longer samples
  are beyond the model's context.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

# Rope types whose tables depend on a token's own position alone, or that are settled here.
KNOWN = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "longrope",
        "su",
        "dynamic",
        "proportional",
        "mrope",
    }
)


def unknown_rope(rope: Mapping[str, Any]) -> str | None:
    """What keeps a rotary embedding from being right here, as a phrase; None for nothing.

    rope: its parameters in the config (ModelSpec.rope)."""
    if rope.get("dual_chunk_attention_config"):
        return "dual chunk attention"
    # Some families name one set of parameters for each type of layer.
    for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = each.get("rope_type", each.get("type", "default"))
        if isinstance(kind, str) and kind not in KNOWN:
            return f"a rotary embedding of type {kind!r}"
        if each.get("use_fope") or each.get("video_rope"):
            return "a Fourier or video rotary embedding"
    return None


class SampleRope:
    """The rotary modules of a model, which take the length of each token's sample from here.

    Attributes:
        whole: int64 [tokens] of the pass, the length of each token's whole sample.
        found: how many modules choose by it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.whole: torch.Tensor | None = None
        self.found = 0
        for module in model.modules():
            if hasattr(module, "long_short_cos_sin_cache"):
                module.forward = partial(self._long_rope, module)
                self.found += 1
            elif type(module).__name__ == "DynamicNTKScalingRotaryEmbedding":
                _make_plain(module)

    def _long_rope(
        self,
        module: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Phi3LongRoPEScaledRotaryEmbedding.forward; the short table ends where the long one begins.

        positions [tokens]; query and key [tokens, heads * head_size]."""
        assert self.whole is not None and offsets is None
        first_long = module.original_max_position_embeddings
        rows = positions + (self.whole > first_long) * first_long
        table = module.long_short_cos_sin_cache = module.long_short_cos_sin_cache.to(rows.device)
        cos, sin = (half.repeat(1, 2).unsqueeze(-2) for half in table[rows].chunk(2, dim=-1))
        return tuple(
            _rotate(x, cos, sin, module.head_size, module.rotary_dim) for x in (query, key)
        )  # pyright: ignore[reportReturnType]


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head: int, rotary: int
) -> torch.Tensor:
    heads = x.unflatten(1, (-1, head))
    turned, rest = heads[..., :rotary], heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1).flatten(-2)


def _make_plain(module: Any) -> None:
    table = module.cos_sin_cache
    frequencies = module._compute_inv_freq(module.base).to(table.device)
    angles = torch.outer(torch.arange(len(table), device=table.device).float(), frequencies)
    table.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))
