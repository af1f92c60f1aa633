"""Merge and rounding of attention states on GPUs.

    lse = log(exp(a.lse) + exp(b.lse)),   out = a.out exp(a.lse - lse) + b.out exp(b.lse - lse)

States [tokens, heads, head_dim] and [tokens, heads] float32, natural logarithm, any strides but a contiguous last
dimension. A program takes BLOCK_R (token, head) rows. Its rows are loaded before any is stored, so ``out`` may be an
input.

Source: LoongServe section 4.2.
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import round_to
from loongserve.kernels.triton_tuning import device_guard

if TYPE_CHECKING:
    from loongserve.kernels.state import AttentionState

# Rows a program: 4 KiB and more of each state at the usual head sizes.
BLOCK_R = 16
# States that one launch of merge_many reads; more are merged into the result by further launches.
MERGED_AT_ONCE = 4
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_states_kernel(
    out,
    lse,
    a_out,
    a_lse,
    b_out,
    b_lse,
    rows,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_a_out_token,
    stride_a_out_head,
    stride_a_lse_token,
    stride_a_lse_head,
    stride_b_out_token,
    stride_b_out_head,
    stride_b_lse_token,
    stride_b_lse_head,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    # [BLOCK_R]
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = index // NUM_HEADS
    head = index % NUM_HEADS
    mask = token < num_tokens
    # Token i of b is merged with token rows[i] of a.
    target = token
    if HAS_ROWS:
        target = tl.load(rows + token, mask=mask, other=0)
    columns = tl.arange(0, BLOCK_D)
    # [BLOCK_R, BLOCK_D]
    tile_mask = mask[:, None] & (columns < HEAD_DIM)[None, :]

    a_max = tl.load(a_lse + target * stride_a_lse_token + head * stride_a_lse_head, mask=mask, other=float("-inf"))
    b_max = tl.load(b_lse + token * stride_b_lse_token + head * stride_b_lse_head, mask=mask, other=float("-inf"))
    a_rows = target * stride_a_out_token + head * stride_a_out_head
    b_rows = token * stride_b_out_token + head * stride_b_out_head
    a_tile = tl.load(a_out + a_rows[:, None] + columns[None, :], mask=tile_mask, other=0.0)
    b_tile = tl.load(b_out + b_rows[:, None] + columns[None, :], mask=tile_mask, other=0.0)

    shift = tl.maximum(a_max, b_max)
    # -inf - -inf is NaN.
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    a_weight = tl.exp(a_max - shift)
    b_weight = tl.exp(b_max - shift)
    total = a_weight + b_weight
    seen = total != 0.0
    divisor = tl.where(seen, total, 1.0)
    merged = (a_tile * a_weight[:, None] + b_tile * b_weight[:, None]) / divisor[:, None]

    out_rows = target * stride_out_token + head * stride_out_head
    tl.store(out + out_rows[:, None] + columns[None, :], merged, mask=tile_mask)
    tl.store(
        lse + target * stride_lse_token + head * stride_lse_head,
        tl.where(seen, shift + tl.log(divisor), float("-inf")),
        mask=mask,
    )


@triton.jit
def _take_in(row_max, row_sum, acc, lse_pointers, out_pointers, mask, tile_mask):
    """Add a state to sums of exp(lse - row_max) and of exp(lse - row_max) out."""
    part_max = tl.load(lse_pointers, mask=mask, other=float("-inf"))
    new_max = tl.maximum(row_max, part_max)
    # -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp(row_max - shift)
    weight = tl.exp(part_max - shift)
    part = tl.load(out_pointers, mask=tile_mask, other=0.0)
    return new_max, row_sum * alpha + weight, acc * alpha[:, None] + part * weight[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_many_kernel(
    out,
    lse,
    out0,
    lse0,
    out1,
    lse1,
    out2,
    lse2,
    out3,
    lse3,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_out0_token,
    stride_out0_head,
    stride_lse0_token,
    stride_lse0_head,
    stride_out1_token,
    stride_out1_head,
    stride_lse1_token,
    stride_lse1_head,
    stride_out2_token,
    stride_out2_head,
    stride_lse2_token,
    stride_lse2_head,
    stride_out3_token,
    stride_out3_head,
    stride_lse3_token,
    stride_lse3_head,
    num_tokens,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # [BLOCK_R]
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = index // NUM_HEADS
    head = index % NUM_HEADS
    mask = token < num_tokens
    columns = tl.arange(0, BLOCK_D)
    # [BLOCK_R, BLOCK_D]
    tile_mask = mask[:, None] & (columns < HEAD_DIM)[None, :]
    row_max = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_R], dtype=tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    row_max, row_sum, acc = _take_in(
        row_max,
        row_sum,
        acc,
        lse0 + token * stride_lse0_token + head * stride_lse0_head,
        out0 + (token * stride_out0_token + head * stride_out0_head)[:, None] + columns[None, :],
        mask,
        tile_mask,
    )
    if COUNT > 1:
        row_max, row_sum, acc = _take_in(
            row_max,
            row_sum,
            acc,
            lse1 + token * stride_lse1_token + head * stride_lse1_head,
            out1 + (token * stride_out1_token + head * stride_out1_head)[:, None] + columns[None, :],
            mask,
            tile_mask,
        )
    if COUNT > 2:
        row_max, row_sum, acc = _take_in(
            row_max,
            row_sum,
            acc,
            lse2 + token * stride_lse2_token + head * stride_lse2_head,
            out2 + (token * stride_out2_token + head * stride_out2_head)[:, None] + columns[None, :],
            mask,
            tile_mask,
        )
    if COUNT > 3:
        row_max, row_sum, acc = _take_in(
            row_max,
            row_sum,
            acc,
            lse3 + token * stride_lse3_token + head * stride_lse3_head,
            out3 + (token * stride_out3_token + head * stride_out3_head)[:, None] + columns[None, :],
            mask,
            tile_mask,
        )
    seen = row_sum != 0.0
    divisor = tl.where(seen, row_sum, 1.0)
    rows = token * stride_out_token + head * stride_out_head
    tl.store(out + rows[:, None] + columns[None, :], acc / divisor[:, None], mask=tile_mask)
    tl.store(
        lse + token * stride_lse_token + head * stride_lse_head,
        tl.where(seen, row_max + tl.log(divisor), float("-inf")),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _finalize_kernel(
    out,
    state_out,
    stride_out_token,
    stride_out_head,
    stride_out_dim,
    stride_state_token,
    stride_state_head,
    stride_state_dim,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # [BLOCK_R]
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = index // NUM_HEADS
    head = index % NUM_HEADS
    columns = tl.arange(0, BLOCK_D)
    # [BLOCK_R, BLOCK_D]
    mask = (token < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    rows = (token * stride_state_token + head * stride_state_head)[:, None]
    tile = tl.load(state_out + rows + columns[None, :] * stride_state_dim, mask=mask)
    rows = (token * stride_out_token + head * stride_out_head)[:, None]
    tl.store(out + rows + columns[None, :] * stride_out_dim, round_to(tile, out.dtype.element_ty), mask=mask)


def merge_states(a: AttentionState, b: AttentionState, out: AttentionState) -> AttentionState:
    """Merge row by row."""
    _launch_merge(out, a, b, None)
    return out


def merge_many(states: Sequence[AttentionState], out: AttentionState) -> AttentionState:
    """Merge some at a time: the result so far and those that come next."""
    batch = list(states[:MERGED_AT_ONCE])
    _launch_many(batch, out)
    for begin in range(MERGED_AT_ONCE, len(states), MERGED_AT_ONCE - 1):
        _launch_many([out, *states[begin : begin + MERGED_AT_ONCE - 1]], out)
    return out


def _launch_many(states: list[AttentionState], out: AttentionState) -> None:
    num_tokens, num_heads, head_dim = out.out.shape
    if out.lse.numel() == 0:
        return
    # The last stands in where there are fewer, and is not read again.
    filled = states + states[-1:] * (MERGED_AT_ONCE - len(states))
    with device_guard(out.out.device):
        _merge_many_kernel[(math.ceil(num_tokens * num_heads / BLOCK_R),)](
            out.out,
            out.lse,
            *(tensor for state in filled for tensor in (state.out, state.lse)),
            *out.out.stride()[:2],
            *out.lse.stride(),
            *(stride for state in filled for stride in (*state.out.stride()[:2], *state.lse.stride())),
            num_tokens,
            COUNT=len(states),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_R=BLOCK_R,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def merge_rows(state: AttentionState, rows: Tensor, part: AttentionState) -> None:
    """Merge into the named rows: only those are read and written."""
    _launch_merge(state, state, part, rows)


def _launch_merge(out: AttentionState, a: AttentionState, b: AttentionState, rows: Tensor | None) -> None:
    num_tokens, num_heads, head_dim = b.out.shape
    if b.lse.numel() == 0:
        return
    with device_guard(b.out.device):
        _merge_states_kernel[(math.ceil(num_tokens * num_heads / BLOCK_R),)](
            out.out,
            out.lse,
            a.out,
            a.lse,
            b.out,
            b.lse,
            b.lse if rows is None else rows,
            *out.out.stride()[:2],
            *out.lse.stride(),
            *a.out.stride()[:2],
            *a.lse.stride(),
            *b.out.stride()[:2],
            *b.lse.stride(),
            num_tokens,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_R=BLOCK_R,
            HAS_ROWS=rows is not None,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def finalize(state: AttentionState, out: Tensor) -> Tensor:
    """Round once."""
    num_tokens, num_heads, head_dim = out.shape
    if out.numel() == 0:
        return out
    with device_guard(out.device):
        _finalize_kernel[(math.ceil(num_tokens * num_heads / BLOCK_R),)](
            out,
            state.out,
            *out.stride(),
            *state.out.stride(),
            num_tokens,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_R=BLOCK_R,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return out
