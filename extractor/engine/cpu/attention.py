"""Prefill-only attention for the CPU platform. Imported once SGLang is, never by its platform loader."""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from torch.nn.functional import scaled_dot_product_attention

from extractor.engine.cpu.runtime import ATTENTION_BACKEND


class PrefillAttention(AttentionBackend):
    """Causal attention over the q, k, v of this forward, one sequence at a time, by PyTorch's SDPA.

    Prefill reads no cache, so none is written, except for a sample that runs in chunks: the engine
    then announces it (forward_batch's prefix lengths are not zero or more is to come) and each
    layer's keys and values are kept here until the last chunk. Holds for grouped-query attention,
    for MLA's expanded prefill (value width other than key width), for sliding windows and for
    attention sinks.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: list[int] = []
        self._prefix = 0
        self.more_to_come = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._lengths = list(forward_batch.extend_seq_lens_cpu)
        prefixes = list(forward_batch.extend_prefix_lens_cpu)
        assert not any(prefixes) or len(prefixes) == 1, "a chunked sample runs alone"
        self._prefix = prefixes[0]
        if not self._prefix:
            self._kept.clear()

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [tokens, heads*qk_dim], k and v likewise by kv heads; returns [tokens, heads*v_dim]."""
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        key = k.reshape(len(query), -1, layer.qk_head_dim)
        value = v.reshape(len(query), -1, layer.v_head_dim)
        if self._prefix:
            past_key, past_value = self._kept[layer.layer_id]
            key, value = torch.cat([past_key, key]), torch.cat([past_value, value])
        if self.more_to_come:
            self._kept[layer.layer_id] = key, value
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        sinks = kwargs.get("sinks")
        start = 0
        for length in self._lengths:
            rows = slice(start, start + length)
            keys = slice(start, start + length + self._prefix)
            out[rows] = self._attend(query[rows], key[keys], value[keys], layer, sinks)
            start += length
        return out.reshape(len(query), -1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Any,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        window = layer.sliding_window_size
        soft_cap = layer.logit_cap or 0.0
        plain = sinks is None and not soft_cap and (window is None or window < 0)
        if plain and not self._prefix:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling)
            return out.transpose(0, 1)
        q_at = torch.arange(len(query)).unsqueeze(1) + len(key) - len(query)
        k_at = torch.arange(len(key)).unsqueeze(0)
        seen = k_at <= q_at
        if window is not None and window >= 0:
            seen &= k_at >= q_at - window
        if sinks is None and not soft_cap:
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.scaling)
            return out.transpose(0, 1)
        scores = (q.float() @ k.float().transpose(1, 2)) * layer.scaling
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1).expand(-1, len(query), 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v.float()).to(query.dtype).transpose(0, 1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("this backend computes prefill only")

    def support_triton(self) -> bool:
        return False


@register_attention_backend(ATTENTION_BACKEND)
def _create(runner: Any) -> PrefillAttention:
    return PrefillAttention(runner)


def attend_as(name: str) -> None:
    """Be found by another name too: some models run with listed backends only. It must be one that a
    CPU could not run anyway."""
    if name != ATTENTION_BACKEND:
        register_attention_backend(name)(_create)


def _expand_always(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    return AttnForwardMethod.MHA


# MLA's later chunks would otherwise come absorbed, in the width of the latent cache; expanded ones
# join the keys and values kept from the chunks before.
AttentionBackendRegistry.register(ATTENTION_BACKEND, _expand_always)
