"""Speed of what is bound by memory, in GB/s beside a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from device.bench import Bench, Inputs
from device.results import Result, Speed
from device.timing import copy_gb_per_s, median_ms
from loongserve.kernels.activation import gelu_and_mul, silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState


def speed_layer(bench: Bench, dtype: torch.dtype) -> Iterator[Result]:
    """Measure every function but attention on tensors far larger than the cache."""
    inputs = Inputs(bench, dtype)
    tokens, heads, head_dim = bench.choose((32768, 32, 128), (8, 2, 64))
    hidden = heads * head_dim
    bench.require_memory(tokens * hidden * (14 * dtype.itemsize + 16) + (2 << 30))
    x, residual, out = (inputs.fast_rows(tokens, hidden) for _ in range(3))
    weight, wide = inputs.rows(hidden), inputs.fast_rows(tokens, 2 * hidden)
    q = inputs.fast_rows(tokens, heads, head_dim)
    tables = [inputs.rows(tokens, head_dim // 2, dtype=torch.float32) for _ in range(2)]
    order = inputs.order(tokens)
    k, v, k_cache, v_cache = (inputs.fast_rows(tokens, heads, head_dim) for _ in range(4))
    states = [AttentionState.empty(tokens, heads, head_dim, bench.device) for _ in range(4)]
    for state in states:
        state.lse.zero_()
    a, b = states[0], states[1]
    half = AttentionState(b.out[: tokens // 2], b.lse[: tokens // 2])
    state_bytes = a.out.nbytes
    runs: list[tuple[str, Callable[[], object], int]] = [
        ("rms_norm", lambda: rms_norm(x, weight, 1e-5, out=out), 2 * x.nbytes),
        ("rms_norm with residual", lambda: rms_norm(x, weight, 1e-5, residual=residual, out=out), 4 * x.nbytes),
        ("silu_and_mul", lambda: silu_and_mul(wide, out), 3 * out.nbytes),
        ("gelu_and_mul", lambda: gelu_and_mul(wide, out), 3 * out.nbytes),
        ("apply_rope", lambda: apply_rope(q, tables[0], tables[1], order), 2 * q.nbytes + 2 * tables[0].nbytes),
        ("save_kv", lambda: save_kv(k, v, order, k_cache, v_cache), 4 * k.nbytes),
        ("gather_kv", lambda: gather_kv(k_cache, v_cache, order, out=(k, v)), 4 * k.nbytes),
        ("merge_states", lambda: merge_states(a, b, a), 3 * state_bytes),
        ("merge_many of 4", lambda: merge_many(states, a), 5 * state_bytes),
        ("merge_rows of half", lambda: merge_rows(a, order[: tokens // 2], half), 3 * state_bytes // 2),
        ("finalize", lambda: finalize(a, dtype, q), state_bytes + q.nbytes),
    ]
    for name, run, num_bytes in runs:
        milliseconds = median_ms(bench, run)
        value = num_bytes / milliseconds / 1e6
        yield Speed(f"{name}, {tokens} rows of {hidden}", milliseconds, value, "GB/s", {"copy": copy_gb_per_s(bench)})
