"""Striped attention on CPUs: every sequence as at most a rectangle and a triangle of visible keys.

Torch's blocked kernel knows no diagonal but the one from the top left, hence the parts. Inputs below float32 are
widened first, for that kernel rounds its output to the input's dtype and partial outputs must not be rounded. Sequences
with a lower diagonal that hides keys, and positions that are no stripes, take the masked products instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loongserve.kernels.cpu_attention import attend, attend_masked
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
class _Band:
    """Packed rows of queries and keys of a sequence with a lower diagonal: a + lower <= b <= a + upper."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    upper: int
    lower: int

    def find_visible(self, begin: int, end: int) -> tuple[int, int, Tensor | None]:
        """Answer the keys that queries begin..end-1 see, for ``attend_masked``."""
        first = min(max(0, begin + self.lower), self.k_end - self.k_begin)
        last = max(first, min(self.k_end - self.k_begin, end + self.upper))
        ahead = torch.arange(first, last) - torch.arange(begin, end)[:, None]
        return first, last, (self.lower <= ahead) & (ahead <= self.upper)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Packed rows of queries and keys of a sequence, and their positions."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    query_positions: Tensor
    key_positions: Tensor
    window: int | None

    def find_visible(self, begin: int, end: int) -> tuple[int, int, Tensor | None]:
        """Answer the keys that queries begin..end-1 see, for ``attend_masked``."""
        distance = self.query_positions[begin:end, None] - self.key_positions
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        seen = visible.any(dim=0).nonzero().squeeze(1)
        if len(seen) == 0:
            return 0, 0, None
        first, last = int(seen[0]), int(seen[-1]) + 1
        return first, last, visible[:, first:last]


@dataclass(frozen=True, slots=True)
class _Payload:
    blocks: tuple[_Block, ...]
    # Blocks of one query and one key (decode), row by row, all together: slices where the rows are neighbours.
    num_pairs: int
    pair_queries: slice | Tensor
    pair_keys: slice | Tensor
    masked: tuple[_Band | _Scattered, ...] = ()


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
    """Take every sequence apart into blocks."""
    blocks: list[_Block] = []
    pairs: list[_Block] = []
    bands: list[_Band] = []
    lowers = lower_diagonals or (None,) * len(diagonals)
    spans = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), diagonals, lowers, strict=True)
    for (q_begin, q_end), (k_begin, k_end), diagonal, lower in spans:
        # A bound below the last query's first key hides nothing.
        if lower is not None and lower > q_begin - q_end + 1:
            bands.append(_Band(q_begin, q_end, k_begin, k_end, min(diagonal, k_end - k_begin), lower))
            continue
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
            masked=tuple(bands),
        ),
        lower_diagonals=lower_diagonals,
    )


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
    """Hold the positions of every sequence."""
    masked = tuple(
        _Scattered(q_begin, q_end, k_begin, k_end, query_positions[q_begin:q_end], key_positions[k_begin:k_end], window)
        for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    )
    return StripedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=_Payload((), 0, slice(0, 0), slice(0, 0), masked),
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
    soft_cap: float | None = None,
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
            soft_cap=soft_cap,
        )
        running = state.rows(block.q_begin, block.q_end)
        merge_states(running, part, running)
    for part_of in payload.masked:
        keys = slice(part_of.k_begin, part_of.k_end)
        queries = q[part_of.q_begin : part_of.q_end]
        part = attend_masked(queries, k[keys], v[keys], scale, soft_cap, part_of.find_visible)
        running = state.rows(part_of.q_begin, part_of.q_end)
        merge_states(running, part, running)
    if payload.num_pairs:
        _merge_pairs(payload, q, k, v, state, scale, soft_cap)


def _merge_pairs(
    payload: _Payload, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, scale: float, soft_cap: float | None
) -> None:
    """Attend where one query sees one key: the output is the value, the LSE is the score."""
    rows = payload.pair_queries
    # [pairs, kv_heads, group, head_dim] and [pairs, kv_heads, 1, head_dim]
    queries = q[rows].view(payload.num_pairs, k.shape[1], -1, k.shape[2])
    keys, values = k[payload.pair_keys].unsqueeze(2), v[payload.pair_keys].unsqueeze(2)
    lse = (queries * keys).sum(dim=-1).mul_(scale)
    if soft_cap is not None:
        lse.div_(soft_cap).tanh_().mul_(soft_cap)
    part = AttentionState(values.expand_as(queries).flatten(1, 2), lse.flatten(1))
    if isinstance(rows, slice):
        running = AttentionState(state.out[rows], state.lse[rows])
        merge_states(running, part, running)
    else:
        merge_rows(state, rows, part)
