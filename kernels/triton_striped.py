"""Striped attention on GPUs: one program takes a tile of queries past the keys of a block that it may see.

A query sees local keys a + lower <= b <= a + upper (``loongserve.kernels.striped``), or those that its position allows
(``loongserve.kernels.positional``). The tile's result is merged with the running float32 state as it is stored, so a
ring step needs no separate merge and rounds nothing.

The plan lists the tiles of queries that see any key, those with most keys first; programs past the list copy K and V
rows to their slots, so that the memory-bound copy runs beside the compute-bound tiles in the same launch. Tiles of keys
outside the diagonals are never visited, and only those on one are masked. Base 2 inside, natural logarithm outside;
products in the input's type (float32: tf32x3 or ieee), sums in float32.

Source: FlashAttention-2 (Dao 2023); striped attention (Brandon et al. 2023); LoongServe section 4.1 for the save.
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import attend_keys, empty_sums, load_queries, save_rows, store_state
from loongserve.kernels.triton_tuning import device_guard, score_scales

if TYPE_CHECKING:
    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.striped import KVSave, StripedPlan
    from loongserve.kernels.triton_striped_plan import StripedWork

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
        q_offsets = token * stride_q_token + head * stride_q_head
        q_tile, q_tail = load_queries(q, q_offsets, row_mask, HEAD_DIM, D_MAIN, D_TAIL)
        acc, acc_tail, row_max, row_sum = empty_sums(BLOCK_M, D_MAIN, D_TAIL)

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
