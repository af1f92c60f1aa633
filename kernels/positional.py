"""Attention by arbitrary positions: queries and keys in any order, as after dropping, reordering or cutting tokens.

Packed sequences as in ``loongserve.kernels.striped``. A query at position p sees the keys of its sequence at positions
up to p and, with a window w, after p - w. The plan is run by ``striped_attention``. Positions that form stripes, as
those of a ring do, are planned as such; others cost a mask in each tile, and a tile of queries visits all keys from the
first to the last that one of its queries sees: cheap where positions ascend, all keys where they are in random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from loongserve.kernels.checks import check_cu_seqlens_pair, check_heads, check_plan_dtype, check_tensor, check_window
from loongserve.kernels.provider import load_provider, provider_name
from loongserve.kernels.striped import StripedPlan, plan_striped_attention, stripe_bounds


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
    device: torch.device | str,
    window: int | None = None,
) -> StripedPlan:
    """Prepare ``striped_attention`` for tokens at these positions. May allocate on the device.

    Args:
        cu_seqlens_q: prefix sums of the query counts, [sequences + 1] host ints, from 0; equal neighbours are legal.
        cu_seqlens_k: prefix sums of the key counts, likewise.
        query_positions: [q_tokens] int64, packed, on any device but read on the host; any order, duplicates are legal.
        key_positions: [k_tokens] int64, likewise.
        num_q_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        dtype: of q, k and v: float32, bfloat16 or float16 (reference: float64 too).
        device: of q, k and v.
        window: how many positions a query sees, its own included. None: all up to its own.

    Raises:
        ValueError: inconsistent lengths, heads, dtype or positions, or a window below 1.
    """
    device = torch.device(device)
    check_heads(num_q_heads, num_kv_heads, head_dim)
    check_cu_seqlens_pair(cu_seqlens_q, cu_seqlens_k)
    check_window(window)
    check_tensor("query_positions", query_positions, (cu_seqlens_q[-1],), torch.int64, query_positions.device)
    check_tensor("key_positions", key_positions, (cu_seqlens_k[-1],), torch.int64, key_positions.device)
    query_positions, key_positions = query_positions.cpu(), key_positions.cpu()
    bounds = _find_stripes(cu_seqlens_q, cu_seqlens_k, query_positions, key_positions, window)
    if bounds is not None:
        return plan_striped_attention(
            cu_seqlens_q,
            cu_seqlens_k,
            [upper for upper, _ in bounds],
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            lower_diagonals=[lower for _, lower in bounds],
        )
    name = provider_name(device)
    check_plan_dtype(dtype, name)
    return load_provider(name).plan_positional_attention(
        tuple(cu_seqlens_q),
        tuple(cu_seqlens_k),
        query_positions,
        key_positions,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        window=window,
    )


def _find_stripes(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None,
) -> list[tuple[int, int | None]] | None:
    """Answer the bounds of every sequence if queries and keys of each are stripes of one stride, else None."""
    bounds: list[tuple[int, int | None]] = []
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        queries, keys = query_positions[q_begin:q_end], key_positions[k_begin:k_end]
        if len(queries) == 0 or len(keys) == 0:
            bounds.append((0, None))
            continue
        steps = list(set(queries.diff().tolist() + keys.diff().tolist()))
        # A lone query and a lone key are stripes of any stride.
        stride = steps[0] if steps else 1
        if len(steps) > 1 or stride < 1:
            return None
        bounds.append(stripe_bounds(int(queries[0]), int(keys[0]), stride, window))
    return bounds
