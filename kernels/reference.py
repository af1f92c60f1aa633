"""The definition: every function in plain torch, as the formulas are written.

Slow, memory hungry, any device and head_dim. Attention is computed in the state's dtype, so a float64 state gives the
float64 result that the other providers are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    lower_diagonals: tuple[int | None, ...] | None = None,
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
        lower_diagonals=lower_diagonals,
    )


@dataclass(frozen=True, slots=True)
class _Positions:
    # [q_tokens] and [k_tokens] int64 on the device.
    queries: Tensor
    keys: Tensor
    window: int | None


def plan_positional_attention(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> StripedPlan:
    """Hold the positions."""
    return StripedPlan(
        provider="reference",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=_Positions(query_positions.to(device), key_positions.to(device), window),
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
    soft_cap: float | None = None,
) -> None:
    """Attend sequence by sequence and merge."""
    spans = zip(pairwise(plan.cu_seqlens_q), pairwise(plan.cu_seqlens_k), strict=True)
    for sequence, ((q_begin, q_end), (k_begin, k_end)) in enumerate(spans):
        visible = _visible(plan, sequence, slice(q_begin, q_end), slice(k_begin, k_end))
        running = state.rows(q_begin, q_end)
        part = attend(q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end], visible, scale, running.out.dtype, soft_cap)
        merge_states(running, part, running)
    if save is not None:
        save_kv(k, v, save.slots, save.k_cache, save.v_cache)


def _visible(plan: StripedPlan, sequence: int, queries: slice, keys: slice) -> Tensor:
    """Say which keys [n] of a sequence its queries [m] see: [m, n] bool."""
    if isinstance(plan.payload, _Positions):
        distance = plan.payload.queries[queries, None] - plan.payload.keys[None, keys]
        visible = distance >= 0
        return visible if plan.payload.window is None else visible & (distance < plan.payload.window)
    rows = torch.arange(queries.stop - queries.start, device=plan.device)[:, None]
    columns = torch.arange(keys.stop - keys.start, device=plan.device)[None, :]
    visible = columns <= rows + plan.diagonals[sequence]
    lower = None if plan.lower_diagonals is None else plan.lower_diagonals[sequence]
    return visible if lower is None else visible & (columns >= rows + lower)


def plan_paged_attention(
    cu_seqlens_q: Sequence[int],
    slots: Sequence[Tensor],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    first_visible: Tensor | None = None,
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
        first_visible=first_visible,
    )


def paged_attention(
    plan: PagedPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: AttentionState,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> AttentionState:
    """Gather each request's slots and attend to those that are seen."""
    for (begin, end), slots in zip(pairwise(plan.cu_seqlens_q), plan.slots, strict=True):
        first = torch.zeros(end - begin, dtype=torch.int64)
        if plan.first_visible is not None:
            first = plan.first_visible[begin:end]
        # What no query sees is not read: it may be another request's by now.
        skipped = int(first.min()) if len(first) else 0
        slots, first = slots[skipped:], (first - skipped).to(q.device)
        visible = torch.arange(len(slots), device=q.device)[None, :] >= first[:, None]
        part = attend(q[begin:end], k_cache[slots], v_cache[slots], visible, scale, out.out.dtype, soft_cap)
        out.out[begin:end] = part.out
        out.lse[begin:end] = part.lse
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    dtype: torch.dtype,
    soft_cap: float | None = None,
) -> AttentionState:
    """Compute the state of every query over its visible keys.

    Args:
        q: [q_tokens, q_heads, head_dim].
        k: [k_tokens, kv_heads, head_dim].
        v: as ``k``.
        visible: [q_tokens, k_tokens] bool.
        scale: factor of the scores.
        dtype: of the arithmetic and of the result: float32 or float64.
        soft_cap: bound of the scores; None: none.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, dim=1), v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
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


def merge_many(states: Sequence[AttentionState], out: AttentionState) -> AttentionState:
    """Weigh each by its share of the sum of exponentials."""
    lse = torch.logsumexp(torch.stack([state.lse for state in states]), dim=0)
    base = torch.where(lse == -math.inf, 0.0, lse)
    merged = sum(state.out * torch.exp(state.lse - base)[..., None] for state in states)
    out.out.copy_(torch.as_tensor(merged))
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


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy the slots, and zeros."""
    kept = slots >= 0
    for cache, rows in ((k_cache, k), (v_cache, v)):
        rows.zero_()
        rows[kept] = cache[slots[kept]]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
    """Normalise in float32 (float64 stays), round, scale."""
    if residual is not None:
        residual += x
        x = residual
    wide = _widen(x)
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return out.copy_(normalised.to(x.dtype) * weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the two halves, or even and odd elements, against each other."""
    half = cos.shape[1]
    x = x[..., : 2 * half]
    parts = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first, second = (_widen(part).clone() for part in parts)
    cos, sin = cos[positions][:, None, :], sin[positions][:, None, :]
    parts[0].copy_(first * cos - second * sin)
    parts[1].copy_(second * cos + first * sin)


def silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    """Multiply, then round."""
    gate, up = _widen(x).chunk(2, dim=-1)
    return out.copy_(gate / (1 + torch.exp(-gate)) * up)


def gelu_and_mul(x: Tensor, out: Tensor, *, approximate: str) -> Tensor:
    """Multiply, then round."""
    gate, up = _widen(x).chunk(2, dim=-1)
    if approximate == "tanh":
        share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        share = 0.5 * torch.erfc(-gate / math.sqrt(2))
    return out.copy_(gate * share * up)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
