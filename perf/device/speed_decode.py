"""Speed of paged attention over slots in random order: decode, and chunks of queries over what is resident."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

from device import baselines
from device.bench import Bench, Heads, Inputs, cumulated, name_of
from device.results import Result, Speed, compare
from device.timing import copy_gb_per_s, measure
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState


def speed_decode(bench: Bench, dtype: torch.dtype, heads: Heads, lengths: list[int], title: str) -> Iterator[Result]:
    """Measure one query a request in GB/s of K and V, beside a copy and, for equal lengths, libraries.

    The libraries read K and V that lie in order; ours gathers single tokens from all over the pool.
    """
    inputs = Inputs(bench, dtype)
    total, requests = sum(lengths), len(lengths)
    kv_bytes = 2 * total * heads[1] * heads[2] * dtype.itemsize
    equal = len(set(lengths)) == 1
    bench.require_memory(kv_bytes * (2 if equal else 1) + 40 * total + (2 << 30))
    pool = [inputs.fast_rows(total, heads[1], heads[2]) for _ in range(2)]
    order = torch.randperm(total, device=bench.device)
    q = inputs.rows(requests, heads[0], heads[2])
    plan = plan_paged_attention(cumulated([1] * requests), list(order.split(lengths)), **inputs.shape(heads))
    state = AttentionState.empty(requests, heads[0], heads[2], bench.device)

    def ours() -> None:
        paged_attention(plan, q, *pool, state, scale=heads[2] ** -0.5)

    calls: dict[str, baselines.Call] = {}
    missing = dict.fromkeys(("sdpa flash", "flash-attn"), "the lengths differ")
    name = f"paged_attention, decode, {name_of(heads)}, {title}, {str(dtype).removeprefix('torch.')}"
    if equal:
        k, v = (cache[order].view(requests, lengths[0], heads[1], heads[2]) for cache in pool)
        makers: dict[str, Callable[[], baselines.Call]] = {
            "sdpa flash": lambda: baselines.sdpa_decode(bench, q, k, v),
            "flash-attn": lambda: baselines.flash_attn_decode(bench, q, k, v),
        }
        calls, missing = baselines.collect(makers)
        ours()
        for other, call in calls.items():
            yield compare(f"{name}: beside {other}", dtype, state.out, call())
    times = [statistics.median(each) for each in measure(bench, ours, *calls.values())]
    rates = [kv_bytes / each / 1e6 for each in times]
    others = {"copy": copy_gb_per_s(bench)} | dict(zip(calls, rates[1:], strict=True))
    details = {"kv_bytes": float(kv_bytes)}
    yield Speed(name, times[0], rates[0], "GB/s", others, missing, details)


def speed_chunk(bench: Bench, dtype: torch.dtype, heads: Heads, queries: int, length: int) -> Iterator[Result]:
    """Measure many queries over one request's resident slots in TFLOP/s, beside SDPA over gathered K and V."""
    inputs = Inputs(bench, dtype)
    pool = [inputs.fast_rows(length, heads[1], heads[2]) for _ in range(2)]
    order = torch.randperm(length, device=bench.device)
    q = inputs.rows(queries, heads[0], heads[2])
    plan = plan_paged_attention([0, queries], [order], **inputs.shape(heads))
    state = AttentionState.empty(queries, heads[0], heads[2], bench.device)

    def ours() -> None:
        paged_attention(plan, q, *pool, state, scale=heads[2] ** -0.5)

    def sdpa() -> baselines.Call:
        q4, k4, v4 = (x.transpose(0, 1)[None].contiguous() for x in (q, pool[0][order], pool[1][order]))
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q4, k4, v4, enable_gqa=True)[0].transpose(0, 1)

    calls, missing = baselines.collect({"sdpa": sdpa})
    name = f"paged_attention, {name_of(heads)}, {queries} queries over {length} slots"
    name += f", {str(dtype).removeprefix('torch.')}"
    ours()
    for other, call in calls.items():
        yield compare(f"{name}: beside {other}", dtype, state.out, call())
    times = [statistics.median(each) for each in measure(bench, ours, *calls.values())]
    rates = [4 * heads[0] * heads[2] * queries * length / each / 1e9 for each in times]
    yield Speed(name, times[0], rates[0], "TFLOP/s", dict(zip(calls, rates[1:], strict=True)), missing)
