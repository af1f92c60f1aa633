"""The memory-bound functions of a decoder layer on GPUs: saving K and V, RMS norm, rotary embedding, SwiGLU.

Each reads its input once and writes its output once; arithmetic in float32. Formulas and layouts are those of
``loongserve.kernels.kv``, ``norm``, ``rope`` and ``activation``.
"""

# Kernels are Triton's language, which Python's types do not describe.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from loongserve.kernels.triton_tile import round_to, save_rows
from loongserve.kernels.triton_tuning import device_guard

# Rows of K and V a program of save_kv.
SAVE_BLOCK = 32
# Heads a program of apply_rope.
ROPE_HEADS = 8
# Columns a program of silu_and_mul.
SILU_BLOCK = 1024
# A row must fit the registers of one program.
MAX_HIDDEN = 32768


@triton.jit(do_not_specialize=["num_tokens"])
def _save_kv_kernel(
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
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
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
        (program // NUM_KV_HEADS) * BLOCK_N,
        num_tokens,
        (program % NUM_KV_HEADS).to(tl.int64),
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )


@triton.jit
def _rms_norm_kernel(
    out,
    residual,
    x,
    weight,
    stride_out_row,
    stride_residual_row,
    stride_x_row,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    # [BLOCK]
    loaded = tl.load(x + row * stride_x_row + columns, mask=mask, other=0.0)
    wide = loaded.to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * stride_residual_row + columns
        wide += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        # The stream is kept in the input's type, and what is kept is what is normalised.
        rounded = round_to(wide, loaded.dtype)
        tl.store(pointers, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    normalised = round_to(wide * inverse, loaded.dtype).to(tl.float32)
    scaled = normalised * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out_row + columns, round_to(scaled, loaded.dtype), mask=mask)


@triton.jit
def _apply_rope_kernel(
    x,
    cos,
    sin,
    positions,
    stride_x_token,
    stride_x_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0)
    blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = (program // blocks).to(tl.int64)
    heads = (program % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_HALF)
    column_mask = columns < HALF
    position = tl.load(positions + token)
    # [1, BLOCK_HALF]
    c = tl.load(cos + position * HALF + columns, mask=column_mask, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + columns, mask=column_mask, other=0.0)[None, :]
    # [BLOCK_H, BLOCK_HALF]
    mask = (heads < NUM_HEADS)[:, None] & column_mask[None, :]
    pointers = x + token * stride_x_token + heads.to(tl.int64)[:, None] * stride_x_head + columns[None, :]
    loaded = tl.load(pointers, mask=mask, other=0.0)
    first = loaded.to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, round_to(first * c - second * s, loaded.dtype), mask=mask)
    tl.store(pointers + HALF, round_to(second * c + first * s, loaded.dtype), mask=mask)


@triton.jit
def _silu_and_mul_kernel(out, x, stride_out_row, stride_x_row, num_columns, num_blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    columns = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    # [BLOCK]
    gate = tl.load(x + row * stride_x_row + columns, mask=mask, other=0.0)
    up = tl.load(x + row * stride_x_row + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out + row * stride_out_row + columns, round_to(wide / (1.0 + tl.exp(-wide)) * up, gate.dtype), mask=mask)


def save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store the rows that have a slot."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if k.numel() == 0:
        return
    with device_guard(k.device):
        _save_kv_kernel[(math.ceil(num_tokens / SAVE_BLOCK) * num_kv_heads,)](
            k_cache,
            v_cache,
            k,
            v,
            slots,
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            num_tokens,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_N=SAVE_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
    """Normalise a row a program.

    Raises:
        ValueError: the hidden size is above 32768.
    """
    hidden = x.shape[-1]
    if hidden > MAX_HIDDEN:
        raise ValueError(f"the triton provider normalises up to {MAX_HIDDEN} columns, got {hidden}")
    if x.numel() == 0:
        return out
    tensors = [tensor for tensor in (x, residual, out) if tensor is not None]
    if x.dim() != 2 and not all(tensor.is_contiguous() for tensor in tensors):
        # Rows of such a view have no common stride; those of its slices may.
        for index in range(len(x)):
            rms_norm(x[index], weight, eps, residual=None if residual is None else residual[index], out=out[index])
        return out
    x_rows, out_rows = x.view(-1, hidden), out.view(-1, hidden)
    stream = x_rows if residual is None else residual.view(-1, hidden)
    constants = rms_norm_constants(hidden)
    with device_guard(x.device):
        _rms_norm_kernel[(len(x_rows),)](
            out_rows,
            stream,
            x_rows,
            weight,
            out_rows.stride(0),
            stream.stride(0),
            x_rows.stride(0),
            eps,
            HAS_RESIDUAL=residual is not None,
            **constants,
            num_warps=rms_norm_warps(constants["BLOCK"]),
            enable_fp_fusion=True,
        )
    return out


def rms_norm_constants(hidden: int) -> dict[str, int]:
    """Choose the compile-time constants of ``_rms_norm_kernel``, all but HAS_RESIDUAL."""
    return {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden)}


def rms_norm_warps(block: int) -> int:
    """Choose 16 elements a thread, up to 16 warps."""
    return min(16, max(1, block // 512))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate in place, some heads of a token a program."""
    num_tokens, num_heads, head_dim = x.shape
    if x.numel() == 0:
        return
    block = min(ROPE_HEADS, triton.next_power_of_2(num_heads))
    with device_guard(x.device):
        _apply_rope_kernel[(num_tokens * math.ceil(num_heads / block),)](
            x,
            cos,
            sin,
            positions,
            *x.stride()[:2],
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_H=block,
            num_warps=2,
            enable_fp_fusion=True,
        )


def silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    """Gate a block of columns a program."""
    if out.numel() == 0:
        return out
    num_rows, num_columns = out.shape
    block = min(SILU_BLOCK, triton.next_power_of_2(num_columns))
    num_blocks = math.ceil(num_columns / block)
    with device_guard(x.device):
        _silu_and_mul_kernel[(num_rows * num_blocks,)](
            out,
            x,
            out.stride(0),
            x.stride(0),
            num_columns,
            num_blocks,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
