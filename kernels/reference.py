"""The definition: every function in plain torch, as the formulas are written.

Slow, memory hungry, any device and head_dim. Attention is computed in the state's dtype, so a float64 state gives the
float64 result that the other providers are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan


def plan_striped_attention(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    diagonals: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> StripedPlan:
    """Hold the lengths; nothing is prepared."""
    return StripedPlan(
        provider="reference",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=tuple(diagonals),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )


def striped_attention(
    plan: StripedPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    *,
    scale: float,
    save: KVSave | None = None,
) -> None:
    """Attend sequence by sequence and merge."""
    spans = zip(pairwise(plan.cu_seqlens_q), pairwise(plan.cu_seqlens_k), plan.diagonals, strict=True)
    for (q_begin, q_end), (k_begin, k_end), diagonal in spans:
        rows = torch.arange(q_end - q_begin, device=q.device)
        columns = torch.arange(k_end - k_begin, device=q.device)
        visible = columns[None, :] <= rows[:, None] + diagonal
        running = state.rows(q_begin, q_end)
        part = attend(q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end], visible, scale, running.out.dtype)
        merge_states(running, part, running)
    if save is not None:
        save_kv(k, v, save.slots, save.k_cache, save.v_cache)


def plan_paged_attention(
    cu_seqlens_q: Sequence[int],
    slots: Sequence[Tensor],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedPlan:
    """Hold the slots, moved to the device."""
    return PagedPlan(
        provider="reference",
        cu_seqlens_q=tuple(cu_seqlens_q),
        slots=tuple(request_slots.to(device) for request_slots in slots),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )


def paged_attention(
    plan: PagedPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: AttentionState, *, scale: float
) -> AttentionState:
    """Gather each request's slots and attend to all of them."""
    for (begin, end), slots in zip(pairwise(plan.cu_seqlens_q), plan.slots, strict=True):
        visible = torch.ones(end - begin, len(slots), dtype=torch.bool, device=q.device)
        part = attend(q[begin:end], k_cache[slots], v_cache[slots], visible, scale, out.out.dtype)
        out.out[begin:end] = part.out
        out.lse[begin:end] = part.lse
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dtype: torch.dtype) -> AttentionState:
    """Compute the state of every query over its visible keys.

    Args:
        q: [q_tokens, q_heads, head_dim].
        k: [k_tokens, kv_heads, head_dim].
        v: as ``k``.
        visible: [q_tokens, k_tokens] bool.
        scale: factor of the scores.
        dtype: of the arithmetic and of the result: float32 or float64.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, dim=1), v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # An empty row has only scores of -inf: subtract 0 there, for -inf minus -inf is NaN.
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return AttentionState(torch.einsum("qhk,khd->qhd", weights, v), lse)


def merge_states(a: AttentionState, b: AttentionState, out: AttentionState) -> AttentionState:
    """Weigh both by their share of the sum of exponentials."""
    lse = torch.logaddexp(a.lse, b.lse)
    # Where both are empty every weight is exp(-inf - 0) = 0.
    base = torch.where(lse == -math.inf, 0.0, lse)
    merged = a.out * torch.exp(a.lse - base)[..., None] + b.out * torch.exp(b.lse - base)[..., None]
    out.out.copy_(merged)
    out.lse.copy_(lse)
    return out


def merge_rows(state: AttentionState, rows: Tensor, part: AttentionState) -> None:
    """Gather, merge, scatter."""
    merged = AttentionState(state.out[rows], state.lse[rows])
    merge_states(merged, part, merged)
    state.out[rows] = merged.out
    state.lse[rows] = merged.lse


def finalize(state: AttentionState, out: Tensor) -> Tensor:
    """Round."""
    return out.copy_(state.out)


def save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Copy the rows with a slot."""
    kept = slots >= 0
    k_cache[slots[kept]] = k[kept]
    v_cache[slots[kept]] = v[kept]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
    """Normalise in float32 (float64 stays), round, scale."""
    if residual is not None:
        residual += x
        x = residual
    wide = _widen(x)
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return out.copy_(normalised.to(x.dtype) * weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the two halves against each other."""
    first, second = _widen(x).chunk(2, dim=-1)
    cos, sin = cos[positions][:, None, :], sin[positions][:, None, :]
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    """Multiply, then round."""
    gate, up = _widen(x).chunk(2, dim=-1)
    return out.copy_(gate / (1 + torch.exp(-gate)) * up)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
