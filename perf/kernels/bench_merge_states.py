"""merge_states of the cpu provider: beside the plain torch of the reference, and how near it is to a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loongserve.kernels import reference
from loongserve.kernels.merge import merge_states
from loongserve.kernels.state import AttentionState

LEAST_RATIO = 0.7


def test_merge(ratio_to: Callable[..., float]) -> None:
    tokens, heads, head_dim = 2048, 9, 64
    generator = torch.Generator().manual_seed(0)
    a, b, out = (
        AttentionState(
            torch.randn(tokens, heads, head_dim, generator=generator), torch.randn(tokens, heads, generator=generator)
        )
        for _ in range(3)
    )
    expected = AttentionState.empty(tokens, heads, head_dim, dtype=torch.float64)
    wide = [AttentionState(state.out.double(), state.lse.double()) for state in (a, b)]
    reference.merge_states(wide[0], wide[1], expected)
    merge_states(a, b, out)
    torch.testing.assert_close(out.out.double(), expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    ratio = ratio_to(
        lambda: merge_states(a, b, out),
        lambda: reference.merge_states(a, b, out),
        "plain torch",
        3 * a.out.nbytes / 1e9,
        "GB",
    )
    assert ratio > LEAST_RATIO
