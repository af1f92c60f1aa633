"""Rotary position embedding in the half-split layout: element i is rotated with element i + head_dim / 2.

    (x_i, x_j) -> (x_i cos - x_j sin, x_j cos + x_i sin),   j = i + head_dim / 2

The tables are indexed by global position, so any member of a group can rotate any token.

Source: Su et al. 2021; layout of GPT-NeoX and transformers' Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.checks import check_last_contiguous, check_slots, check_tensor
from loongserve.kernels.provider import get_provider


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate ``x`` in place, in float32 with one rounding at the end.

    Args:
        x: [tokens, heads, head_dim], even head_dim, contiguous last dim; changed in place.
        cos: [max_positions, head_dim // 2] float32 (reference: or float64), contiguous.
        sin: as ``cos``.
        positions: [tokens] int64 on the same device, in 0..max_positions-1 (not checked).

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"x must be [tokens, heads, even head_dim], got {list(x.shape)}")
    if cos.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cos must be float32, got {cos.dtype}")
    max_positions = cos.shape[0] if cos.dim() else 0
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (max_positions, x.shape[-1] // 2), cos.dtype, x.device)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(table.stride())}")
    check_slots("positions", positions, x.shape[0], x.device)
    check_last_contiguous("x", x)
    get_provider(x.device).apply_rope(x, cos, sin, positions)
