"""Paged attention: queries over KV that lies anywhere in a pool, one token a slot.

The queries of request i, cu_seqlens_q[i]..cu_seqlens_q[i+1]-1, see all slots that the plan lists for it, and only
those: causal order is the caller's business (resident tokens come before new ones). With ``first_visible`` a query
sees only the end of its request's list: a sliding window, where slots are listed in order of position
(``first_visible_slots`` turns positions into it). Decode is the one-query case. The result is a state, to be merged
with the states of other shards; a query that sees no slot has the identity.

Source: PagedAttention (Kwon et al. 2023) at a page size of one token; LoongServe sections 4.2 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loongserve.kernels.checks import (
    check_cu_seqlens,
    check_heads,
    check_last_contiguous,
    check_plan_dtype,
    check_soft_cap,
    check_state,
    check_tensor,
    check_window,
)
from loongserve.kernels.plan_handle import register_plan
from loongserve.kernels.provider import load_provider, provider_name
from loongserve.kernels.state import AttentionState


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PagedPlan:
    """Metadata of ``paged_attention`` calls over the same slots: every layer of an iteration."""

    # The provider that made the plan and will run it.
    provider: str
    cu_seqlens_q: tuple[int, ...]
    # One [n] int64 tensor a request.
    slots: tuple[Tensor, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # The provider's own.
    payload: Any = None
    # [q_tokens] int64 on the host, each in 0..slots of the request; None: all slots are visible.
    first_visible: Tensor | None = None
    # Names the plan to a compiled graph, which takes tensors only.
    handle: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", register_plan(self))


def first_visible_slots(query_positions: Tensor, slot_positions: Tensor, window: int) -> Tensor:
    """Find, for each query of a request, the first slot that its sliding window reaches.

    Args:
        query_positions: [n] int64, in any order.
        slot_positions: [m] int64, ascending: the positions of the tokens in the request's slots, as they are listed.
        window: how many positions a query sees, its own included: the query at p sees p - window + 1 and later.

    Returns:
        [n] int64 on the same device, for ``plan_paged_attention(first_visible=)``: m where no slot is seen.

    Raises:
        ValueError: ``window`` is below 1 or a tensor is not [n] int64.
    """
    check_window(window)
    for name, positions in (("query_positions", query_positions), ("slot_positions", slot_positions)):
        check_tensor(name, positions, (positions.numel(),), torch.int64, query_positions.device)
    return torch.searchsorted(slot_positions, query_positions - (window - 1))


def plan_paged_attention(
    cu_seqlens_q: Sequence[int],
    slots: Sequence[Tensor],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    first_visible: Tensor | None = None,
) -> PagedPlan:
    """Prepare ``paged_attention`` for these queries and slots. May allocate on the device.

    Args:
        cu_seqlens_q: prefix sums of the query counts, [requests + 1] host ints, from 0; equal neighbours are legal.
        slots: one [n] int64 tensor a request, any n from 0, on any device, in any order; every one in
            0..num_slots-1 of the pool (not checked). The plan may keep or read the tensors: leave them unchanged.
        num_q_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        dtype: of q and the caches: float32, bfloat16 or float16 (reference: float64 too).
        device: of q and the caches.
        first_visible: [q_tokens] int64, on any device, but read on the host: query i does not see the slots before
            index ``first_visible[i]`` of its request's list, from 0 (all are seen) to the length of the list (none is).
            Slots that no query of a request sees are never read. None: all slots are seen.

    Raises:
        ValueError: inconsistent lengths, heads or dtype, or a ``first_visible`` out of range.
    """
    device = torch.device(device)
    check_heads(num_q_heads, num_kv_heads, head_dim)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    if len(slots) != len(cu_seqlens_q) - 1:
        raise ValueError(f"expected {len(cu_seqlens_q) - 1} slot tensors, one a request, got {len(slots)}")
    for request, request_slots in enumerate(slots):
        if request_slots.dtype != torch.int64 or request_slots.dim() != 1:
            raise ValueError(
                f"slots[{request}] must be [n] int64, got {list(request_slots.shape)} {request_slots.dtype}"
            )
    if first_visible is not None:
        first_visible = _check_first_visible(first_visible, cu_seqlens_q, slots)
    name = provider_name(device)
    check_plan_dtype(dtype, name)
    return load_provider(name).plan_paged_attention(
        tuple(cu_seqlens_q),
        tuple(slots),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        first_visible=first_visible,
    )


def _check_first_visible(first_visible: Tensor, cu_seqlens_q: Sequence[int], slots: Sequence[Tensor]) -> Tensor:
    check_tensor("first_visible", first_visible, (cu_seqlens_q[-1],), torch.int64, first_visible.device)
    first_visible = first_visible.cpu()
    counts = torch.tensor([end - begin for begin, end in pairwise(cu_seqlens_q)], dtype=torch.int64)
    lengths = torch.tensor([len(request_slots) for request_slots in slots], dtype=torch.int64)
    wrong = ((first_visible < 0) | (first_visible > lengths.repeat_interleave(counts))).nonzero()
    if len(wrong):
        query = int(wrong[0])
        raise ValueError(
            f"first_visible must be from 0 to the number of the request's slots, got {int(first_visible[query])} "
            f"for query {query}"
        )
    return first_visible


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
    """Overwrite ``out`` with the state of each query over the slots of its request that it sees.

    Identity (0, -inf) where a query sees no slot. On a GPU this neither allocates nor waits.

    Args:
        plan: of ``plan_paged_attention``.
        q: [q_tokens, num_q_heads, head_dim], contiguous last dim; query head h reads KV head h // (q_heads / kv_heads).
        k_cache: [num_slots, num_kv_heads, head_dim], contiguous last dim; foreign slots are never used.
        v_cache: as ``k_cache``.
        out: of the ``q_tokens`` queries, float32; its old contents do not matter.
        scale: factor of the scores, usually head_dim ** -0.5.
        soft_cap: bound of the scores: s becomes soft_cap * tanh(s / soft_cap), after ``scale``. None: none.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor does not have the plan's shape, dtype or device, or ``soft_cap`` is not positive.
    """
    check_tensor("q", q, (plan.cu_seqlens_q[-1], plan.num_q_heads, plan.head_dim), plan.dtype, plan.device)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        num_slots = cache.shape[0] if cache.dim() else 0
        check_tensor(name, cache, (num_slots, plan.num_kv_heads, plan.head_dim), plan.dtype, plan.device)
        check_last_contiguous(name, cache)
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"k_cache and v_cache must have one shape, got {list(k_cache.shape)}, {list(v_cache.shape)}")
    check_last_contiguous("q", q)
    check_soft_cap(soft_cap)
    check_state("out", out, (q.shape[0], plan.num_q_heads, plan.head_dim), plan.device, plan.provider)
    return load_provider(plan.provider).paged_attention(plan, q, k_cache, v_cache, out, scale=scale, soft_cap=soft_cap)
