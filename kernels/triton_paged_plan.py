"""Plans of ``triton_paged``: requests cut into parts that fill the GPU, and the order in which they are merged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.triton_paged import ITEM_SIZE, MERGE_SIZE
from loongserve.kernels.triton_tuning import (
    DECODE_TILES,
    PREFILL_TILES,
    Tile,
    attention_constants,
    device_arch,
    num_processors,
    table_row,
)

# Requests with at most this many query rows take the tile of a decode.
MAX_DECODE_ROWS = 16
# A part shorter than this costs more in its partial state than it wins in balance.
MIN_PART_TOKENS = 256
# Items a multiprocessor, over all launches of a plan: enough to hide a tail of unequal parts.
ITEMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class PagedLaunch:
    """The items that share a tile."""

    # [num_items, ITEM_SIZE] int64: first query, queries, first row of the tile, first slot in the plan's list, slots of
    # the part, first token in the workspace (-1: the state goes to its place at once).
    items: Tensor
    tile: Tile
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PagedWork:
    """What the plan holds for the launches."""

    launches: tuple[PagedLaunch, ...]
    # [total slots] int64, request by request.
    slots: Tensor
    # [num_merges, MERGE_SIZE] int64: query, its first part in the workspace, distance to the next part, parts.
    merges: Tensor
    # [partial tokens, heads, head_dim] and [partial tokens, heads] float32.
    partial_out: Tensor
    partial_lse: Tensor
    # [q_tokens] int64: index in ``slots`` of the first that a query sees; None: all of its request.
    first_visible: Tensor | None = None


def paged_constants(
    table: Mapping[tuple[str, int, int], Tile],
    arch: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[Tile, dict[str, Any]]:
    """Choose the tile and the compile-time constants of ``_paged_attention_kernel``, all but WINDOW and SOFT_CAP."""
    tile = table_row(table, arch, head_dim, dtype)
    return tile, attention_constants(tile, arch, num_q_heads, num_kv_heads, head_dim, dtype)


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
    """Cut the work into items that fill the GPU."""
    return PagedPlan(
        provider="triton",
        cu_seqlens_q=tuple(cu_seqlens_q),
        slots=tuple(slots),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=make_work(
            cu_seqlens_q, slots, (num_q_heads, num_kv_heads), head_dim, dtype, device, first_visible=first_visible
        ),
        first_visible=first_visible,
    )


def make_work(
    cu_seqlens_q: Sequence[int],
    slots: Sequence[Tensor],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    part_tokens: int | None = None,
    first_visible: Tensor | None = None,
) -> PagedWork:
    """Cut requests into parts of ``part_tokens`` slots (None: as many as fill the GPU) and allocate the workspace."""
    if first_visible is not None:
        slots, first_visible = drop_unseen(cu_seqlens_q, slots, first_visible)
    num_q_heads, num_kv_heads = heads
    arch = device_arch(device)
    group = num_q_heads // num_kv_heads
    counts = [end - begin for begin, end in pairwise(cu_seqlens_q)]
    lengths = [request_slots.numel() for request_slots in slots]
    kinds = ["decode" if queries * group <= MAX_DECODE_ROWS else "prefill" for queries in counts]
    tiles = {
        name: paged_constants(table, arch, num_q_heads, num_kv_heads, head_dim, dtype)
        for name, table in (("decode", DECODE_TILES), ("prefill", PREFILL_TILES))
    }
    if part_tokens is None:
        num_tiles = [
            triton.cdiv(queries * group, tiles[kind][0].block_m) for queries, kind in zip(counts, kinds, strict=True)
        ]
        max_items = max(1, num_processors(device) * ITEMS_PER_PROCESSOR // num_kv_heads)
        part_tokens = choose_part_tokens(lengths, num_tiles, max_items)
    items: dict[str, list[list[int]]] = {"decode": [], "prefill": []}
    merges: list[list[int]] = []
    num_partial = 0
    slot_begins = [0, *accumulate(lengths)]
    for request, (queries, kind) in enumerate(zip(counts, kinds, strict=True)):
        q_begin, slot_begin, slot_end = cu_seqlens_q[request], *slot_begins[request : request + 2]
        parts = max(1, triton.cdiv(slot_end - slot_begin, part_tokens)) if queries else 0
        block_m = tiles[kind][0].block_m
        for part in range(parts):
            part_begin = slot_begin + part * part_tokens
            part_end = min(part_begin + part_tokens, slot_end)
            partial = num_partial + part * queries if parts > 1 else -1
            for row in range(0, queries * group, block_m):
                first = part_begin
                if first_visible is not None:
                    seeing = slice(q_begin + row // group, q_begin + min(queries, triton.cdiv(row + block_m, group)))
                    first = min(max(first, int(first_visible[seeing].min())), part_end)
                items[kind].append([q_begin, queries, row, first, part_end - first, partial])
        if parts > 1:
            merges.extend([q_begin + query, num_partial + query, queries, parts] for query in range(queries))
            num_partial += parts * queries
    launches = tuple(
        # Longest parts first: short ones fill the gaps at the end.
        PagedLaunch(_to_device(sorted(rows, key=lambda row: -row[4]), ITEM_SIZE.value, device), *tiles[kind])
        for kind, rows in items.items()
        if rows
    )
    no_slots = torch.empty(0, dtype=torch.int64, device=device)
    return PagedWork(
        launches=launches,
        slots=torch.cat([no_slots, *(request_slots.to(device) for request_slots in slots)]),
        merges=_to_device(merges, MERGE_SIZE.value, device),
        partial_out=torch.empty(num_partial, num_q_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_partial, num_q_heads, dtype=torch.float32, device=device),
        first_visible=None if first_visible is None else first_visible.to(device),
    )


def drop_unseen(
    cu_seqlens_q: Sequence[int], slots: Sequence[Tensor], first_visible: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Drop the slots that no query of their request sees; ``first_visible`` comes back as indices of all slots left."""
    firsts = [first_visible[begin:end] for begin, end in pairwise(cu_seqlens_q)]
    skipped = [int(first.min()) if len(first) else 0 for first in firsts]
    left = [request_slots[skip:] for request_slots, skip in zip(slots, skipped, strict=True)]
    begins = [0, *accumulate(len(request_slots) for request_slots in left)][:-1]
    shifted = (first - skip + begin for first, skip, begin in zip(firsts, skipped, begins, strict=True))
    return left, torch.cat([first_visible[:0], *shifted])


def choose_part_tokens(lengths: Sequence[int], num_tiles: Sequence[int], max_items: int) -> int:
    """Share all (tile, slot) pairs of a plan out to ``max_items`` parts of equal length, in whole MIN_PART_TOKENS.

    A request shorter than that is not cut, and a long one is, however many short ones there are beside it.
    """
    total = sum(length * tiles for length, tiles in zip(lengths, num_tiles, strict=True))
    return MIN_PART_TOKENS * max(1, math.ceil(total / max_items / MIN_PART_TOKENS))


def _to_device(rows: list[list[int]], columns: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns).to(device)
