"""Everything of a decoder layer but attention, against float64; and the operators in compiled code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from device.attention import check_block, check_ring
from device.bench import Bench, Inputs, NotRun, environment
from device.results import Check, compare, same
from loongserve.kernels import reference
from loongserve.kernels.activation import gelu_and_mul, silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.paged import PagedPlan, paged_attention, plan_paged_attention
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan, plan_striped_attention, striped_attention


def check_merges(bench: Bench, dtype: torch.dtype, heads: int, head_dim: int) -> Iterator[Check]:
    """Merge states with empty rows and large differences, two, many and by row, and round."""
    inputs = Inputs(bench, dtype)
    tokens = bench.choose(1001, 7)

    def draw(count: int) -> AttentionState:
        lse = inputs.rows(count, heads, dtype=torch.float32) * 100
        lse[::3] = -math.inf
        out = inputs.rows(count, heads, head_dim, dtype=torch.float32)
        return AttentionState(out.masked_fill((lse == -math.inf)[..., None], 0.0), lse)

    def double(state: AttentionState) -> AttentionState:
        return AttentionState(state.out.double(), state.lse.double())

    def compare_both(name: str, actual: AttentionState, expected: AttentionState) -> Iterator[Check]:
        yield compare(f"{name}, {heads}x{head_dim}: out", torch.float32, actual.out, expected.out)
        yield compare(f"{name}, {heads}x{head_dim}: lse", torch.float32, actual.lse, expected.lse)

    a, b, part = draw(tokens), draw(tokens), draw(tokens // 2)
    for count in (1, 3, 7):
        states = [draw(tokens) for _ in range(count)]
        want = double(states[0])
        for state in states[1:]:
            reference.merge_states(want, double(state), want)
        yield from compare_both(f"merge_many of {count}", merge_many(states), want)
    merged, expected = merge_states(a, b), reference.merge_states(double(a), double(b), double(a))
    yield from compare_both("merge_states", merged, expected)
    rows = inputs.order(tokens)[: tokens // 2]
    merge_rows(merged, rows, part)
    reference.merge_rows(expected, rows, double(part))
    yield from compare_both("merge_rows", merged, expected)
    yield compare(f"finalize, {heads}x{head_dim}", dtype, finalize(merged, dtype), expected.out)


def check_kv(bench: Bench, dtype: torch.dtype, heads: int, head_dim: int) -> Iterator[Check]:
    """Scatter and gather rows by slots, some of them -1."""
    inputs = Inputs(bench, dtype)
    tokens = bench.choose(1001, 7)
    k, v = (inputs.rows(tokens, heads, head_dim) for _ in range(2))
    caches = [torch.zeros(2 * tokens, heads, head_dim, dtype=dtype, device=bench.device) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    slots = inputs.order(2 * tokens)[:tokens]
    slots[::4] = -1
    save_kv(k, v, slots, caches[0], caches[1])
    reference.save_kv(k, v, slots, wanted[0], wanted[1])
    gathered = gather_kv(caches[0], caches[1], slots)
    for index, (name, rows) in enumerate((("k", k), ("v", v))):
        yield same(f"save_kv, {heads}x{head_dim}: {name}", caches[index], wanted[index])
        yield same(f"gather_kv, {heads}x{head_dim}: {name}", gathered[index], rows * (slots >= 0)[:, None, None])


def check_elementwise(bench: Bench, dtype: torch.dtype, heads: int, head_dim: int) -> Iterator[Check]:
    """Norm, rotary embedding in its three forms, and both activations."""
    inputs = Inputs(bench, dtype)
    tokens, hidden = bench.choose(1001, 7), heads * head_dim
    x, residual, weight = inputs.rows(tokens, hidden), inputs.rows(tokens, hidden), inputs.rows(hidden)
    stream, stream_64 = residual.clone(), (residual + x).double()
    actual = rms_norm(x, weight, 1e-5, residual=stream)
    # The stream is kept in its dtype, so the float64 expectation starts from what was kept.
    wide = torch.empty(tokens, hidden, dtype=torch.float64, device=bench.device)
    reference.rms_norm(stream_64, weight.double(), 1e-5, residual=None, out=wide)
    yield compare(f"rms_norm of {hidden}: residual", dtype, stream, stream_64)
    yield compare(f"rms_norm of {hidden} with residual", dtype, actual, wide)
    reference.rms_norm(x.double(), weight.double(), 1e-5, residual=None, out=wide)
    yield compare(f"rms_norm of {hidden}", dtype, rms_norm(x, weight, 1e-5), wide)

    positions = inputs.order(4 * tokens)[:tokens]
    for rotary_dim, interleaved in ((head_dim, False), (head_dim // 2, False), (head_dim // 2, True), (head_dim, True)):
        angles = inputs.rows(4 * tokens, rotary_dim // 2, dtype=torch.float32) * 3
        q = inputs.rows(tokens, heads, head_dim)
        expected = q.double()
        tables = angles.cos(), angles.sin()
        reference.apply_rope(expected, tables[0].double(), tables[1].double(), positions, interleaved=interleaved)
        apply_rope(q, tables[0], tables[1], positions, rotary_dim=rotary_dim, interleaved=interleaved)
        yield compare(f"apply_rope {rotary_dim} of {head_dim}{', interleaved' * interleaved}", dtype, q, expected)

    # Far enough out that a naive exp overflows.
    gated = inputs.rows(tokens, 2 * hidden) * 30
    yield compare(f"silu_and_mul of {hidden}", dtype, silu_and_mul(gated), reference.silu_and_mul(gated.double(), wide))
    forms: tuple[Literal["none", "tanh"], ...] = ("none", "tanh")
    for form in forms:
        expected = reference.gelu_and_mul(gated.double(), wide, approximate=form)
        yield compare(f"gelu_and_mul {form}", dtype, gelu_and_mul(gated, approximate=form), expected)


def _layer(
    plans: tuple[StripedPlan, PagedPlan],
    x: Tensor,
    weight: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Call every function once, as a decoder layer might."""
    residual = x.clone()
    positions = torch.arange(len(x), device=x.device)
    x = rms_norm(x, weight, 1e-5, residual=residual)
    q, k, v = (part.contiguous() for part in x.view(-1, 8, 64).split([4, 2, 2], dim=1))
    apply_rope(q, tables[0], tables[1], positions)
    apply_rope(k, tables[0], tables[1], positions)
    local, resident = (AttentionState.empty(len(q), 4, 64, x.device) for _ in range(2))
    striped_attention(plans[0], q, k, v, local, scale=0.125, save=KVSave(slots, *caches), soft_cap=20.0)
    paged_attention(plans[1], q, *caches, resident, scale=0.125)
    merged = merge_many([local, resident, merge_states(local, resident)])
    merge_rows(merged, positions[:2], AttentionState(local.out[:2], local.lse[:2]))
    gathered, _ = gather_kv(*caches, slots)
    save_kv(gathered, gathered, slots, *caches)
    out = finalize(merged, x.dtype).flatten(1)
    return silu_and_mul(out) + gelu_and_mul(out, approximate="tanh"), merged.lse


