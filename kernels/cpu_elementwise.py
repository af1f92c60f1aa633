"""Everything but attention on CPUs: as few passes over memory as torch's operators allow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from loongserve.kernels.state import AttentionState


def merge_states(a: AttentionState, b: AttentionState, out: AttentionState) -> AttentionState:
    """Interpolate from ``a`` to ``b`` by b's share of the sum of exponentials, sigmoid(b.lse - a.lse)."""
    # Two empty rows give NaN, for -inf minus -inf; either of their zeros will do.
    share = torch.sigmoid(b.lse - a.lse).nan_to_num_(nan=0.0)
    torch.lerp(a.out, b.out, share.unsqueeze(-1), out=out.out)
    torch.logaddexp(a.lse, b.lse, out=out.lse)
    return out


def merge_rows(state: AttentionState, rows: Tensor, part: AttentionState) -> None:
    """Gather, merge, scatter."""
    merged = AttentionState(state.out.index_select(0, rows), state.lse.index_select(0, rows))
    merge_states(merged, part, merged)
    state.out.index_copy_(0, rows, merged.out)
    state.lse.index_copy_(0, rows, merged.lse)


def finalize(state: AttentionState, out: Tensor) -> Tensor:
    """Round."""
    return out.copy_(state.out)


def save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Copy the rows with a slot; all of them at once where none is -1."""
    rows = (slots >= 0).nonzero().squeeze(1)
    if len(rows) < len(slots):
        slots, k, v = slots[rows], k[rows], v[rows]
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
    """Normalise in float32, round, scale."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    # Writing to out rounds to x's dtype before the weight is applied, as transformers' Llama does.
    return torch.mul(wide, factor, out=out).mul_(weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the two halves against each other."""
    cos = cos.index_select(0, positions).unsqueeze(1)
    sin = sin.index_select(0, positions).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    # Type promotion to the tables' float32; x is rounded to once, on writing.
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)


def silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    """Multiply in float32, then round."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype in (torch.float32, torch.float64):
        return torch.mul(functional.silu(gate), up, out=out)
    return out.copy_(functional.silu(gate.float()).mul_(up))
