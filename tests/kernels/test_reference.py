"""The reference itself, against plain Python numbers."""

import math

import torch

from loongserve.kernels import reference


def attend_by_hand(q, k, v, visible, scale):
    """Attend for one query and head with Python's floats."""
    scores = [scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in k]
    kept = [index for index, seen in enumerate(visible) if seen]
    if not kept:
        return [0.0] * len(q), -math.inf
    lse = math.log(math.fsum(math.exp(scores[index]) for index in kept))
    out = [math.fsum(math.exp(scores[index] - lse) * v[index][d] for index in kept) for d in range(len(q))]
    return out, lse


def test_attend_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 5, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    state = reference.attend(q, k, v, visible, 0.7, torch.float64)
    for token in range(4):
        for head in range(4):
            expected, lse = attend_by_hand(
                q[token, head].tolist(), k[:, head // 2].tolist(), v[:, head // 2].tolist(), visible[token], 0.7
            )
            torch.testing.assert_close(state.out[token, head].tolist(), expected)
            torch.testing.assert_close(state.lse[token, head].item(), lse)
