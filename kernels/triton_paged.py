"""Paged attention on GPUs: work items of (queries, a part of a request's slots), then a merge of the parts.

The plan cuts each request's own slots into parts, so that all items together fill the GPU; the length of one request
changes neither the grid nor the buffers of another. A request with one part writes its state at once, the others
write partial states to the plan's workspace, which a second kernel merges. The order of sums is fixed by the plan:
the same plan gives the same bits. With a window, slots that no query of a tile sees are left out of its parts.

Requests with few query rows (decode: one token, the heads of a group packed into rows) take a tile of 16 rows, the
others the tile of a prefill, each in its own launch. No causal mask: a query sees the slots of its request from its
first visible one on.

Source: Flash-Decoding (Dao et al. 2023); the cut of work by a host plan as in FlashInfer (Ye et al. 2025).
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import LN_2, LOG2_E, attend_keys, empty_sums, load_queries, store_state
from loongserve.kernels.triton_tuning import device_guard, score_scales

if TYPE_CHECKING:
    from loongserve.kernels.paged import PagedPlan
    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.triton_paged_plan import PagedWork

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
    q_offsets = (q_begin + local) * stride_q_token + head * stride_q_head
    q_tile, q_tail = load_queries(q, q_offsets, row_mask, HEAD_DIM, D_MAIN, D_TAIL)
    acc, acc_tail, row_max, row_sum = empty_sums(BLOCK_M, D_MAIN, D_TAIL)

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


def merge_constants(num_q_heads: int, head_dim: int) -> dict[str, Any]:
    """Choose the compile-time constants of ``_merge_partials_kernel``."""
    return {
        "NUM_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_P": 8,
    }


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
