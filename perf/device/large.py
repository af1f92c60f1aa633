"""Tensors of more than 2^31 elements: every address must be computed in 64 bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from device.attention import compare_states, masked_state
from device.bench import Bench, Inputs, cumulated
from device.results import Check, compare, same
from loongserve.kernels import reference
from loongserve.kernels.activation import silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

DTYPE = torch.bfloat16


def rows_beyond(bench: Bench, row_elements: int) -> int:
    """Answer how many rows have more than 2^31 elements (in the interpreter: a few thousand)."""
    return int(bench.choose(1 << 31, 1 << 12)) // row_elements + 64


def ends(rows: Tensor) -> Tensor:
    """Answer the first two and the last two rows, by views: torch's own indexing is not what is checked here."""
    return torch.cat([rows[:2], rows[-2:]])


def check_large_pool(bench: Bench) -> Iterator[Check]:
    """Store to both ends of a pool, by ``save_kv`` and by ``striped_attention``; gather and attend from there."""
    heads = bench.choose((32, 8, 128), (4, 2, 64))
    inputs = Inputs(bench, DTYPE)
    num_slots = rows_beyond(bench, heads[1] * heads[2])
    tokens = bench.choose(600, 12)
    bench.require_memory(2 * num_slots * heads[1] * heads[2] * DTYPE.itemsize + (1 << 28))
    caches = [torch.empty(num_slots, heads[1], heads[2], dtype=DTYPE, device=bench.device) for _ in range(2)]
    # Slots of the first and of the last places, mixed.
    ends = torch.cat([torch.arange(tokens), torch.arange(num_slots - tokens, num_slots)])
    slots = ends.to(bench.device)[inputs.order(2 * tokens)]
    k, v = (inputs.rows(2 * tokens, heads[1], heads[2]) for _ in range(2))
    save_kv(k[:tokens], v[:tokens], slots[:tokens], caches[0], caches[1])
    counts = [1, 1, bench.choose(70, 5)]
    cu_q, scale = cumulated(counts), heads[2] ** -0.5
    q = inputs.rows(tokens, heads[0], heads[2])
    plan = plan_striped_attention([0, tokens], [0, tokens], [0], **inputs.shape(heads))
    state = AttentionState.empty(*q.shape, bench.device)
    save = KVSave(slots[tokens:], caches[0], caches[1])
    striped_attention(plan, q, k[tokens:], v[tokens:], state, scale=scale, save=save)
    name = f"pool of {num_slots * heads[1] * heads[2]} elements"
    for which, rows, gathered in zip("kv", (k, v), gather_kv(caches[0], caches[1], slots), strict=True):
        yield same(f"{name}: {which} saved and gathered", gathered, rows)
    lengths = [tokens // 2, tokens // 2, tokens]
    paged = plan_paged_attention(cu_q, list(slots.split(lengths)), **inputs.shape(heads))
    q = q[: cu_q[-1]]
    state = paged_attention(paged, q, caches[0], caches[1], AttentionState.empty(*q.shape, bench.device), scale=scale)
    masks = [torch.ones(count, length, dtype=torch.bool) for count, length in zip(counts, lengths, strict=True)]
    expected = masked_state(cu_q, cumulated(lengths), masks, (q, k, v), scale)
    yield from compare_states(f"{name}: paged", DTYPE, state, expected)


def check_large_queries(bench: Bench) -> Iterator[Check]:
    """Attend with so many queries that they and their states have more than 2^31 elements each."""
    heads = bench.choose((32, 1, 128), (4, 1, 64))
    inputs = Inputs(bench, DTYPE)
    length = 64
    num_sequences = rows_beyond(bench, heads[0] * heads[2]) // length + 1
    tokens = num_sequences * length
    elements = tokens * heads[0] * heads[2]
    bench.require_memory(elements * (2 * DTYPE.itemsize + 4) + (1 << 28))
    q = inputs.fast_rows(tokens, heads[0], heads[2])
    k, v = (inputs.fast_rows(tokens, 1, heads[2]) for _ in range(2))
    begins = [i * length for i in range(num_sequences + 1)]
    plan = plan_striped_attention(begins, begins, [0] * num_sequences, **inputs.shape(heads))
    state = AttentionState.empty(*q.shape, bench.device)
    striped_attention(plan, q, k, v, state, scale=heads[2] ** -0.5)
    rounded = finalize(state, DTYPE)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for begin, end in list(pairwise(begins))[:: max(1, num_sequences - 1)]:
        part = q[begin:end], k[begin:end], v[begin:end]
        expected = masked_state([0, length], [0, length], [mask], part, heads[2] ** -0.5)
        name = f"{elements} elements of q: tokens {begin}-{end}"
        yield from compare_states(name, DTYPE, state.rows(begin, end), expected)
        yield compare(f"{name}: finalize", DTYPE, rounded[begin:end], expected.out)


def check_large_merge(bench: Bench) -> Iterator[Check]:
    """Merge states of more than 2^31 elements, in place."""
    heads, head_dim = bench.choose((32, 128), (4, 64))
    inputs = Inputs(bench, torch.float32)
    tokens = rows_beyond(bench, heads * head_dim)
    bench.require_memory(2 * tokens * heads * head_dim * 4 + (1 << 28))
    a, b = (
        AttentionState(inputs.fast_rows(tokens, heads, head_dim), inputs.fast_rows(tokens, heads)) for _ in range(2)
    )
    parts = [AttentionState(ends(state.out).double(), ends(state.lse).double()) for state in (a, b)]
    merge_states(a, b, a)
    expected = reference.merge_states(parts[0], parts[1], parts[0])
    name = f"merge_states of {tokens * heads * head_dim} elements"
    yield from compare_states(name, torch.float32, AttentionState(ends(a.out), ends(a.lse)), expected)


def check_large_elementwise(bench: Bench) -> Iterator[Check]:
    """Norm, rotary embedding and activation of more than 2^31 elements."""
    heads, head_dim = bench.choose((32, 128), (4, 64))
    inputs = Inputs(bench, DTYPE)
    hidden = heads * head_dim
    tokens = rows_beyond(bench, hidden) // 2 * 2
    bench.require_memory(3 * tokens * hidden * DTYPE.itemsize + (1 << 28))
    x, weight = inputs.fast_rows(tokens, hidden), inputs.rows(hidden)
    name = f"of {tokens * hidden} elements"

    wide = torch.empty(4, hidden, dtype=torch.float64, device=bench.device)
    reference.rms_norm(ends(x).double(), weight.double(), 1e-5, residual=None, out=wide)
    yield compare(f"rms_norm {name}", DTYPE, ends(rms_norm(x, weight, 1e-5)), wide)

    pairs = x.view(tokens // 2, 2 * hidden)
    expected = reference.silu_and_mul(ends(pairs).double(), wide)
    yield compare(f"silu_and_mul {name}", DTYPE, ends(silu_and_mul(pairs)), expected)

    q = x.view(tokens, heads, head_dim)
    angles = inputs.rows(50, head_dim // 2, dtype=torch.float32)
    positions = torch.arange(tokens, device=bench.device) % 50
    turned = ends(q).double()
    reference.apply_rope(turned, angles.cos().double(), angles.sin().double(), ends(positions))
    apply_rope(q, angles.cos(), angles.sin(), positions)
    yield compare(f"apply_rope {name}", DTYPE, ends(q), turned)
