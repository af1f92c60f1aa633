"""RMS norm, optionally of a residual stream that the input is added to first.

    y = round(x / sqrt(mean(x^2) + eps)) * weight        in float32 but for the rounding to x's dtype

Source: Zhang and Sennrich 2019; rounding as in transformers' LlamaRMSNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.checks import check_last_contiguous, check_tensor
from loongserve.kernels.provider import get_provider


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Normalise the last dimension of ``x``, or of ``residual + x``.

    Args:
        x: [..., hidden], contiguous last dim.
        weight: [hidden], dtype of ``x``.
        eps: added to the mean square.
        residual: [..., hidden], dtype of ``x``; ``x`` is added to it in place and the sum is normalised.
        out: [..., hidden], dtype of ``x``; may be ``x``. None: a new tensor.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dim() < 1:
        raise ValueError("x must have at least one dimension, got a scalar")
    check_tensor("weight", weight, (x.shape[-1],), x.dtype, x.device)
    check_last_contiguous("x", x)
    check_last_contiguous("weight", weight)
    if residual is not None:
        check_tensor("residual", residual, tuple(x.shape), x.dtype, x.device)
        check_last_contiguous("residual", residual)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, tuple(x.shape), x.dtype, x.device)
        check_last_contiguous("out", out)
    return get_provider(x.device).rms_norm(x, weight, eps, residual=residual, out=out)
