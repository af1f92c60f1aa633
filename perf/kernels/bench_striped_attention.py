"""striped_attention of the cpu provider: a causal block beside torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loongserve.kernels import reference
from loongserve.kernels.merge import finalize
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import plan_striped_attention, striped_attention

TOKENS = 1024
# SDPA computes the same and no state: what it costs to keep one is what is allowed.
LEAST_RATIO = 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=["9:3x64", "8:2x128"])
def test_causal_block(heads: tuple[int, int, int], dtype: torch.dtype, ratio_to: Callable[..., float]) -> None:
    q_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOKENS, n, head_dim, generator=generator).to(dtype) for n in (q_heads, kv_heads, kv_heads))
    plan = plan_striped_attention(
        [0, TOKENS],
        [0, TOKENS],
        [0],
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device="cpu",
    )
    scale = head_dim**-0.5

    def ours() -> torch.Tensor:
        state = AttentionState.empty(TOKENS, q_heads, head_dim)
        striped_attention(plan, q, k, v, state, scale=scale)
        return finalize(state, dtype)

    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    expected = reference.attend(q, k, v, visible, scale, torch.float64).out
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours().double(), expected, rtol=tolerance, atol=tolerance)

    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    gigaflop = 4 * q_heads * head_dim * TOKENS * (TOKENS + 1) / 2 / 1e9
    ratio = ratio_to(ours, lambda: sdpa(q4, k4, v4, is_causal=True, enable_gqa=True), "SDPA", gigaflop, "GFLOP")
    assert ratio > LEAST_RATIO
