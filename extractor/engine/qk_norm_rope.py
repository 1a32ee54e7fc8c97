"""Qwen3's norm of queries and keys and their rotation, in one pass over memory.

SGLang takes three: an RMS norm of every head in place, the rotation in place, and, as queries are
columns of a wider tensor there, a copy of them for FlashAttention. On a small model in large batches
each is bound by memory. Here a head is read once; a query is written to where attention reads it, a key
back to where it was (docs/decisions/0008-one-kernel-before-attention.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from extractor.engine import compat

# Heads a program, and its warps.
ROWS, WARPS = 8, 2
KINDS = ("Qwen3Attention", "Qwen3MoeAttention")


@triton.jit
def norm_and_rotate_kernel(
    qkv, q_out, q_weight, k_weight, cos_sin, positions,
    rows, stride, q_heads, heads, eps,
    HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token, head = row // heads, row % heads
    is_query = (head < q_heads)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = live[:, None] & (column < HALF)
    source = qkv + (token * stride + head * (2 * HALF))[:, None] + column
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)

    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
    weight = tl.where(is_query, q_weight + column, k_weight + column)
    dtype = qkv.dtype.element_ty
    # Rounded between the two steps, as the model's own code is.
    a = (a * scale * tl.load(weight).to(tl.float32)).to(dtype).to(tl.float32)
    b = (b * scale * tl.load(weight + HALF).to(tl.float32)).to(dtype).to(tl.float32)

    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angle = cos_sin + (position * (2 * HALF))[:, None] + column
    cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=mask, other=0.0).to(tl.float32)
    query = q_out + ((token * q_heads + head) * (2 * HALF))[:, None] + column
    target = tl.where(is_query, query, source)
    tl.store(target, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(target + HALF, (b * cos + a * sin).to(dtype), mask=mask)


def norm_and_rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_heads: int,
    k_heads: int,
    eps: float,
) -> torch.Tensor:
    """RMS norm of each head of queries and keys, then rotation of its two halves (NeoX style).

    Args:
        qkv: [tokens, (q_heads + 2 * k_heads) * head_dim], rows contiguous, head_dim a power of two. Its
            keys are overwritten; its queries and values are left as they are.
        positions: [tokens], integers.
        q_weight, k_weight: [head_dim].
        cos_sin: [positions, head_dim]: the cosines of head_dim / 2 frequencies, then their sines.

    Returns the queries: [tokens, q_heads * head_dim], contiguous, of qkv's dtype.
    """
    tokens, head_dim, heads = len(qkv), cos_sin.shape[-1], q_heads + k_heads
    queries = torch.empty(tokens, q_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    rows = tokens * heads
    norm_and_rotate_kernel[(triton.cdiv(rows, ROWS),)](
        qkv, queries, q_weight, k_weight, cos_sin, positions,
        rows, qkv.stride(0), q_heads, heads, eps,
        HALF=head_dim // 2, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return queries


def install(backbone: nn.Module) -> int:
    """Let a backbone's attention layers take the kernel, where they do what it does; how many."""
    layers: Any = backbone.layers
    fitting = [layer.self_attn for layer in layers if _fits(getattr(layer, "self_attn", None))]
    for attention in fitting:
        _replace(attention)
    return len(fitting)


def _fits(attention: Any) -> bool:
    """Whether its rotation is the plain one of whole heads (of any scaling, but without sections), and
    both norms are of one epsilon."""
    if type(attention).__name__ not in KINDS:
        return False
    plain = compat.symbol("sglang.srt.layers.rotary_embedding", "RotaryEmbedding")
    rotary, width = attention.rotary_emb, attention.head_dim
    return (
        isinstance(rotary, plain)
        and type(rotary).forward_cuda is plain.forward_cuda
        and rotary.is_neox_style
        and rotary.rotary_dim == width
        and width & (width - 1) == 0
        and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon
    )


def _replace(attention: Any) -> None:
    def queries_keys_values(qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries = norm_and_rotate(
            qkv,
            positions,
            attention.q_norm.weight,
            attention.k_norm.weight,
            attention.rotary_emb.cos_sin_cache,
            q_heads=attention.num_heads,
            k_heads=attention.num_kv_heads,
            eps=attention.q_norm.variance_epsilon,
        )
        widths = [attention.q_size, attention.kv_size, attention.kv_size]
        _, keys, values = qkv.split(widths, dim=-1)
        return queries, keys, values

    def prepare(positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv, _ = attention.qkv_proj(hidden_states)
        return queries_keys_values(qkv, positions)

    def norm_rope(qkv: torch.Tensor, positions: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
        # Else the layer may take its rotation to have written keys and values to the pool.
        attention._used_fused_qk_norm_rope_last_call = True
        return queries_keys_values(qkv, positions)

    if hasattr(attention, "apply_qk_norm_rope"):
        attention.apply_qk_norm_rope = norm_rope
    else:
        attention.forward_prepare_native = prepare
