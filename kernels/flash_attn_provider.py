"""The dense local step of striped attention by the flash-attn library (2.1 and newer), everything else by Triton.

Chosen by ``LOONG_KERNELS=flash-attn``, and only looked for when a plan is made. The library has the case of causal
order aligned at the ends of each sequence: diagonal = keys - queries for all of them, which is 0 for a member's own
block. A window is taken if it is the same for all. Other plans, float32, and soft caps that an old library lacks go to
the Triton provider without a word; K and V are saved by a launch of their own.

The library rounds its output to the inputs' dtype, once, before it is merged: a ring of these alone is a little less
exact than Triton's. Its LSE is natural, [heads, tokens] (before 2.6: [sequences, heads, longest sequence]), +inf in
empty rows, and converted by ``state_from_flash_lse``.

Tested with a stand-in that has the library's signature and these conventions, not with the library itself.

Source: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loongserve.kernels import triton_provider
from loongserve.kernels.merge import state_from_flash_lse
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan
from loongserve.kernels.triton_provider import (
    apply_rope,
    finalize,
    gather_kv,
    gelu_and_mul,
    merge_many,
    merge_rows,
    merge_states,
    paged_attention,
    plan_paged_attention,
    plan_positional_attention,
    rms_norm,
    save_kv,
    silu_and_mul,
)

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

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class _Dense:
    """Arguments of the library, and Triton's plan for the calls that it lacks."""

    # [sequences + 1] int32 on the device.
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    # Keys seen before the query's own; -1: all.
    window_left: int
    fallback: StripedPlan


def find_library() -> Callable[..., Any]:
    """Answer the library's ``flash_attn_varlen_func``.

    Raises:
        ValueError: the library is not installed, or is older than 2.1, where causal order is aligned at the beginning.
    """
    if find_spec("flash_attn") is None:
        raise ValueError(
            "LOONG_KERNELS=flash-attn needs the library: pip install 'loongserve[flash-attn]', or unset it"
        )
    library = import_module("flash_attn")
    version = str(getattr(library, "__version__", "unknown"))
    function: Callable[..., Any] | None = getattr(library, "flash_attn_varlen_func", None)
    if function is None or version.startswith(("0.", "1.", "2.0")):
        raise ValueError(f"LOONG_KERNELS=flash-attn needs flash-attn 2.1 or newer, got {version}")
    return function


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
    """Plan for the library where it has the case, else for Triton."""
    parameters = inspect.signature(find_library()).parameters
    fallback = triton_provider.plan_striped_attention(
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
    num_q = [end - begin for begin, end in pairwise(cu_seqlens_q)]
    num_k = [end - begin for begin, end in pairwise(cu_seqlens_k)]
    left = find_window(num_q, num_k, diagonals, lower_diagonals)
    fits = dtype in (torch.float16, torch.bfloat16) and head_dim <= MAX_HEAD_DIM and cu_seqlens_q[-1] > 0
    if left is None or not fits or cu_seqlens_k[-1] == 0 or (left >= 0 and "window_size" not in parameters):
        return fallback
    return StripedPlan(
        provider="flash-attn",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=tuple(diagonals),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=_Dense(
            torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device),
            torch.tensor(cu_seqlens_k, dtype=torch.int32, device=device),
            max(num_q),
            max(num_k),
            left,
            fallback,
        ),
        lower_diagonals=lower_diagonals,
    )


def find_window(
    num_q: Sequence[int],
    num_k: Sequence[int],
    diagonals: Sequence[int],
    lower_diagonals: Sequence[int | None] | None = None,
) -> int | None:
    """Answer the library's left window, -1 for none, or None where it lacks the case."""
    lefts = set()
    lowers = lower_diagonals or (None,) * len(diagonals)
    for queries, keys, diagonal, lower in zip(num_q, num_k, diagonals, lowers, strict=True):
        if queries == 0 or keys == 0:
            continue
        if diagonal != keys - queries or (lower is not None and lower > diagonal):
            return None
        lefts.add(-1 if lower is None else diagonal - lower)
    if len(lefts) > 1:
        return None
    return lefts.pop() if lefts else None


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
    """Save, attend by the library, and merge."""
    dense: _Dense = plan.payload
    function = find_library()
    if soft_cap is not None and "softcap" not in inspect.signature(function).parameters:
        fallback = dense.fallback
        triton_provider.striped_attention(fallback, q, k, v, state, scale=scale, save=save, soft_cap=soft_cap)
        return
    if save is not None:
        save_kv(k, v, save.slots, save.k_cache, save.v_cache)
    options: dict[str, Any] = {} if soft_cap is None else {"softcap": soft_cap}
    if dense.window_left >= 0:
        options["window_size"] = (dense.window_left, 0)
    out, lse, _ = function(
        q,
        k,
        v,
        dense.cu_seqlens_q,
        dense.cu_seqlens_k,
        dense.max_seqlen_q,
        dense.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        # Despite its name, what brings the LSE.
        return_attn_probs=True,
        **options,
    )
    if lse.dim() == 3:
        lengths = [end - begin for begin, end in pairwise(plan.cu_seqlens_q)]
        lse = torch.cat([each[:, :length] for each, length in zip(lse, lengths, strict=True)], dim=1)
    merge_states(state, state_from_flash_lse(out, lse.transpose(0, 1)), state)
