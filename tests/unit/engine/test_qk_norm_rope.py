"""The kernel before attention, run by Triton's interpreter in a process of its own (it is chosen when
Triton is imported), against the model's own formula. tests/integration/test_own_kernels.py has it inside
of SGLang's models; on a GPU the parity tests run it."""

import os
import subprocess
import sys

import pytest

AGAINST_FORMULA = """
import torch
from extractor.engine.qk_norm_rope import norm_and_rotate

torch.manual_seed(0)
dtype, tokens, q_heads, k_heads, width = torch.{dtype}, 37, 6, 2, 64
wide = torch.randn(tokens, (q_heads + 2 * k_heads) * width + 5).to(dtype)
qkv = wide[:, :-5]  # rows further apart than they are long
q_weight, k_weight = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
positions = torch.randint(0, 100, (tokens,))
angles = torch.arange(100)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
table = torch.cat([angles.cos(), angles.sin()], -1)

def formula(heads, weight):
    x = heads.reshape(tokens, -1, width).float()
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(dtype).float()
    cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(dtype).reshape(tokens, -1)

cut = [q_heads * width, k_heads * width, k_heads * width]
queries, keys, values = qkv.clone().split(cut, -1)
found = norm_and_rotate(
    qkv, positions, q_weight, k_weight, table, q_heads=q_heads, k_heads=k_heads, eps=1e-6
)

def apart(new, old):
    return (new.float() - old.float()).norm() / old.float().norm()

# The interpreter cuts bfloat16 off where a GPU rounds it.
limit = 1e-6 if dtype == torch.float32 else 1e-2
assert found.is_contiguous() and found.dtype == dtype
assert apart(found, formula(queries, q_weight)) < limit
assert apart(qkv.split(cut, -1)[1], formula(keys, k_weight)) < limit
assert torch.equal(qkv.split(cut, -1)[0], queries) and torch.equal(qkv.split(cut, -1)[2], values)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_the_models_formula(dtype: str) -> None:
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", AGAINST_FORMULA.format(dtype=dtype)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=300,
    )
