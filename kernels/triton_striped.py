"""Striped attention on GPUs: one program takes a tile of queries past the keys of a block that it may see.

A query sees local keys a + lower <= b <= a + upper (``loongserve.kernels.striped``), or those that its position allows
(``loongserve.kernels.positional``). The tile's result is merged with the running
float32 state as it is stored, so a ring step needs no separate merge and rounds nothing.

The plan lists the tiles of queries that see any key, those with most keys first; programs past the list copy K and V
rows to their slots, so that the memory-bound copy runs beside the compute-bound tiles in the same launch. Tiles of keys
outside the diagonals are never visited, and only those on one are masked. Base 2 inside, natural logarithm outside;
products in the input's type (float32: tf32x3 or ieee), sums in float32.

Source: FlashAttention-2 (Dao 2023); striped attention (Brandon et al. 2023); LoongServe section 4.1 for the save.
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import attend_keys, save_rows, store_state
from loongserve.kernels.triton_tuning import (
    Tile,
    device_arch,
    device_guard,
    dot_precision,
    score_scales,
    split_head_dim,
    table_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.striped import KVSave, StripedPlan

# (arch, largest head_dim, bytes an element) -> tile: the largest that neither spills nor exceeds the shared memory, as
# ``triton_resources`` finds. float32 tiles are small, for tf32x3 keeps two halves of each operand in registers.
STRIPED_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 64, 2): Tile(128, 64, 8, 3),
    ("sm_80", 128, 2): Tile(128, 64, 8, 3),
    ("sm_80", 192, 2): Tile(64, 16, 8, 2),
    ("sm_80", 256, 2): Tile(64, 32, 8, 2),
    ("sm_80", 64, 4): Tile(64, 16, 4, 2),
    ("sm_80", 96, 4): Tile(16, 16, 4, 2),
    ("sm_80", 128, 4): Tile(16, 32, 4, 1),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    ("sm_86", 64, 2): Tile(128, 64, 8, 2),
    ("sm_86", 128, 2): Tile(128, 32, 8, 2),
    ("sm_86", 192, 2): Tile(64, 16, 8, 2),
    ("sm_86", 256, 2): Tile(64, 32, 8, 2),
    ("sm_86", 64, 4): Tile(64, 16, 4, 2),
    ("sm_86", 96, 4): Tile(16, 16, 4, 2),
    ("sm_86", 128, 4): Tile(16, 32, 4, 1),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    ("sm_90", 64, 2): Tile(128, 128, 8, 3),
    ("sm_90", 128, 2): Tile(128, 64, 8, 3),
    ("sm_90", 256, 2): Tile(64, 64, 8, 2),
    ("sm_90", 64, 4): Tile(64, 16, 4, 2),
    ("sm_90", 96, 4): Tile(16, 16, 4, 2),
    ("sm_90", 128, 4): Tile(16, 32, 4, 1),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 64, 2): Tile(128, 64, 8, 3),
    ("sm_100", 128, 2): Tile(128, 64, 8, 3),
    ("sm_100", 256, 2): Tile(64, 64, 8, 2),
    ("sm_100", 96, 4): Tile(16, 16, 4, 2),
    ("sm_100", 128, 4): Tile(16, 32, 4, 1),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    ("gfx942", 128, 2): Tile(128, 64, 4, 1),
    ("gfx942", 256, 2): Tile(64, 32, 4, 1),
    ("gfx942", 128, 4): Tile(32, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 32, 4, 1),
}

# Columns of the plan's list of tiles.
ITEM_SIZE = tl.constexpr(7)

# Which keys a query sees: up to its diagonal; between two diagonals; by position, of keys between two bounds.
DIAGONAL = tl.constexpr(0)
BAND = tl.constexpr(1)
POSITIONS = tl.constexpr(2)


# Lengths change from step to step: a value of 1 or a multiple of 16 must not mean another compilation.
@triton.jit(do_not_specialize=["num_items", "total_keys"])
def _striped_attention_kernel(
    out,
    lse,
    k_cache,
    v_cache,
    q,
    k,
    v,
    items,
    slots,
    query_positions,
    key_positions,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_slot,
    stride_v_cache_head,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    num_items,
    total_keys,
    scale_log2,
    cap_factor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SAVE: tl.constexpr,
):
    program = tl.program_id(0)
    # Heads vary fastest, so that the longest tiles of all heads start first.
    kv_head = (program % NUM_KV_HEADS).to(tl.int64)
    index = program // NUM_KV_HEADS
    if index < num_items:
        item = items + index.to(tl.int64) * ITEM_SIZE
        q_begin = tl.load(item)
        num_queries = tl.load(item + 1).to(tl.int32)
        row_begin = tl.load(item + 2).to(tl.int32)
        k_begin = tl.load(item + 3)
        num_keys = tl.load(item + 4).to(tl.int32)
        upper = tl.load(item + 5)
        lower = tl.load(item + 6)

        # [BLOCK_M]: a row is a token and one of the KV head's query heads.
        rows = row_begin + tl.arange(0, BLOCK_M)
        row_mask = rows < num_queries * GROUP
        local = rows // GROUP
        token = q_begin + local
        head = kv_head * GROUP + rows % GROUP
        main = tl.arange(0, D_MAIN)
        # [BLOCK_M, D_MAIN]
        q_offsets = token * stride_q_token + head * stride_q_head
        q_tile = tl.load(q + q_offsets[:, None] + main[None, :], mask=row_mask[:, None], other=0.0)
        q_tail = q_tile
        if D_TAIL > 0:
            tail = D_MAIN + tl.arange(0, D_TAIL)
            q_tail = tl.load(
                q + q_offsets[:, None] + tail[None, :],
                mask=row_mask[:, None] & (tail < HEAD_DIM)[None, :],
                other=0.0,
            )
        acc = tl.zeros([BLOCK_M, D_MAIN], dtype=tl.float32)
        acc_tail = acc
        if D_TAIL > 0:
            acc_tail = tl.zeros([BLOCK_M, D_TAIL], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

        # Some row of the tile sees keys from begin to end, every row those from full_begin to full_end: whole tiles.
        begin = 0
        full_begin = 0
        full_end = 0
        end = num_keys
        row_places = local
        if MASK == POSITIONS:
            row_places = tl.load(query_positions + token, mask=row_mask, other=0)
        else:
            # The plan keeps them in 32 bits.
            upper = upper.to(tl.int32)
            lower = lower.to(tl.int32)
            first_local = row_begin // GROUP
            last_local = (tl.minimum(row_begin + BLOCK_M, num_queries * GROUP) - 1) // GROUP
            end = tl.minimum(last_local + upper + 1, num_keys)
            full_end = tl.maximum(tl.minimum(first_local + upper + 1, num_keys), 0) // BLOCK_N * BLOCK_N
            if MASK == BAND:
                begin = tl.maximum(first_local + lower, 0) // BLOCK_N * BLOCK_N
                full_begin = tl.maximum((last_local + lower + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin)
                full_end = tl.maximum(full_end, full_begin)
        block = tl.arange(0, BLOCK_N)
        k += k_begin * stride_k_token + kv_head * stride_k_head
        v += k_begin * stride_v_token + kv_head * stride_v_head
        for start in range(full_begin, full_end, BLOCK_N):
            keys = (start + block).to(tl.int64)
            acc, acc_tail, row_max, row_sum = attend_keys(
                acc,
                acc_tail,
                row_max,
                row_sum,
                q_tile,
                q_tail,
                k,
                v,
                keys * stride_k_token,
                keys * stride_v_token,
                block,
                block,
                scale_log2,
                cap_factor,
                False,
                False,
                HEAD_DIM,
                D_MAIN,
                D_TAIL,
                PRECISION,
                SOFT_CAP,
            )
        # The masked tiles before the whole ones and those after them, in one loop: registers for one body, not two.
        for step in range(begin, end - (full_end - full_begin), BLOCK_N):
            start = step
            if MASK != POSITIONS:
                start = tl.where(step < full_begin, step, step + (full_end - full_begin))
            local_key = start + block
            keys = local_key.to(tl.int64)
            key_mask = local_key < num_keys
            place = local_key
            if MASK == POSITIONS:
                place = tl.load(key_positions + k_begin + local_key, mask=key_mask, other=0)
            visible = (place[None, :] <= row_places[:, None] + upper) & key_mask[None, :]
            if MASK != DIAGONAL:
                visible = visible & (place[None, :] >= row_places[:, None] + lower)
            acc, acc_tail, row_max, row_sum = attend_keys(
                acc,
                acc_tail,
                row_max,
                row_sum,
                q_tile,
                q_tail,
                k,
                v,
                keys * stride_k_token,
                keys * stride_v_token,
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
            True,
            HEAD_DIM,
            D_MAIN,
            D_TAIL,
        )
    elif SAVE:
        save_rows(
            k_cache,
            v_cache,
            k,
            v,
            slots,
            stride_k_cache_slot,
            stride_k_cache_head,
            stride_v_cache_slot,
            stride_v_cache_head,
            stride_k_token,
            stride_k_head,
            stride_v_token,
            stride_v_head,
            (index - num_items) * BLOCK_N,
            total_keys,
            kv_head,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
        )


@dataclass(frozen=True, slots=True)
class StripedWork:
    """What the plan holds for the launch."""

    # [num_items, ITEM_SIZE] int64: first query, queries, first row of the tile, first key, keys, and bounds of the
    # difference of key and query, of their local indices or their positions: the largest, the smallest.
    items: Tensor
    tile: Tile
    constants: dict[str, Any]
    # [q_tokens] and [k_tokens] int64, with MASK POSITIONS.
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None


def striped_constants(
    arch: str, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, mask: tl.constexpr
) -> tuple[Tile, dict[str, Any]]:
    """Choose the tile and the kernel's compile-time constants, all but SOFT_CAP and SAVE."""
    tile = table_row(STRIPED_TILES, arch, head_dim, dtype)
    if mask == POSITIONS and tile.block_n > 16:
        # Positions take 64 bits and so twice the registers of a mask by diagonals.
        tile = replace(tile, block_n=tile.block_n // 2)
    main, tail = split_head_dim(head_dim)
    return tile, {
        "GROUP": num_q_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "D_MAIN": main,
        "D_TAIL": tail,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": dot_precision(arch, dtype),
        "MASK": mask.value,
    }


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
    """List the tiles of queries that see any key."""
    from loongserve.kernels.striped import StripedPlan

    mask = DIAGONAL if lower_diagonals is None else BAND
    tile, constants = striped_constants(device_arch(device), num_q_heads, num_kv_heads, head_dim, dtype, mask)
    group = num_q_heads // num_kv_heads
    items = list_tiles(cu_seqlens_q, cu_seqlens_k, diagonals, group, tile.block_m, lower_diagonals)
    return StripedPlan(
        provider="triton",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=tuple(diagonals),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=StripedWork(items.to(device), tile, constants),
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
    """List the tiles of queries that see any key, each with the keys from the first to the last that it sees."""
    from loongserve.kernels.striped import StripedPlan

    tile, constants = striped_constants(device_arch(device), num_q_heads, num_kv_heads, head_dim, dtype, POSITIONS)
    # Far below any difference of positions, and far from an overflow.
    lower = 1 - window if window is not None else -(1 << 62)
    group = num_q_heads // num_kv_heads
    items: list[list[int]] = []
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        keys = key_positions[k_begin:k_end]
        for row in range(0, (q_end - q_begin) * group, tile.block_m):
            rows = query_positions[q_begin + row // group : min(q_end, q_begin + (row + tile.block_m - 1) // group + 1)]
            seen = (keys <= rows.max()) & (keys - rows.min() >= lower)
            where = seen.nonzero()
            if len(where):
                first, last = int(where[0]), int(where[-1])
                items.append([q_begin, q_end - q_begin, row, k_begin + first, last - first + 1, 0, lower])
    items.sort(key=lambda item: -item[4])
    return StripedPlan(
        provider="triton",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=StripedWork(
            torch.tensor(items, dtype=torch.int64).reshape(len(items), ITEM_SIZE.value).to(device),
            tile,
            constants,
            query_positions.to(device),
            key_positions.to(device),
        ),
    )


def list_tiles(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    diagonals: Sequence[int],
    group: int,
    block_m: int,
    lower_diagonals: Sequence[int | None] | None = None,
) -> Tensor:
    """List the tiles that see a key, as rows of ``StripedWork.items``, those that see most keys first."""
    tiles = []
    visible = []
    for sequence, diagonal in enumerate(diagonals):
        q_begin, k_begin = cu_seqlens_q[sequence], cu_seqlens_k[sequence]
        num_queries, num_keys = cu_seqlens_q[sequence + 1] - q_begin, cu_seqlens_k[sequence + 1] - k_begin
        # Beyond this the diagonal shows all or nothing; in between it fits 32 bits, as the kernel wants it.
        diagonal = max(-num_queries, min(diagonal, num_keys))
        lower = None if lower_diagonals is None else lower_diagonals[sequence]
        lower = -num_queries if lower is None else max(-num_queries, min(lower, num_keys))
        if lower > diagonal:
            continue
        row_begin = torch.arange(0, num_queries * group, block_m)
        last_local = (row_begin + block_m).clamp(max=num_queries * group).sub(1).div(group, rounding_mode="floor")
        first_visible = (row_begin.div(group, rounding_mode="floor") + lower).clamp(min=0)
        num_visible = (last_local + diagonal + 1).clamp(max=num_keys) - first_visible
        row_begin, num_visible = row_begin[num_visible > 0], num_visible[num_visible > 0]
        tile = torch.tensor([q_begin, num_queries, 0, k_begin, num_keys, diagonal, lower]).repeat(len(row_begin), 1)
        tile[:, 2] = row_begin
        tiles.append(tile)
        visible.append(num_visible)
    if not tiles:
        return torch.empty(0, ITEM_SIZE.value, dtype=torch.int64)
    order = torch.cat(visible).argsort(descending=True, stable=True)
    return torch.cat(tiles)[order]


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
    """Merge one block into ``state`` and save its rows, in one launch."""
    scales = score_scales(scale, soft_cap)
    work: StripedWork = plan.payload
    num_items, total_keys = len(work.items), k.shape[0]
    num_saves = 0 if save is None else triton.cdiv(total_keys, work.tile.block_n)
    num_programs = (num_items + num_saves) * plan.num_kv_heads
    if num_programs == 0:
        return
    # Without a save the block itself stands in for the caches, and nothing is written to it.
    k_cache, v_cache = (k, v) if save is None else (save.k_cache, save.v_cache)
    with device_guard(q.device):
        _striped_attention_kernel[(num_programs,)](
            state.out,
            state.lse,
            k_cache,
            v_cache,
            q,
            k,
            v,
            work.items,
            work.items if save is None else save.slots,
            work.items if work.query_positions is None else work.query_positions,
            work.items if work.key_positions is None else work.key_positions,
            *state.out.stride()[:2],
            *state.lse.stride(),
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            num_items,
            total_keys,
            *scales,
            SOFT_CAP=soft_cap is not None,
            SAVE=save is not None,
            **work.constants,
            **work.tile.launch_options(),
        )
