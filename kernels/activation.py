"""Gated activations: SwiGLU's silu(gate) * up and GeGLU's gelu(gate) * up.

    silu(z) = z / (1 + exp(-z))
    gelu(z) = z Phi(z) = z (1 + erf(z / sqrt(2))) / 2
            ~ z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2

Source: Shazeer 2020; Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

from typing import Literal

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
    out = _check_halves(x, out)
    return get_provider(x.device).silu_and_mul(x, out)


def gelu_and_mul(x: Tensor, out: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Compute gelu(x[:, :n]) * x[:, n:], in float32 with one rounding at the end.

    Args:
        x: [tokens, 2 n], gate before up, contiguous last dim.
        out: [tokens, n], dtype of ``x``, contiguous last dim. None: a new tensor.
        approximate: "none" is the exact function, by erf; "tanh" the approximation, as Gemma has it.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or ``approximate`` is another word.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    out = _check_halves(x, out)
    return get_provider(x.device).gelu_and_mul(x, out, approximate=approximate)


def _check_halves(x: Tensor, out: Tensor | None) -> Tensor:
    """Check the arguments and answer where to write."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x must be [tokens, 2 n], got {list(x.shape)}")
    shape = (x.shape[0], x.shape[1] // 2)
    check_last_contiguous("x", x)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, shape, x.dtype, x.device)
    check_last_contiguous("out", out)
    return out
