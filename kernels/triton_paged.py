"""Paged attention on GPUs: work items of (queries, a part of a request's slots), then a merge of the parts.

The plan cuts each request's own slots into parts, so that all items together fill the GPU; the length of one request
changes neither the grid nor the buffers of another. A request with one part writes its state at once, the others
write partial states to the plan's workspace, which a second kernel merges. The order of sums is fixed by the plan:
the same plan gives the same bits. With a window, slots that no query of a tile sees are left out of its parts.

Requests with few query rows (decode: one token, the heads of a group packed into rows) take a tile of 16 rows, the
others the tile of a prefill, each in its own launch. No causal mask: a query sees the
slots of its request from its first visible one on.

Source: Flash-Decoding (Dao et al. 2023); the cut of work by a host plan as in FlashInfer (Ye et al. 2025).
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import LN_2, LOG2_E, attend_keys, store_state
from loongserve.kernels.triton_tuning import (
    Tile,
    device_arch,
    device_guard,
    dot_precision,
    num_processors,
    score_scales,
    split_head_dim,
    table_row,
)

if TYPE_CHECKING:
    from loongserve.kernels.paged import PagedPlan
    from loongserve.kernels.state import AttentionState

# (arch, largest head_dim, bytes an element) -> tile of requests with at most 16 query rows: bound by memory, so a deep
# pipeline of loads matters, not the matrix units.
DECODE_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 96, 2): Tile(16, 32, 4, 4),
    ("sm_80", 128, 2): Tile(16, 64, 4, 3),
    ("sm_80", 256, 2): Tile(16, 32, 4, 3),
    ("sm_80", 64, 4): Tile(16, 32, 4, 3),
    ("sm_80", 128, 4): Tile(16, 16, 4, 3),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    ("sm_86", 128, 2): Tile(16, 64, 4, 2),
    ("sm_86", 256, 2): Tile(16, 32, 4, 2),
    ("sm_86", 64, 4): Tile(16, 32, 4, 3),
    ("sm_86", 128, 4): Tile(16, 16, 4, 3),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    ("sm_90", 128, 2): Tile(16, 64, 4, 4),
    ("sm_90", 256, 2): Tile(16, 64, 4, 3),
    ("sm_90", 64, 4): Tile(16, 32, 4, 3),
    ("sm_90", 128, 4): Tile(16, 16, 4, 3),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 128, 2): Tile(16, 64, 4, 4),
    ("sm_100", 256, 2): Tile(16, 64, 4, 3),
    ("sm_100", 64, 4): Tile(16, 32, 4, 3),
    ("sm_100", 128, 4): Tile(16, 16, 4, 3),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    ("gfx942", 128, 2): Tile(16, 64, 4, 1),
    ("gfx942", 256, 2): Tile(16, 32, 4, 1),
    ("gfx942", 128, 4): Tile(16, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 16, 4, 1),
}

# The same for requests with more query rows: chunks that attend to resident KV, and prefixes.
PREFILL_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 128, 2): Tile(64, 64, 4, 2),
    ("sm_80", 192, 2): Tile(64, 16, 8, 2),
    ("sm_80", 256, 2): Tile(64, 32, 8, 2),
    ("sm_80", 64, 4): Tile(64, 16, 4, 2),
    ("sm_80", 96, 4): Tile(16, 16, 4, 2),
    ("sm_80", 128, 4): Tile(16, 32, 4, 1),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    ("sm_86", 128, 2): Tile(64, 32, 4, 2),
    ("sm_86", 192, 2): Tile(64, 16, 8, 2),
    ("sm_86", 256, 2): Tile(64, 32, 8, 1),
    ("sm_86", 64, 4): Tile(64, 16, 4, 2),
    ("sm_86", 96, 4): Tile(16, 16, 4, 2),
    ("sm_86", 128, 4): Tile(16, 32, 4, 1),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    ("sm_90", 128, 2): Tile(128, 64, 8, 2),
    ("sm_90", 256, 2): Tile(64, 64, 8, 2),
    ("sm_90", 64, 4): Tile(64, 16, 4, 2),
    ("sm_90", 96, 4): Tile(16, 16, 4, 2),
    ("sm_90", 128, 4): Tile(16, 32, 4, 1),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 128, 2): Tile(128, 64, 8, 2),
    ("sm_100", 256, 2): Tile(64, 64, 8, 2),
    ("sm_100", 96, 4): Tile(16, 16, 4, 2),
    ("sm_100", 128, 4): Tile(16, 32, 4, 1),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    ("gfx942", 128, 2): Tile(64, 64, 4, 1),
    ("gfx942", 256, 2): Tile(64, 32, 4, 1),
    ("gfx942", 128, 4): Tile(32, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 32, 4, 1),
}

MAX_DECODE_ROWS = 16
# A part shorter than this costs more in its partial state than it wins in balance.
MIN_PART_TOKENS = 256
# Items a multiprocessor, over all launches of a plan: enough to hide a tail of unequal parts.
ITEMS_PER_PROCESSOR = 4

# Columns of the plan's list of items, and of its list of merges.
ITEM_SIZE = tl.constexpr(6)
MERGE_SIZE = tl.constexpr(4)


@triton.jit
def _paged_attention_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    q,
    k_cache,
    v_cache,
    items,
    slots,
    first_visible,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_q_token,
    stride_q_head,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_slot,
    stride_v_cache_head,
    scale_log2,
    cap_factor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = (program % NUM_KV_HEADS).to(tl.int64)
    item = items + (program // NUM_KV_HEADS).to(tl.int64) * ITEM_SIZE
    q_begin = tl.load(item)
    num_queries = tl.load(item + 1).to(tl.int32)
    row_begin = tl.load(item + 2).to(tl.int32)
    slot_begin = tl.load(item + 3)
    slots += slot_begin
    num_keys = tl.load(item + 4).to(tl.int32)
    partial_begin = tl.load(item + 5)

    # [BLOCK_M]: a row is a token and one of the KV head's query heads.
    rows = row_begin + tl.arange(0, BLOCK_M)
    row_mask = rows < num_queries * GROUP
    local = (rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    main = tl.arange(0, D_MAIN)
    # [BLOCK_M, D_MAIN]
    q_offsets = (q_begin + local) * stride_q_token + head * stride_q_head
    q_tile = tl.load(q + q_offsets[:, None] + main[None, :], mask=row_mask[:, None], other=0.0)
    q_tail = q_tile
    acc = tl.zeros([BLOCK_M, D_MAIN], dtype=tl.float32)
    acc_tail = acc
    if D_TAIL > 0:
        tail = D_MAIN + tl.arange(0, D_TAIL)
        q_tail = tl.load(
            q + q_offsets[:, None] + tail[None, :],
            mask=row_mask[:, None] & (tail < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc_tail = tl.zeros([BLOCK_M, D_TAIL], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    if WINDOW:
        # [BLOCK_M]: as an index of this part.
        first_seen = tl.load(first_visible + q_begin + local, mask=row_mask, other=0) - slot_begin
    block = tl.arange(0, BLOCK_N)
    k_cache += kv_head * stride_k_cache_head
    v_cache += kv_head * stride_v_cache_head
    for start in range(0, num_keys, BLOCK_N):
        # [BLOCK_N]
        key_mask = start + block < num_keys
        slot = tl.load(slots + start + block, mask=key_mask, other=0)
        visible = key_mask[None, :]
        if WINDOW:
            visible = visible & (start + block[None, :] >= first_seen[:, None])
        acc, acc_tail, row_max, row_sum = attend_keys(
            acc,
            acc_tail,
            row_max,
            row_sum,
            q_tile,
            q_tail,
            k_cache,
            v_cache,
            slot * stride_k_cache_slot,
            slot * stride_v_cache_slot,
            key_mask,
            visible,
            scale_log2,
            cap_factor,
            True,
            True,
            HEAD_DIM,
            D_MAIN,
            D_TAIL,
            PRECISION,
            SOFT_CAP,
        )
    if partial_begin < 0:
        token = q_begin + local
        store_state(
            out,
            lse,
            token * stride_out_token + head * stride_out_head,
            token * stride_lse_token + head * stride_lse_head,
            row_mask,
            acc,
            acc_tail,
            row_max,
            row_sum,
            False,
            HEAD_DIM,
            D_MAIN,
            D_TAIL,
        )
    else:
        # The workspace is [partial tokens, heads, head_dim], contiguous.
        state_row = (partial_begin + local) * (GROUP * NUM_KV_HEADS) + head
        store_state(
            partial_out,
            partial_lse,
            state_row * HEAD_DIM,
            state_row,
            row_mask,
            acc,
            acc_tail,
            row_max,
            row_sum,
            False,
            HEAD_DIM,
            D_MAIN,
            D_TAIL,
        )


@triton.jit
def _merge_partials_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    merges,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    program = tl.program_id(0)
    head = (program % NUM_HEADS).to(tl.int64)
    merge = merges + (program // NUM_HEADS).to(tl.int64) * MERGE_SIZE
    token = tl.load(merge)
    partial_begin = tl.load(merge + 1)
    partial_stride = tl.load(merge + 2)
    num_parts = tl.load(merge + 3).to(tl.int32)

    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total_max = float("-inf")
    total_sum = 0.0
    for start in range(0, num_parts, BLOCK_P):
        # [BLOCK_P]
        parts = start + tl.arange(0, BLOCK_P)
        part_mask = parts < num_parts
        state_row = (partial_begin + parts.to(tl.int64) * partial_stride) * NUM_HEADS + head
        part_max = tl.load(partial_lse + state_row, mask=part_mask, other=float("-inf")) * LOG2_E
        new_max = tl.maximum(total_max, tl.max(part_max, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(part_max - shift)
        alpha = tl.exp2(total_max - shift)
        # [BLOCK_P, BLOCK_D]
        part_out = tl.load(
            partial_out + state_row[:, None] * HEAD_DIM + columns[None, :],
            mask=part_mask[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc = acc * alpha + tl.sum(part_out * weights[:, None], axis=0)
        total_sum = total_sum * alpha + tl.sum(weights, axis=0)
        total_max = new_max
    seen = total_sum != 0.0
    divisor = tl.where(seen, total_sum, 1.0)
    tl.store(
        lse + token * stride_lse_token + head * stride_lse_head,
        tl.where(seen, (total_max + tl.log2(divisor)) * LN_2, float("-inf")),
    )
    tl.store(out + token * stride_out_token + head * stride_out_head + columns, acc / divisor, mask=columns < HEAD_DIM)


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
    table: dict[tuple[str, int, int], Tile],
    arch: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[Tile, dict[str, Any]]:
    """Choose the tile and the compile-time constants of ``_paged_attention_kernel``, all but WINDOW and SOFT_CAP."""
    tile = table_row(table, arch, head_dim, dtype)
    main, tail = split_head_dim(head_dim)
    return tile, {
        "GROUP": num_q_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "D_MAIN": main,
        "D_TAIL": tail,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": dot_precision(arch, dtype),
    }


def merge_constants(num_q_heads: int, head_dim: int) -> dict[str, Any]:
    """Choose the compile-time constants of ``_merge_partials_kernel``."""
    return {
        "NUM_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_P": 8,
    }


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
    from loongserve.kernels.paged import PagedPlan

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
    counts = [end - begin for begin, end in pairwise(cu_seqlens_q)]
    if first_visible is not None:
        # What no query of a request sees is not even listed.
        firsts = [first_visible[begin:end] for begin, end in pairwise(cu_seqlens_q)]
        skipped = [int(first.min()) if len(first) else 0 for first in firsts]
        slots = [request_slots[skip:] for request_slots, skip in zip(slots, skipped, strict=True)]
        begins = [0, *accumulate(len(request_slots) for request_slots in slots)][:-1]
        first_visible = torch.cat(
            [first_visible[:0], *(f - s + b for f, s, b in zip(firsts, skipped, begins, strict=True))]
        )
    num_q_heads, num_kv_heads = heads
    arch = device_arch(device)
    group = num_q_heads // num_kv_heads
    num_queries = counts
    lengths = [request_slots.numel() for request_slots in slots]
    tiles = {}
    for name, table in (("decode", DECODE_TILES), ("prefill", PREFILL_TILES)):
        tiles[name] = paged_constants(table, arch, num_q_heads, num_kv_heads, head_dim, dtype)
    kinds = ["decode" if queries * group <= MAX_DECODE_ROWS else "prefill" for queries in num_queries]
    num_tiles = [
        triton.cdiv(queries * group, tiles[kind][0].block_m) for queries, kind in zip(num_queries, kinds, strict=True)
    ]
    if part_tokens is None:
        max_items = max(1, num_processors(device) * ITEMS_PER_PROCESSOR // num_kv_heads)
        part_tokens = choose_part_tokens(lengths, num_tiles, max_items)
    items: dict[str, list[list[int]]] = {"decode": [], "prefill": []}
    merges: list[list[int]] = []
    num_partial = 0
    slot_begin = 0
    for request, queries in enumerate(num_queries):
        q_begin, length, kind = cu_seqlens_q[request], lengths[request], kinds[request]
        parts = max(1, triton.cdiv(length, part_tokens)) if queries else 0
        for part in range(parts):
            begin = part * part_tokens
            partial = num_partial + part * queries if parts > 1 else -1
            block_m = tiles[kind][0].block_m
            for row in range(0, queries * group, block_m):
                first, last = slot_begin + begin, slot_begin + min(begin + part_tokens, length)
                if first_visible is not None:
                    tile_queries = slice(q_begin + row // group, q_begin + min(queries, -(-(row + block_m) // group)))
                    first = min(max(first, int(first_visible[tile_queries].min())), last)
                items[kind].append([q_begin, queries, row, first, last - first, partial])
        if parts > 1:
            merges.extend([q_begin + query, num_partial + query, queries, parts] for query in range(queries))
            num_partial += parts * queries
        slot_begin += length
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


def choose_part_tokens(lengths: Sequence[int], num_tiles: Sequence[int], max_items: int) -> int:
    """Share all (tile, slot) pairs of a plan out to ``max_items`` parts of equal length, in whole MIN_PART_TOKENS.

    A request shorter than that is not cut, and a long one is, however many short ones there are beside it.
    """
    total = sum(length * tiles for length, tiles in zip(lengths, num_tiles, strict=True))
    return MIN_PART_TOKENS * max(1, math.ceil(total / max_items / MIN_PART_TOKENS))


def _to_device(rows: list[list[int]], columns: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns).to(device)


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
    """Overwrite ``out``: a launch for each tile shape, and one for the merge where a request was cut."""
    scales = score_scales(scale, soft_cap)
    work: PagedWork = plan.payload
    state_strides = (*out.out.stride()[:2], *out.lse.stride())
    for launch in work.launches:
        with device_guard(q.device):
            _paged_attention_kernel[(len(launch.items) * plan.num_kv_heads,)](
                out.out,
                out.lse,
                work.partial_out,
                work.partial_lse,
                q,
                k_cache,
                v_cache,
                launch.items,
                work.slots,
                work.slots if work.first_visible is None else work.first_visible,
                *state_strides,
                *q.stride()[:2],
                *k_cache.stride()[:2],
                *v_cache.stride()[:2],
                *scales,
                WINDOW=work.first_visible is not None,
                SOFT_CAP=soft_cap is not None,
                **launch.constants,
                **launch.tile.launch_options(),
            )
    if len(work.merges):
        with device_guard(q.device):
            _merge_partials_kernel[(len(work.merges) * plan.num_q_heads,)](
                out.out,
                out.lse,
                work.partial_out,
                work.partial_lse,
                work.merges,
                *state_strides,
                **merge_constants(plan.num_q_heads, plan.head_dim),
                num_warps=1,
                enable_fp_fusion=True,
            )
    return out
