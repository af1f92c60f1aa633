"""Attention on CPUs over torch's blocked kernel, which returns the log-sum-exp with the output.

That kernel has no grouped heads, no diagonal but the top-left one and rounds its output to the input's dtype. So: KV
heads go where it has the batch and the heads of a group are broadcast; a diagonal is taken apart into a rectangle that
is wholly visible and a triangle; inputs below float32 are widened first. A few queries (decode) are two matrix
products instead, with the heads of a group as rows, so that K and V are read once for the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loongserve.kernels.cpu_elementwise import merge_states, save_kv
from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan

# Up to this many rows (queries times heads of a group), matrix products beat the blocked kernel.
_MAX_PRODUCT_ROWS = 64
# Slots whose runs are at least this long on average are read in place, run by run.
_MIN_RUN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries and keys of one kernel call; ``causal``: query a sees keys up to a, else all."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _StripedPayload:
    blocks: tuple[_Block, ...]
    # Blocks of one query and one key, all together: [pairs] int64 each.
    pair_queries: Tensor
    pair_keys: Tensor


@dataclass(frozen=True, slots=True)
class _Reading:
    """One request's queries and where its keys are: contiguous runs of slots, or else slots to gather."""

    q_begin: int
    q_end: int
    runs: tuple[tuple[int, int], ...]
    slots: Tensor | None


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
    """Take every sequence apart into blocks that the kernel knows."""
    blocks: list[_Block] = []
    pairs: list[_Block] = []
    for (q_begin, q_end), (k_begin, k_end), diagonal in zip(
        pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), diagonals, strict=True
    ):
        for block in _split_diagonal(q_begin, q_end, k_begin, k_end, diagonal):
            is_pair = block.q_end - block.q_begin == 1 and block.k_end - block.k_begin == 1
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
        payload=_StripedPayload(
            blocks=tuple(blocks),
            pair_queries=torch.tensor([pair.q_begin for pair in pairs], dtype=torch.int64),
            pair_keys=torch.tensor([pair.k_begin for pair in pairs], dtype=torch.int64),
        ),
    )


def _split_diagonal(q_begin: int, q_end: int, k_begin: int, k_end: int, diagonal: int) -> list[_Block]:
    """Cover what is visible, key b to query a iff b <= a + diagonal, with a rectangle and a triangle."""
    if diagonal < 0:
        # The first queries see nothing; those after them have the diagonal 0.
        q_begin -= diagonal
        diagonal = 0
    k_end = min(k_end, k_begin + (q_end - q_begin) + diagonal)
    if q_begin >= q_end or k_begin >= k_end:
        return []
    if q_end - q_begin == 1 or k_end - k_begin <= diagonal + 1:
        return [_Block(q_begin, q_end, k_begin, k_end, causal=False)]
    if diagonal == 0:
        return [_Block(q_begin, q_end, k_begin, k_end, causal=True)]
    return [
        _Block(q_begin, q_end, k_begin, k_begin + diagonal, causal=False),
        _Block(q_begin, q_end, k_begin + diagonal, k_end, causal=True),
    ]


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
    payload = cast(_StripedPayload, plan.payload)
    q, k, v = q.float(), k.float(), v.float()
    for block in payload.blocks:
        part = _attend(
            q[block.q_begin : block.q_end],
            k[block.k_begin : block.k_end],
            v[block.k_begin : block.k_end],
            scale,
            block.causal,
        )
        running = state.rows(block.q_begin, block.q_end)
        merge_states(running, part, running)
    if len(payload.pair_queries):
        _merge_pairs(q, k, v, payload.pair_queries, payload.pair_keys, state, scale)


def _merge_pairs(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, state: AttentionState, scale: float
) -> None:
    """Merge sequences in which one query sees one key: its output is the value, its LSE the score."""
    grouped = q.index_select(0, queries).view(len(queries), k.shape[1], -1, k.shape[2])
    keys_k, keys_v = k.index_select(0, keys).unsqueeze(2), v.index_select(0, keys).unsqueeze(2)
    lse = (grouped * keys_k).sum(dim=-1).mul_(scale).flatten(1)
    part = AttentionState(keys_v.expand_as(grouped).flatten(1, 2), lse)
    # A query may be in a pair twice only with two keys, which are a block, so the rows are distinct.
    old = AttentionState(state.out.index_select(0, queries), state.lse.index_select(0, queries))
    merge_states(old, part, old)
    state.out.index_copy_(0, queries, old.out)
    state.lse.index_copy_(0, queries, old.lse)


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
    """Find the contiguous runs in the slots."""
    slots = tuple(request_slots.to(device) for request_slots in slots)
    readings = []
    for (begin, end), request_slots in zip(pairwise(cu_seqlens_q), slots, strict=True):
        if begin == end or len(request_slots) == 0:
            readings.append(_Reading(begin, end, (), None))
            continue
        starts = (request_slots.diff() != 1).nonzero().squeeze(1).add_(1)
        if (len(starts) + 1) * _MIN_RUN_TOKENS > len(request_slots) and len(starts):
            readings.append(_Reading(begin, end, (), request_slots))
            continue
        edges = [0, *starts.tolist(), len(request_slots)]
        first = request_slots[edges[:-1]].tolist()
        runs = tuple((slot, slot + b - a) for slot, (a, b) in zip(first, pairwise(edges), strict=True))
        readings.append(_Reading(begin, end, runs, None))
    return PagedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        slots=slots,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=tuple(readings),
    )


def paged_attention(
    plan: PagedPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: AttentionState, *, scale: float
) -> AttentionState:
    """Attend request by request; several runs are merged."""
    q = q.float()
    for reading in cast(tuple[_Reading, ...], plan.payload):
        queries = q[reading.q_begin : reading.q_end]
        target = out.rows(reading.q_begin, reading.q_end)
        if reading.slots is not None:
            k, v = k_cache.index_select(0, reading.slots), v_cache.index_select(0, reading.slots)
            parts = [(k, v)]
        else:
            parts = [(k_cache[begin:end], v_cache[begin:end]) for begin, end in reading.runs]
        if not parts:
            target.out.zero_()
            target.lse.fill_(-torch.inf)
        for index, (k, v) in enumerate(parts):
            part = _attend(queries, k.float(), v.float(), scale, causal=False)
            if index:
                merge_states(target, part, target)
            else:
                target.out.copy_(part.out)
                target.lse.copy_(part.lse)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionState:
    """Attend float32 queries [m, q_heads, d] to keys [n, kv_heads, d], m and n at least 1."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    # [kv_heads, group, m, d] and [kv_heads, n, d]
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if not causal and tokens * group <= _MAX_PRODUCT_ROWS:
        # [kv_heads, group * m, n]
        scores = torch.bmm(grouped.flatten(1, 2) * scale, k.transpose(1, 2))
        top = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        out = torch.bmm(weights, v).div_(total).view(kv_heads, group, tokens, head_dim)
        lse = top.add_(total.log_()).view(kv_heads, group, tokens)
    else:
        shape = (kv_heads, group, k.shape[1], k.shape[2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, k.unsqueeze(1).expand(shape), v.unsqueeze(1).expand(shape), 0.0, causal, scale=scale
        )
    # Back to tokens first: [m, q_heads, d] and [m, q_heads].
    return AttentionState(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))
