"""Everything but attention on CPUs: as few passes over memory as torch's operators allow."""

from __future__ import annotations

from collections.abc import Sequence

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


def merge_many(states: Sequence[AttentionState], out: AttentionState) -> AttentionState:
    """Weigh each by its share of the sum of exponentials, in one pass over each."""
    lses = torch.stack([state.lse for state in states])
    lse = lses.logsumexp(dim=0)
    # Where all are empty every share is exp(-inf - 0) = 0.
    shares = lses.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_().unsqueeze(-1)
    torch.mul(states[0].out, shares[0], out=out.out)
    for state, share in zip(states[1:], shares[1:], strict=True):
        out.out.addcmul_(state.out, share)
    out.lse.copy_(lse)
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


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy the slots; where some are -1, slot 0 first and zeros over it."""
    missing = slots < 0
    some_missing = bool(missing.any())
    if some_missing and len(k_cache) == 0:
        k.zero_()
        v.zero_()
        return
    for cache, rows in ((k_cache, k), (v_cache, v)):
        torch.index_select(cache, 0, slots.clamp(min=0), out=rows)
        if some_missing:
            rows.masked_fill_(missing[:, None, None], 0.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
    """Normalise in float32, round, scale."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    # Writing to out rounds to x's dtype before the weight is applied, as transformers' Llama does.
    return torch.mul(wide, factor, out=out).mul_(weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the two halves, or even and odd elements, against each other."""
    x = x[..., : 2 * cos.shape[1]]
    cos = cos.index_select(0, positions).unsqueeze(1)
    sin = sin.index_select(0, positions).unsqueeze(1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
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


def gelu_and_mul(x: Tensor, out: Tensor, *, approximate: str) -> Tensor:
    """Multiply in float32, then round."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype in (torch.float32, torch.float64):
        return torch.mul(functional.gelu(gate, approximate=approximate), up, out=out)
    return out.copy_(functional.gelu(gate.float(), approximate=approximate).mul_(up))
