"""The memory-bound functions of a decoder layer on GPUs: moving K and V, RMS norm, rotary embedding, gated activations.

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
# Columns a program of silu_and_mul and gelu_and_mul.
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


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_slot,
    stride_v_cache_head,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = (program % NUM_KV_HEADS).to(tl.int64)
    # [BLOCK_N]
    tokens = (program // NUM_KV_HEADS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < num_tokens
    slot = tl.load(slots + tokens, mask=token_mask, other=-1)
    columns = tl.arange(0, BLOCK_D)
    # [BLOCK_N, BLOCK_D]
    read = (slot >= 0)[:, None] & (columns < HEAD_DIM)[None, :]
    write = token_mask[:, None] & (columns < HEAD_DIM)[None, :]
    cached = slot[:, None] * stride_k_cache_slot + kv_head * stride_k_cache_head + columns[None, :]
    rows = tokens[:, None] * stride_k_token + kv_head * stride_k_head + columns[None, :]
    tl.store(k + rows, tl.load(k_cache + cached, mask=read, other=0.0), mask=write)
    cached = slot[:, None] * stride_v_cache_slot + kv_head * stride_v_cache_head + columns[None, :]
    rows = tokens[:, None] * stride_v_token + kv_head * stride_v_head + columns[None, :]
    tl.store(v + rows, tl.load(v_cache + cached, mask=read, other=0.0), mask=write)


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
    INTERLEAVED: tl.constexpr,
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
    # Of a pair, elements m and m + HALF, or 2 m and 2 m + 1.
    step: tl.constexpr = 2 if INTERLEAVED else 1
    distance: tl.constexpr = 1 if INTERLEAVED else HALF
    pointers = x + token * stride_x_token + heads.to(tl.int64)[:, None] * stride_x_head + columns[None, :] * step
    loaded = tl.load(pointers, mask=mask, other=0.0)
    first = loaded.to(tl.float32)
    second = tl.load(pointers + distance, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, round_to(first * c - second * s, loaded.dtype), mask=mask)
    tl.store(pointers + distance, round_to(second * c + first * s, loaded.dtype), mask=mask)


@triton.jit
def _gate_and_mul_kernel(
    out,
    x,
    stride_out_row,
    stride_x_row,
    num_columns,
    num_blocks,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    columns = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    # [BLOCK]
    gate = tl.load(x + row * stride_x_row + columns, mask=mask, other=0.0)
    up = tl.load(x + row * stride_x_row + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if GATE == "silu":
        gated = wide / (1.0 + tl.exp(-wide))
    elif GATE == "gelu_tanh":
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), with 2 sqrt(2 / pi) = 1.5957691216.
        gated = wide / (1.0 + tl.exp(-1.5957691216 * wide * (1.0 + 0.044715 * wide * wide)))
    else:
        gated = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    tl.store(out + row * stride_out_row + columns, round_to(gated * up, gate.dtype), mask=mask)


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


def gather_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy some slots of a head a program."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if k.numel() == 0:
        return
    with device_guard(k.device):
        _gather_kv_kernel[(math.ceil(num_tokens / SAVE_BLOCK) * num_kv_heads,)](
            k,
            v,
            k_cache,
            v_cache,
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
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


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> None:
    """Rotate in place, some heads of a token a program."""
    num_tokens, num_heads, _ = x.shape
    half = cos.shape[1]
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
            HALF=half,
            INTERLEAVED=interleaved,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_H=block,
            num_warps=2,
            enable_fp_fusion=True,
        )


def silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    """Gate a block of columns a program."""
    return _launch_gate(x, out, "silu")


def gelu_and_mul(x: Tensor, out: Tensor, *, approximate: str) -> Tensor:
    """Gate a block of columns a program."""
    return _launch_gate(x, out, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


def _launch_gate(x: Tensor, out: Tensor, gate: str) -> Tensor:
    if out.numel() == 0:
        return out
    num_rows, num_columns = out.shape
    block = min(SILU_BLOCK, triton.next_power_of_2(num_columns))
    num_blocks = math.ceil(num_columns / block)
    with device_guard(x.device):
        _gate_and_mul_kernel[(num_rows * num_blocks,)](
            out,
            x,
            out.stride(0),
            x.stride(0),
            num_columns,
            num_blocks,
            GATE=gate,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