def check_compiled(bench: Bench) -> Iterator[Check]:
    """Compile a layer into one graph, and run it with plans of other lengths: it gives what the functions give."""
    import loongserve.kernels.torch_ops  # noqa: F401 (registers the operators)

    inputs = Inputs(bench, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(_layer, fullgraph=True, backend=bench.choose("inductor", "aot_eager"))
    angles = inputs.rows(20, 32)
    weight = torch.ones(512, device=bench.device)
    for tokens in (5, 5, 7):
        slots = inputs.order(20)[:tokens]
        shape = inputs.shape((4, 2, 64))
        plans = (
            plan_striped_attention([0, tokens], [0, tokens], [0], **shape),
            plan_paged_attention([0, tokens], [slots], **shape),
        )
        x, caches = inputs.rows(tokens, 512), inputs.rows(2, 20, 2, 64)
        results = []
        for run, pool in ((_layer, caches.clone()), (compiled, caches.clone())):
            outputs = run(plans, x, weight, (pool[0], pool[1]), slots, (angles.cos(), angles.sin()))
            results.append((*outputs, pool))
        for name, actual, expected in zip(("out", "lse", "caches"), results[1], results[0], strict=True):
            yield compare(f"torch.compile, {tokens} tokens: {name}", torch.float32, actual, expected)


def check_graph(bench: Bench) -> Iterator[Check]:
    """Capture a layer's attention in a CUDA graph: it neither allocates nor waits, and a replay sees new inputs."""
    if bench.tiny:
        raise NotRun("needs a device: a CPU has no graphs to capture")
    inputs = Inputs(bench, torch.bfloat16)
    heads, tokens = (8, 2, 128), 300
    q, k, v = (inputs.rows(tokens, n, 128) for n in (8, 2, 2))
    caches = [inputs.rows(4000, 2, 128) for _ in range(2)]
    order = inputs.order(4000)
    striped_plan = plan_striped_attention([0, tokens], [0, tokens], [0], **inputs.shape(heads))
    paged_plan = plan_paged_attention([0, tokens], [order[tokens:]], **inputs.shape(heads))
    local, resident = (AttentionState.empty(tokens, 8, 128, bench.device) for _ in range(2))
    out = torch.empty_like(q)

    def run() -> None:
        local.out.zero_()
        local.lse.fill_(-math.inf)
        save = KVSave(order[:tokens], caches[0], caches[1])
        striped_attention(striped_plan, q, k, v, local, scale=0.1, save=save)
        paged_attention(paged_plan, q, caches[0], caches[1], resident, scale=0.1)
        finalize(merge_states(local, resident, local), q.dtype, out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    q.copy_(inputs.rows(*q.shape))
    graph.replay()
    replayed = out.clone()
    run()
    yield same("CUDA graph of striped, paged and merged attention", replayed, out)


def check_flash_attn(bench: Bench, dtype: torch.dtype) -> Iterator[Check]:
    """Run blocks and rings with flash-attn as the provider of the dense step."""
    if find_spec("flash_attn") is None:
        raise NotRun("flash-attn is not installed: pip install 'loongserve[flash-attn]'")
    if bench.tiny:
        raise NotRun("flash-attn needs a device")
    with environment(LOONG_KERNELS="flash-attn"):
        for heads in ((9, 3, 64), (32, 8, 128), (4, 2, 256)):
            yield from check_ring(bench, dtype, heads, 1)
            yield from check_ring(bench, dtype, heads, 3)
            yield from check_block(bench, dtype, heads)
