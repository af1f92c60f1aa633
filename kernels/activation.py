"""The gated activation of SwiGLU: silu(gate) * up, silu(z) = z / (1 + exp(-z)).

Source: Shazeer 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.checks import check_last_contiguous, check_tensor
from loongserve.kernels.provider import get_provider


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute silu(x[:, :n]) * x[:, n:], in float32 with one rounding at the end.

    Args:
        x: [tokens, 2 n], gate before up, contiguous last dim.
        out: [tokens, n], dtype of ``x``, contiguous last dim. None: a new tensor.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x must be [tokens, 2 n], got {list(x.shape)}")
    shape = (x.shape[0], x.shape[1] // 2)
    check_last_contiguous("x", x)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, shape, x.dtype, x.device)
        check_last_contiguous("out", out)
    return get_provider(x.device).silu_and_mul(x, out)
