"""paged_attention of the cpu provider: decode over slots of a pool.

Beside torch's SDPA over gathered K and V, and beside a loop of plain loads, which is the most that memory gives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from loongserve.kernels import reference
from loongserve.kernels.native_build import load_native
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState

HEADS = (9, 3, 64)
# Slots are single tokens, and SDPA is given them in a row: what finding them costs is what is allowed.
LEAST_RATIO = 0.1
# Of the bandwidth of plain loads. The goal is 0.7; with AVX2 the products alone take about that long, and rows that lie
# anywhere come at half the speed of rows in order.
LEAST_BANDWIDTH_RATIO = 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["run", "scattered"])
def test_decode(layout: str, dtype: torch.dtype, ratio_to: Callable[..., float]) -> None:
    q_heads, kv_heads, head_dim = HEADS
    requests, length = 4, 4096
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(requests * length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2)]
    order = torch.arange(requests * length)
    if layout == "scattered":
        order = torch.randperm(requests * length, generator=generator)
    slots = order.split(length)
    q = torch.randn(requests, q_heads, head_dim, generator=generator).to(dtype)
    plan = plan_paged_attention(
        range(requests + 1),
        slots,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device="cpu",
    )
    state = AttentionState.empty(requests, q_heads, head_dim)
    scale = head_dim**-0.5
    paged_attention(plan, q, pool[0], pool[1], state, scale=scale)
    visible = torch.ones(1, length, dtype=torch.bool)
    for index, request_slots in enumerate(slots):
        rows = slice(index, index + 1)
        part = reference.attend(q[rows], pool[0][request_slots], pool[1][request_slots], visible, scale, torch.float64)
        torch.testing.assert_close(
            state.out[rows].double(), part.out, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5
        )

    gathered = [torch.stack([cache[s].transpose(0, 1) for s in slots]) for cache in pool]
    q4 = q[:, :, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    gigabytes = 2 * pool[0].nbytes / 1e9
    ratio = ratio_to(
        lambda: paged_attention(plan, q, pool[0], pool[1], state, scale=scale),
        lambda: sdpa(q4, gathered[0], gathered[1], enable_gqa=True),
        "SDPA, gathered",
        gigabytes,
        "GB",
    )
    assert ratio > LEAST_RATIO


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128)], ids=["9:3x64", "32:8x128"])
@pytest.mark.parametrize("lengths", [[4096] * 16, [256] * 15 + [60_000]], ids=["16x4096", "15x256_60000"])
def test_bandwidth(lengths: list[int], heads: tuple[int, int, int], ratio_to: Callable[..., float]) -> None:
    library = load_native()
    if library is None:
        pytest.skip("the loop of loads is native and there is no compiler")
    q_heads, kv_heads, head_dim = heads
    total, requests = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(0)
    # One tensor, so that the loop of loads reads the very same bytes.
    pool = torch.randn(2, total, kv_heads, head_dim, generator=generator).bfloat16()
    q = torch.randn(requests, q_heads, head_dim, generator=generator).bfloat16()
    plan = plan_paged_attention(
        range(requests + 1),
        torch.randperm(total, generator=generator).split(lengths),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cpu",
    )
    state = AttentionState.empty(requests, q_heads, head_dim)
    arguments = (ctypes.c_void_p(pool.data_ptr()), ctypes.c_int64(pool.nbytes), ctypes.c_int64(torch.get_num_threads()))
    ratio = ratio_to(
        lambda: paged_attention(plan, q, pool[0], pool[1], state, scale=head_dim**-0.5),
        lambda: library.loong_read_memory(*arguments),
        "plain loads",
        pool.nbytes / 1e9,
        "GB",
    )
    assert ratio > LEAST_BANDWIDTH_RATIO
