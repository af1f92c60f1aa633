"""Plans of ``triton_striped``: which tiles of queries see any key, and the form of the kernel that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from loongserve.kernels.striped import StripedPlan
from loongserve.kernels.triton_striped import BAND, DIAGONAL, ITEM_SIZE, POSITIONS
from loongserve.kernels.triton_tuning import STRIPED_TILES, Tile, attention_constants, device_arch, table_row


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
    arch: str, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, mask: int
) -> tuple[Tile, dict[str, Any]]:
    """Choose the tile and the kernel's compile-time constants, all but SOFT_CAP and SAVE; ``mask`` is one of them."""
    tile = table_row(STRIPED_TILES, arch, head_dim, dtype)
    if mask == POSITIONS.value and tile.block_n > 16:
        # Positions take 64 bits and so twice the registers of a mask by diagonals.
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile, {
        **attention_constants(tile, arch, num_q_heads, num_kv_heads, head_dim, dtype),
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "MASK": mask,
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
    mask = DIAGONAL.value if lower_diagonals is None else BAND.value
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
    arch = device_arch(device)
    tile, constants = striped_constants(arch, num_q_heads, num_kv_heads, head_dim, dtype, POSITIONS.value)
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
