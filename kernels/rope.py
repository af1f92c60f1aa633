"""Rotary position embedding of the first ``rotary_dim`` elements of each head; the rest stays as it is.

    (x_i, x_j) -> (x_i cos_m - x_j sin_m, x_j cos_m + x_i sin_m)

Pair m is i = m, j = m + rotary_dim / 2 in the half-split layout, and i = 2 m, j = 2 m + 1 in the interleaved one. The
tables are indexed by global position, so any member of a group can rotate any token.

Source: Su et al. 2021; half-split as in GPT-NeoX and transformers' Llama, interleaved as in GPT-J.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.checks import check_last_contiguous, check_slots, check_tensor
from loongserve.kernels.provider import get_provider


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate ``x`` in place, in float32 with one rounding at the end.

    Args:
        x: [tokens, heads, head_dim], even head_dim, contiguous last dim; changed in place.
        cos: [max_positions, rotary_dim // 2] float32 (reference: or float64), contiguous.
        sin: as ``cos``.
        positions: [tokens] int64 on the same device, in 0..max_positions-1 (not checked).
        rotary_dim: even number of elements that are rotated, the first of each head. None: head_dim.
        interleaved: neighbours are pairs, as in GPT-J; else the two halves of the rotary_dim elements are.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"x must be [tokens, heads, even head_dim], got {list(x.shape)}")
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= x.shape[-1]:
        raise ValueError(f"rotary_dim must be even and in 2..{x.shape[-1]}, the head_dim, got {rotary_dim}")
    if cos.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cos must be float32, got {cos.dtype}")
    max_positions = cos.shape[0] if cos.dim() else 0
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (max_positions, rotary_dim // 2), cos.dtype, x.device)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(table.stride())}")
    check_slots("positions", positions, x.shape[0], x.device)
    check_last_contiguous("x", x)
    get_provider(x.device).apply_rope(x, cos, sin, positions, interleaved=interleaved)
