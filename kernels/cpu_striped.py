"""Striped attention on CPUs: every sequence as at most a rectangle and a triangle of visible keys.

Torch's blocked kernel knows no diagonal but the one from the top left, hence the parts. Inputs below float32 are
widened first, for that kernel rounds its output to the input's dtype and partial outputs must not be rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loongserve.kernels.cpu_attention import attend
from loongserve.kernels.cpu_elementwise import merge_rows, merge_states, save_kv
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan


@dataclass(frozen=True, slots=True)
class _Block:
    """Packed rows of queries and keys; ``causal``: query a of them sees keys up to a, else all."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _Payload:
    blocks: tuple[_Block, ...]
    # Blocks of one query and one key (decode), row by row, all together: slices where the rows are neighbours.
    num_pairs: int
    pair_queries: slice | Tensor
    pair_keys: slice | Tensor


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
    """Take every sequence apart into blocks."""
    blocks: list[_Block] = []
    pairs: list[_Block] = []
    spans = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), diagonals, strict=True)
    for (q_begin, q_end), (k_begin, k_end), diagonal in spans:
        for a, b, c, d, causal in split_diagonal(q_end - q_begin, k_end - k_begin, diagonal):
            block = _Block(q_begin + a, q_begin + b, k_begin + c, k_begin + d, causal)
            # A lone query has all its keys in one block, so no query is in two pairs.
            is_pair = b - a == 1 and d - c == 1
            (pairs if is_pair else blocks).append(block)
    return StripedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=tuple(diagonals),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=_Payload(
            blocks=tuple(blocks),
            num_pairs=len(pairs),
            pair_queries=_as_rows([pair.q_begin for pair in pairs]),
            pair_keys=_as_rows([pair.k_begin for pair in pairs]),
        ),
    )


def split_diagonal(num_q: int, num_k: int, diagonal: int) -> list[tuple[int, int, int, int, bool]]:
    """Cover what is visible, key b to query a iff b <= a + diagonal.

    Returns:
        Blocks (q_begin, q_end, k_begin, k_end, causal).
    """
    # With a negative diagonal the first queries see nothing; those after them have the diagonal 0.
    q_begin = max(0, -diagonal)
    diagonal = max(0, diagonal)
    num_k = min(num_k, num_q - q_begin + diagonal)
    if q_begin >= num_q or num_k <= 0:
        return []
    if num_k <= diagonal + 1:
        return [(q_begin, num_q, 0, num_k, False)]
    if diagonal == 0:
        return [(q_begin, num_q, 0, num_k, True)]
    return [(q_begin, num_q, 0, diagonal, False), (q_begin, num_q, diagonal, num_k, True)]


def _as_rows(indices: list[int]) -> slice | Tensor:
    if indices and indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, dtype=torch.int64)


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
    """Save, then attend block by block and merge."""
    if save is not None:
        save_kv(k, v, save.slots, save.k_cache, save.v_cache)
    payload = cast(_Payload, plan.payload)
    q, k, v = q.float(), k.float(), v.float()
    for block in payload.blocks:
        part = attend(
            q[block.q_begin : block.q_end],
            k[block.k_begin : block.k_end],
            v[block.k_begin : block.k_end],
            scale,
            causal=block.causal,
        )
        running = state.rows(block.q_begin, block.q_end)
        merge_states(running, part, running)
    if payload.num_pairs:
        _merge_pairs(payload, q, k, v, state, scale)


def _merge_pairs(payload: _Payload, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, scale: float) -> None:
    """Attend where one query sees one key: the output is the value, the LSE is the score."""
    rows = payload.pair_queries
    # [pairs, kv_heads, group, head_dim] and [pairs, kv_heads, 1, head_dim]
    queries = q[rows].view(payload.num_pairs, k.shape[1], -1, k.shape[2])
    keys, values = k[payload.pair_keys].unsqueeze(2), v[payload.pair_keys].unsqueeze(2)
    lse = (queries * keys).sum(dim=-1).mul_(scale)
    part = AttentionState(values.expand_as(queries).flatten(1, 2), lse.flatten(1))
    if isinstance(rows, slice):
        running = AttentionState(state.out[rows], state.lse[rows])
        merge_states(running, part, running)
    else:
        merge_rows(state, rows, part)
