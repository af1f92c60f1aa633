"""Speed of striped attention: a causal prefill, rings, the selective save, and what the host pays for a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from device import baselines
from device.bench import Bench, Heads, Inputs, name_of
from device.results import Result, Speed, compare
from device.timing import host_us, measure
from loongserve.kernels.merge import finalize
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, stripe_bounds, striped_attention


def causal_tflop(heads: Heads, tokens: int) -> float:
    """Count the arithmetic of a causal pass: two products for each visible pair of query and key."""
    return 4 * heads[0] * heads[2] * tokens * (tokens + 1) / 2 / 1e12


def causal_step(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, save: KVSave | None = None) -> Callable[..., None]:
    """Answer a call of one causal pass over one sequence that merges into a state."""
    heads = (q.shape[1], k.shape[1], q.shape[2])
    plan = plan_striped_attention([0, len(q)], [0, len(k)], [0], **inputs.shape(heads))
    kept = AttentionState.empty(*q.shape, inputs.device)

    def run(state: AttentionState = kept) -> None:
        striped_attention(plan, q, k, v, state, scale=heads[2] ** -0.5, save=save)

    return run


def speed_prefill(
    bench: Bench, dtype: torch.dtype, heads: Heads, tokens: int, with_flex: bool = True
) -> Iterator[Result]:
    """Measure a causal pass in TFLOP/s beside SDPA, FlexAttention and flash-attn, whose result it must have."""
    inputs = Inputs(bench, dtype)
    bench.require_memory(tokens * heads[0] * heads[2] * (5 * dtype.itemsize + 8))
    q = inputs.fast_rows(tokens, heads[0], heads[2])
    k, v = (inputs.fast_rows(tokens, heads[1], heads[2]) for _ in range(2))
    step = causal_step(inputs, q, k, v)

    def whole() -> Tensor:
        state = AttentionState.empty(*q.shape, bench.device)
        step(state)
        return finalize(state, dtype)

    makers: dict[str, Callable[[], baselines.Call]] = {
        "sdpa flash": lambda: baselines.sdpa_flash(bench, (q, k, v)),
        "flash-attn": lambda: baselines.flash_attn(bench, (q, k, v)),
    }
    if with_flex:
        makers["flex"] = lambda: baselines.flex(bench, (q, k, v))
    calls, missing = baselines.collect(makers)
    if not with_flex:
        missing["flex"] = "left out to save time: it is compiled anew for each shape"
    name = f"striped_attention, causal, {name_of(heads)}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"
    actual = whole()
    for other, call in calls.items():
        yield compare(f"{name}: beside {other}", dtype, actual, call())
    times = [statistics.median(each) for each in measure(bench, step, whole, *calls.values())]
    tflop = causal_tflop(heads, tokens)
    rates = [tflop / each * 1e3 for each in times]
    yield Speed(
        name,
        times[0],
        rates[0],
        "TFLOP/s",
        dict(zip(calls, rates[2:], strict=True)),
        missing,
        {"with_new_state_and_rounding_tflops": rates[1], "tokens": float(tokens), "head_dim": float(heads[2])},
    )


def speed_ring(bench: Bench, dtype: torch.dtype, heads: Heads, tokens: int, dop: int) -> Iterator[Result]:
    """Measure all steps of all members of a ring, one after the other, by one pass over the same tokens."""
    inputs = Inputs(bench, dtype)
    q = inputs.fast_rows(tokens, heads[0], heads[2])
    k, v = (inputs.fast_rows(tokens, heads[1], heads[2]) for _ in range(2))
    stripes = [[x[member::dop].contiguous() for x in (q, k, v)] for member in range(dop)]
    states = [AttentionState.empty(*stripe[0].shape, bench.device) for stripe in stripes]
    steps = []
    for member in range(dop):
        for source in range(dop):
            counts = [len(stripes[member][0]), len(stripes[source][1])]
            upper, _ = stripe_bounds(member, source, dop)
            plan = plan_striped_attention([0, counts[0]], [0, counts[1]], [upper], **inputs.shape(heads))
            steps.append((plan, stripes[member][0], *stripes[source][1:], states[member]))

    def ring() -> None:
        for plan, mine, block_k, block_v, state in steps:
            striped_attention(plan, mine, block_k, block_v, state, scale=heads[2] ** -0.5)

    one, all_steps = (statistics.median(each) for each in measure(bench, causal_step(inputs, q, k, v), ring))
    name = f"ring of {dop}: sum of all steps, {name_of(heads)}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"
    yield Speed(name, all_steps, all_steps / one, "x one pass", {"one pass": 1.0}, details={"one_pass_ms": one})


def speed_save(bench: Bench, dtype: torch.dtype, heads: Heads, tokens: int) -> Iterator[Result]:
    """Measure what the save of all rows adds to a pass: pairs in turn, mean and the upper 95% bound of the mean."""
    inputs = Inputs(bench, dtype)
    q = inputs.fast_rows(tokens, heads[0], heads[2])
    k, v = (inputs.fast_rows(tokens, heads[1], heads[2]) for _ in range(2))
    save = KVSave(inputs.order(tokens), torch.empty_like(k), torch.empty_like(v))
    runs = causal_step(inputs, q, k, v), causal_step(inputs, q, k, v, save)
    without, with_save = measure(bench, *runs, repeats=bench.choose(30, 3))
    added = [100 * (b / a - 1) for a, b in zip(without, with_save, strict=True)]
    mean = statistics.fmean(added)
    upper = mean + 1.96 * statistics.stdev(added) / len(added) ** 0.5
    name = f"save of all rows in a pass, {name_of(heads)}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"
    details = {"upper_95_percent": upper, "pairs": float(len(added)), "without_ms": statistics.median(without)}
    yield Speed(name, statistics.median(with_save), mean, "% more time", details=details)


def speed_launch(bench: Bench) -> Iterator[Result]:
    """Measure the host's microseconds for a plan and for a run, of a prefill and of a decode batch."""
    inputs = Inputs(bench, bench.choose(torch.bfloat16, torch.float16))
    heads = bench.choose((32, 8, 128), (2, 1, 64))
    tokens, requests, length = bench.choose((4096, 64, 4096), (32, 3, 40))
    q, k, v = (inputs.rows(tokens, n, heads[2]) for n in (heads[0], heads[1], heads[1]))
    begins = [0, tokens]
    step = causal_step(inputs, q, k, v)
    order = list(inputs.order(requests * length).split(length))
    pool = [inputs.fast_rows(requests * length, heads[1], heads[2]) for _ in range(2)]
    counts = list(range(requests + 1))
    paged_plan = plan_paged_attention(counts, order, **inputs.shape(heads))
    state = AttentionState.empty(requests, heads[0], heads[2], bench.device)

    def plan_striped() -> object:
        return plan_striped_attention(begins, begins, [0], **inputs.shape(heads))

    def plan_paged() -> object:
        return plan_paged_attention(counts, order, **inputs.shape(heads))

    def run_paged() -> None:
        paged_attention(paged_plan, q[:requests], *pool, state, scale=heads[2] ** -0.5)

    for name, run in (
        (f"plan_striped_attention, {tokens} tokens", plan_striped),
        (f"striped_attention, {tokens} tokens", step),
        (f"plan_paged_attention, {requests} requests of {length}", plan_paged),
        (f"paged_attention, {requests} requests of {length}", run_paged),
    ):
        microseconds = host_us(bench, run)
        yield Speed(f"host time of {name}", microseconds / 1e3, microseconds, "us a call")
