"""Pieces of the attention kernels: one step of the online softmax, the state of a tile, and the store of K/V rows.

Scores are kept in base 2, so that the exponential is one instruction: with c = scale * log2(e), p_j = 2^(c s_j - m) for
the running maximum m of c s. The state in memory is normalised with a natural-log LSE: out = acc / row_sum and
lse = (row_max + log2(row_sum)) * ln(2); taken in again it is (out, row_max = lse * log2(e), row_sum = 1). With a soft
cap C the scores are tanh(scale s / C) first, and c = C * log2(e).

A tile holds query rows of one KV head: row r is token r // GROUP and the group's query head r % GROUP. So all heads of
a group share each K and V tile that is loaded, and a decode query fills a matrix instruction's rows.

A head is D_MAIN + D_TAIL wide (``split_head_dim``); D_TAIL is 0 for powers of two, and then the tail tensors are
placeholders that nothing reads.
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


# Triton's interpreter multiplies bfloat16 as if it were integers and rounds to it toward zero, unlike any GPU.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Cast float32 to ``DTYPE``, to nearest even on every device."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Multiply with float32 sums; ``acc`` may be None."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def softmax_step(scores, row_max, row_sum, scale_log2):
    """Take in a tile of raw scores (-inf: not seen): p, the factor of what was summed before, new maximum and sum."""
    # [BLOCK_M]
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    # [BLOCK_M, BLOCK_N]
    p = tl.exp2(scores * scale_log2 - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, axis=1)


@triton.jit
def cap_scores(scores, factor, EXACT: tl.constexpr):
    """Take tanh(scores * factor)."""
    x = scores * factor
    # Overflow to infinity gives 1, underflow -1.
    y = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    if EXACT:
        # Near 0 the difference cancels, to an error of 1e-7, and the series is exact to rounding.
        square = x * x
        y = tl.where(square < 0.01, x * (1.0 + square * (-0.3333333333 + square * 0.1333333333)), y)
    return y


@triton.jit
def load_rows(pointers, row_mask, MASK_ROWS: tl.constexpr, column_mask, MASK_COLUMNS: tl.constexpr):
    """Load a tile of rows, 0 where masked; masks that can't hide anything are left out."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=row_mask[:, None], other=0.0)
    if MASK_COLUMNS:
        return tl.load(pointers, mask=column_mask[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_queries(q, offsets, row_mask, HEAD_DIM: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    """Load a tile of query rows in two parts; without a tail the first stands in for it."""
    main = tl.arange(0, D_MAIN)
    # [BLOCK_M, D_MAIN]
    q_tile = load_rows(q + offsets[:, None] + main[None, :], row_mask, True, main, False)
    q_tail = q_tile
    if D_TAIL > 0:
        tail = D_MAIN + tl.arange(0, D_TAIL)
        # [BLOCK_M, D_TAIL]
        q_tail = load_rows(q + offsets[:, None] + tail[None, :], row_mask, True, tail < HEAD_DIM, True)
    return q_tile, q_tail


@triton.jit
def empty_sums(BLOCK_M: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    """Make the sums, maxima and sums of weights of rows that have seen nothing: acc, acc_tail, row_max, row_sum."""
    acc = tl.zeros([BLOCK_M, D_MAIN], dtype=tl.float32)
    acc_tail = acc
    if D_TAIL > 0:
        acc_tail = tl.zeros([BLOCK_M, D_TAIL], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    return acc, acc_tail, row_max, row_sum


@triton.jit
def attend_keys(
    acc,
    acc_tail,
    row_max,
    row_sum,
    q,
    q_tail,
    k,
    v,
    k_offsets,
    v_offsets,
    key_mask,
    visible,
    scale_log2,
    cap_factor,
    MASK_KEYS: tl.constexpr,
    MASK_SCORES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Take in one tile of keys: ``k_offsets`` and ``v_offsets`` [BLOCK_N] int64 of their rows from ``k`` and ``v``."""
    main = tl.arange(0, D_MAIN)
    # [BLOCK_N, D_MAIN]
    k_tile = load_rows(k + k_offsets[:, None] + main[None, :], key_mask, MASK_KEYS, main, False)
    # [BLOCK_M, BLOCK_N]
    scores = dot(q, tl.trans(k_tile), None, PRECISION)
    if D_TAIL > 0:
        tail = D_MAIN + tl.arange(0, D_TAIL)
        # [BLOCK_N, D_TAIL]
        k_tail = load_rows(
            k + k_offsets[:, None] + tail[None, :], key_mask, MASK_KEYS, tail < HEAD_DIM, D_MAIN + D_TAIL > HEAD_DIM
        )
        scores = dot(q_tail, tl.trans(k_tail), scores, PRECISION)
    if SOFT_CAP:
        # What comes from 16 bits has larger errors, and their tiles no registers to spare.
        scores = cap_scores(scores, cap_factor, k_tile.dtype == tl.float32)
    if MASK_SCORES:
        scores = tl.where(visible, scores, float("-inf"))
    p, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
    v_tile = load_rows(v + v_offsets[:, None] + main[None, :], key_mask, MASK_KEYS, main, False)
    p = round_to(p, v_tile.dtype)
    acc = dot(p, v_tile, acc * alpha[:, None], PRECISION)
    if D_TAIL > 0:
        tail = D_MAIN + tl.arange(0, D_TAIL)
        v_tail = load_rows(
            v + v_offsets[:, None] + tail[None, :], key_mask, MASK_KEYS, tail < HEAD_DIM, D_MAIN + D_TAIL > HEAD_DIM
        )
        acc_tail = dot(p, v_tail, acc_tail * alpha[:, None], PRECISION)
    return acc, acc_tail, row_max, row_sum


@triton.jit
def store_state(
    out,
    lse,
    out_offsets,
    lse_offsets,
    row_mask,
    acc,
    acc_tail,
    row_max,
    row_sum,
    MERGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
):
    """Normalise and store a tile's rows; one that saw nothing is (0, -inf), or stays untouched with MERGE.

    With MERGE the state in memory is taken in. That happens here and not at the start, as the start of the softmax,
    because the addresses of a whole tile would then stay in registers during the loop over the keys.
    """
    main = tl.arange(0, D_MAIN)
    # [BLOCK_M]; not "> 0", which would hide a NaN.
    seen = row_sum != 0.0
    if MERGE:
        row_mask = row_mask & seen
        old_max = tl.load(lse + lse_offsets, mask=row_mask, other=float("-inf")) * LOG2_E
        new_max = tl.maximum(row_max, old_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - shift)
        old_weight = tl.exp2(old_max - shift)
        row_sum = row_sum * alpha + old_weight
        row_max = new_max
    divisor = tl.where(seen, row_sum, 1.0)
    tl.store(lse + lse_offsets, tl.where(seen, (row_max + tl.log2(divisor)) * LN_2, float("-inf")), mask=row_mask)
    pointers = out + out_offsets[:, None] + main[None, :]
    if MERGE:
        acc = acc * alpha[:, None] + tl.load(pointers, mask=row_mask[:, None], other=0.0) * old_weight[:, None]
    tl.store(pointers, acc / divisor[:, None], mask=row_mask[:, None])
    if D_TAIL > 0:
        tail = D_MAIN + tl.arange(0, D_TAIL)
        pointers = out + out_offsets[:, None] + tail[None, :]
        mask = row_mask[:, None] & (tail < HEAD_DIM)[None, :]
        if MERGE:
            acc_tail = acc_tail * alpha[:, None] + tl.load(pointers, mask=mask, other=0.0) * old_weight[:, None]
        tl.store(pointers, acc_tail / divisor[:, None], mask=mask)


@triton.jit
def save_rows(
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
    first_token,
    num_tokens,
    kv_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store rows ``first_token``.. of one KV head in their slots; a slot of -1 skips."""
    # [BLOCK_N]
    tokens = first_token.to(tl.int64) + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    columns = tl.arange(0, BLOCK_D)
    # [BLOCK_N, BLOCK_D]
    mask = (slot >= 0)[:, None] & (columns < HEAD_DIM)[None, :]
    rows = tokens[:, None] * stride_k_token + kv_head * stride_k_head + columns[None, :]
    cached = slot[:, None] * stride_k_cache_slot + kv_head * stride_k_cache_head + columns[None, :]
    tl.store(k_cache + cached, tl.load(k + rows, mask=mask), mask=mask)
    rows = tokens[:, None] * stride_v_token + kv_head * stride_v_head + columns[None, :]
    cached = slot[:, None] * stride_v_cache_slot + kv_head * stride_v_cache_head + columns[None, :]
    tl.store(v_cache + cached, tl.load(v + rows, mask=mask), mask=mask)
