"""The functions of ``kernels/`` on CPUs: attention in C++ where it can be compiled, the rest with what torch has.

Without a compiler, with ``LOONG_CPU_NATIVE=0``, or for heads that the native kernels do not take, torch's attention
serves. A plan is run by what made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loongserve.kernels import cpu_native, cpu_paged, cpu_striped
from loongserve.kernels.cpu_elementwise import (
    apply_rope,
    finalize,
    gather_kv,
    gelu_and_mul,
    merge_many,
    merge_rows,
    merge_states,
    rms_norm,
    save_kv,
    silu_and_mul,
)
from loongserve.kernels.cpu_striped import plan_positional_attention
from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan

__all__ = [
    "apply_rope",
    "finalize",
    "gather_kv",
    "gelu_and_mul",
    "merge_many",
    "merge_rows",
    "merge_states",
    "paged_attention",
    "plan_paged_attention",
    "plan_positional_attention",
    "plan_striped_attention",
    "rms_norm",
    "save_kv",
    "silu_and_mul",
    "striped_attention",
]


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
    """Plan for the native kernel where it can run, else for torch's."""
    native = cpu_native.can_run(head_dim, dtype)
    plan: Callable[..., StripedPlan] = (cpu_native if native else cpu_striped).plan_striped_attention
    return plan(
        cu_seqlens_q,
        cu_seqlens_k,
        diagonals,
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
    """Run what the plan was made for."""
    native = isinstance(plan.payload, cpu_native.NativePayload)
    run: Callable[..., None] = (cpu_native if native else cpu_striped).striped_attention
    run(plan, q, k, v, state, scale=scale, save=save, soft_cap=soft_cap)


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
    """Plan for the native kernel where it can run, else for torch's."""
    native = cpu_native.can_run(head_dim, dtype)
    plan: Callable[..., PagedPlan] = (cpu_native if native else cpu_paged).plan_paged_attention
    return plan(
        cu_seqlens_q,
        slots,
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
    """Run what the plan was made for."""
    native = isinstance(plan.payload, cpu_native.NativePayload)
    run: Callable[..., AttentionState] = (cpu_native if native else cpu_paged).paged_attention
    return run(plan, q, k_cache, v_cache, out, scale=scale, soft_cap=soft_cap)
