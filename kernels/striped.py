"""Striped attention: local queries against one block of keys that passes by in the ring.

Packed sequences; sequence i has queries cu_seqlens_q[i]..cu_seqlens_q[i+1]-1 and keys likewise. Query a of a sequence
sees its key b (both counted from 0 within the sequence) iff

    a + lower diagonal <= b <= a + diagonal         of the sequence; without a lower diagonal: b <= a + diagonal

With tokens dealt out in turn, (t + rotation) mod d, local index times d plus a member's first token is the position, so
causal order by position is exactly this with diagonal 0 (the key member's first token is not after the query member's)
or -1, and a sliding window by position is a lower diagonal: ``stripe_bounds`` computes both. A large diagonal shows
every key; a very negative one shows none. For positions that are no stripes see ``loongserve.kernels.positional``.

Source: striped attention (Brandon et al. 2023); LoongServe section 4.1 for saving K and V as they pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loongserve.kernels.checks import (
    check_cache,
    check_cu_seqlens_pair,
    check_heads,
    check_last_contiguous,
    check_plan_dtype,
    check_slots,
    check_soft_cap,
    check_state,
    check_tensor,
    check_window,
)
from loongserve.kernels.plan_handle import register_plan
from loongserve.kernels.provider import load_provider, provider_name
from loongserve.kernels.state import AttentionState


@dataclass(frozen=True, slots=True)
class KVSave:
    """Where the rows of a passing block are stored: row i in slot ``slots[i]``; -1 stores nothing."""

    # [k_tokens] int64; no slot twice, but for -1.
    slots: Tensor
    # [num_slots, kv_heads, head_dim], same dtype as the block's K and V.
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StripedPlan:
    """Metadata of ``striped_attention`` calls over blocks of the same lengths: every layer of a ring step."""

    # The provider that made the plan and will run it.
    provider: str
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    # Empty in a plan of ``plan_positional_attention``.
    diagonals: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # The provider's own.
    payload: Any = None
    # One a sequence, None where it has none; None: no sequence has one.
    lower_diagonals: tuple[int | None, ...] | None = None
    # Names the plan to a compiled graph, which takes tensors only.
    handle: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", register_plan(self))


def stripe_bounds(query_first: int, key_first: int, stride: int, window: int | None = None) -> tuple[int, int | None]:
    """Turn the positions of two stripes into the diagonals that ``plan_striped_attention`` takes.

    Local query a has position ``query_first + a * stride`` and local key b ``key_first + b * stride``. A query sees the
    keys whose position is not after its own and, with ``window``, less than ``window`` before it.

    Args:
        query_first: position of the first query, of any sign.
        key_first: position of the first key.
        stride: distance of neighbours, the DoP: at least 1.
        window: how many positions a query sees, its own included: at least 1. None: all before it.

    Returns:
        (upper, lower): key b is visible to query a iff a + lower <= b <= a + upper; lower is None without a window.

    Raises:
        ValueError: ``stride`` or ``window`` is below 1.
    """
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    check_window(window)
    ahead = query_first - key_first
    return ahead // stride, None if window is None else -((window - 1 - ahead) // stride)


def plan_striped_attention(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    diagonals: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    lower_diagonals: Sequence[int | None] | None = None,
) -> StripedPlan:
    """Prepare ``striped_attention`` for blocks of these lengths. May allocate on the device.

    Args:
        cu_seqlens_q: prefix sums of the query counts, [sequences + 1] host ints, from 0; equal neighbours are legal.
        cu_seqlens_k: prefix sums of the key counts, likewise.
        diagonals: [sequences] host ints: local key index b is visible to local query index a iff b <= a + diagonal.
        num_q_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        dtype: of q, k and v: float32, bfloat16 or float16 (reference: float64 too).
        device: of q, k and v.
        lower_diagonals: [sequences] host ints, or None in a place without a bound: local key index b is visible to
            local query index a only if b >= a + lower diagonal. Tiles outside the bounds are never visited.

    Raises:
        ValueError: inconsistent lengths, heads or dtype.
    """
    device = torch.device(device)
    check_heads(num_q_heads, num_kv_heads, head_dim)
    check_cu_seqlens_pair(cu_seqlens_q, cu_seqlens_k)
    if len(diagonals) != len(cu_seqlens_q) - 1:
        raise ValueError(f"expected {len(cu_seqlens_q) - 1} diagonals, one a sequence, got {len(diagonals)}")
    if lower_diagonals is not None:
        if len(lower_diagonals) != len(diagonals):
            raise ValueError(f"expected {len(diagonals)} lower_diagonals, one a sequence, got {len(lower_diagonals)}")
        lower_diagonals = tuple(lower_diagonals) if any(lower is not None for lower in lower_diagonals) else None
    name = provider_name(device)
    check_plan_dtype(dtype, name)
    return load_provider(name).plan_striped_attention(
        tuple(cu_seqlens_q),
        tuple(cu_seqlens_k),
        tuple(diagonals),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        lower_diagonals=lower_diagonals,
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
    """Merge attention of ``q`` over one block into ``state``, in place, and save rows of the block.

    Queries that see no key of the block leave their state as it was. On a GPU this neither allocates nor waits.

    Args:
        plan: of ``plan_striped_attention`` or ``plan_positional_attention``.
        q: [q_tokens, num_q_heads, head_dim], contiguous last dim; query head h reads KV head h // (q_heads / kv_heads).
        k: [k_tokens, num_kv_heads, head_dim], contiguous last dim.
        v: as ``k``.
        state: of the ``q_tokens`` queries, float32; starts as ``AttentionState.empty``.
        scale: factor of the scores, usually head_dim ** -0.5.
        save: where to store rows of ``k`` and ``v``.
        soft_cap: bound of the scores: s becomes soft_cap * tanh(s / soft_cap), after ``scale`` (Gemma 2). None: none.

    Raises:
        ValueError: a tensor does not have the plan's shape, dtype or device, or ``soft_cap`` is not positive.
    """
    check_tensor("q", q, (plan.cu_seqlens_q[-1], plan.num_q_heads, plan.head_dim), plan.dtype, plan.device)
    check_tensor("k", k, (plan.cu_seqlens_k[-1], plan.num_kv_heads, plan.head_dim), plan.dtype, plan.device)
    check_tensor("v", v, (plan.cu_seqlens_k[-1], plan.num_kv_heads, plan.head_dim), plan.dtype, plan.device)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_contiguous(name, tensor)
    check_soft_cap(soft_cap)
    check_state("state", state, (q.shape[0], plan.num_q_heads, plan.head_dim), plan.device, plan.provider)
    if save is not None:
        check_slots("save.slots", save.slots, k.shape[0], plan.device)
        check_cache("save.k_cache", save.k_cache, k)
        check_cache("save.v_cache", save.v_cache, v)
    load_provider(plan.provider).striped_attention(plan, q, k, v, state, scale=scale, save=save, soft_cap=soft_cap)
