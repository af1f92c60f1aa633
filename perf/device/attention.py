"""Striped and paged attention against float64: rings, odd bounds, positions, windows, caps, saves, splits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from device.bench import Bench, Heads, Inputs, cumulated, name_of
from device.results import Check, compare, same, within
from loongserve.kernels import reference
from loongserve.kernels.merge import finalize
from loongserve.kernels.paged import first_visible_slots, paged_attention, plan_paged_attention
from loongserve.kernels.positional import plan_positional_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, stripe_bounds, striped_attention


def masked_state(
    cu_q: list[int],
    cu_k: list[int],
    masks: list[Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    soft_cap: float | None = None,
) -> AttentionState:
    """Answer the float64 state of packed sequences, each with a mask [queries, keys] of what is visible."""
    q, k, v = qkv
    state = AttentionState.empty(*q.shape, q.device, torch.float64)
    for mask, (q_begin, q_end), (k_begin, k_end) in zip(masks, pairwise(cu_q), pairwise(cu_k), strict=True):
        part = reference.attend(
            q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end], mask.to(q.device), scale, torch.float64, soft_cap
        )
        state.out[q_begin:q_end], state.lse[q_begin:q_end] = part.out, part.lse
    return state


def compare_states(name: str, dtype: torch.dtype, actual: AttentionState, expected: AttentionState) -> Iterator[Check]:
    """Compare output and LSE."""
    yield compare(f"{name}: out", dtype, actual.out, expected.out)
    yield compare(f"{name}: lse", dtype, actual.lse, expected.lse)


def run_ring(
    inputs: Inputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: list[int],
    dop: int,
    window: int | None = None,
    soft_cap: float | None = None,
    savers: Tensor | None = None,
) -> tuple[AttentionState, list[tuple[Tensor, Tensor, Tensor]]]:
    """Run every step of every member of a ring, one after the other.

    Args:
        inputs: where the slots come from.
        qkv: packed sequences of ``lengths``; token t of sequence i falls to member (t + i) mod dop.
        lengths: of the sequences.
        dop: members.
        window: positions that a query sees.
        soft_cap: bound of the scores.
        savers: [tokens] the member that saves each token; ``dop``: none. None: nothing is saved.

    Returns:
        The state of all tokens, and each member's (tokens that it saves, their slots, its K and V cache), where the
        other slots are NaN.
    """
    q, k, v = qkv
    heads = (q.shape[1], k.shape[1], q.shape[2])
    begins = cumulated(lengths)
    members = []
    for member in range(dop):
        firsts = [(member - i) % dop for i in range(len(lengths))]
        # Where a sequence is too short for this member, the stripe is empty.
        stripes = [
            torch.arange(min(begin + first, end), end, dop)
            for first, (begin, end) in zip(firsts, pairwise(begins), strict=True)
        ]
        members.append((firsts, cumulated([len(s) for s in stripes]), torch.cat(stripes).to(q.device)))
    result = AttentionState.empty(*q.shape, q.device)
    saved = []
    for member, (firsts, cu_q, mine) in enumerate(members):
        state = AttentionState.empty(len(mine), heads[0], heads[2], q.device)
        slots = torch.full((len(k),), -1, device=q.device)
        cache = torch.full((2, len(k) + 9, *k.shape[1:]), torch.nan, dtype=k.dtype, device=k.device)
        if savers is not None:
            tokens = (savers == member).nonzero().squeeze(1).to(q.device)
            slots[tokens] = inputs.order(len(k) + 9)[: len(tokens)]
        for step in range(dop):
            source = (member - step) % dop
            source_firsts, cu_k, theirs = members[source]
            bounds = [stripe_bounds(a, b, dop, window) for a, b in zip(firsts, source_firsts, strict=True)]
            plan = plan_striped_attention(
                cu_q,
                cu_k,
                [upper for upper, _ in bounds],
                lower_diagonals=[lower for _, lower in bounds],
                **inputs.shape(heads),
            )
            save = None
            if bool((slots[theirs] >= 0).any()):
                save = KVSave(slots[theirs], cache[0], cache[1])
            striped_attention(
                plan, q[mine], k[theirs], v[theirs], state, scale=heads[2] ** -0.5, save=save, soft_cap=soft_cap
            )
        result.out[mine], result.lse[mine] = state.out, state.lse
        saved.append(((slots >= 0).nonzero().squeeze(1), slots[slots >= 0], cache))
    return result, saved


def check_ring(
    bench: Bench, dtype: torch.dtype, heads: Heads, dop: int, window: int | None = None, soft_cap: float | None = None
) -> Iterator[Check]:
    """Run a ring with selective save over sequences of every kind of length, and compare with one pass."""
    inputs = Inputs(bench, dtype)
    lengths = [0, 1, bench.choose(700, 20), 5, dop, max(1, dop - 1), bench.choose(129, 9)]
    total = sum(lengths)
    q, k, v = (inputs.rows(total, n, heads[2]) for n in (heads[0], heads[1], heads[1]))
    # Runs of three tokens an instance, and some that none keeps.
    savers = torch.arange(total) // 3 % (dop + 1)
    state, saved = run_ring(inputs, (q, k, v), lengths, dop, window, soft_cap, savers)
    masks = []
    for length in lengths:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        masks.append((distance >= 0) & (distance < (window or length + 1)))
    begins = cumulated(lengths)
    expected = masked_state(begins, begins, masks, (q, k, v), heads[2] ** -0.5, soft_cap)
    name = f"ring of {dop}, {name_of(heads)}, window {window}, soft cap {soft_cap}"
    yield from compare_states(name, dtype, state, expected)
    for member, (tokens, slots, cache) in enumerate(saved):
        yield same(f"{name}: member {member} saved k", cache[0, slots], k[tokens])
        yield same(f"{name}: member {member} saved v", cache[1, slots], v[tokens])
        written = torch.isfinite(cache).flatten(2).any(dim=2).sum(dim=1).cpu()
        yield same(f"{name}: member {member} wrote no other slot", written, torch.tensor([len(tokens)] * 2))


def check_block(
    bench: Bench, dtype: torch.dtype, heads: Heads, banded: bool = False, soft_cap: float | None = None
) -> Iterator[Check]:
    """Run two blocks over one state: unequal lengths, any diagonals, q, k and v as views of one product."""
    inputs = Inputs(bench, dtype)
    long = bench.choose(700, 24)
    counts, key_counts = [0, 1, long, 5, 7, 3, 6], [3, 1, long + 2, 5, 0, 50, 9]
    uppers = [0, -1, 0, -1, 0, 1 << 40, -(1 << 40)]
    lowers = [None, -9, -long // 3, None, 0, 4, None] if banded else None
    cu_q, cu_k = cumulated(counts), cumulated(key_counts)
    plan = plan_striped_attention(cu_q, cu_k, uppers, lower_diagonals=lowers, **inputs.shape(heads))
    rows = max(cu_q[-1], cu_k[-1])
    masks = []
    for index, (num_q, num_k) in enumerate(zip(counts, key_counts, strict=True)):
        ahead = torch.arange(num_k) - torch.arange(num_q)[:, None]
        lower = lowers[index] if lowers else None
        masks.append((ahead <= uppers[index]) & (ahead >= (-(1 << 41) if lower is None else lower)))
    state = AttentionState.empty(cu_q[-1], heads[0], heads[2], bench.device)
    parts = []
    for _ in range(2):
        fused = inputs.rows(rows, heads[0] + 2 * heads[1], heads[2])
        q, k, v = fused.split([heads[0], heads[1], heads[1]], dim=1)
        q, k, v = q[: cu_q[-1]], k[: cu_k[-1]], v[: cu_k[-1]]
        striped_attention(plan, q, k, v, state, scale=heads[2] ** -0.5, soft_cap=soft_cap)
        parts.append(masked_state(cu_q, cu_k, masks, (q, k, v), heads[2] ** -0.5, soft_cap))
    expected = reference.merge_states(parts[0], parts[1], parts[0])
    name = f"blocks, {name_of(heads)}, {'bands' if banded else 'diagonals'}, soft cap {soft_cap}"
    yield from compare_states(name, dtype, state, expected)


def check_positions(bench: Bench, dtype: torch.dtype, heads: Heads, window: int | None) -> Iterator[Check]:
    """Attend by positions that are no stripes: random order, duplicates, negative, beyond 32 bits."""
    inputs = Inputs(bench, dtype)
    long = bench.choose(500, 40)
    packed = [
        (torch.randperm(2 * long, generator=torch.Generator().manual_seed(n))[: long + n] - long // 3)
        for n in range(1, 3)
    ]
    far = (torch.tensor([1 << 40, (1 << 40) + 7]), torch.tensor([(1 << 40) - 6, 3, 3]))
    pairs = [(packed[0], packed[1]), (torch.arange(0), torch.tensor([3])), (torch.tensor([4, 4]), torch.arange(0)), far]
    cu_q, cu_k = (cumulated([len(pair[i]) for pair in pairs]) for i in range(2))
    q = inputs.rows(cu_q[-1], heads[0], heads[2])
    k, v = (inputs.rows(cu_k[-1], heads[1], heads[2]) for _ in range(2))
    queries, keys = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    plan = plan_positional_attention(cu_q, cu_k, queries, keys, window=window, **inputs.shape(heads))
    state = AttentionState.empty(*q.shape, bench.device)
    striped_attention(plan, q, k, v, state, scale=heads[2] ** -0.5)
    masks = []
    for query, key in pairs:
        distance = query[:, None] - key
        masks.append((distance >= 0) & (distance < (window or 1 << 60)))
    name = f"positions, {name_of(heads)}, window {window}"
    yield from compare_states(name, dtype, state, masked_state(cu_q, cu_k, masks, (q, k, v), heads[2] ** -0.5))


def check_paged(
    bench: Bench,
    dtype: torch.dtype,
    heads: Heads,
    counts: list[int],
    lengths: list[int],
    window: int | None = None,
    soft_cap: float | None = None,
) -> Iterator[Check]:
    """Attend to slots in random order in a pool that is NaN wherever no query may look."""
    inputs = Inputs(bench, dtype)
    cu_q, cu_k = cumulated(counts), cumulated(lengths)
    num_slots = cu_k[-1] + 31
    used = inputs.order(num_slots)[: cu_k[-1]]
    q = inputs.rows(cu_q[-1], heads[0], heads[2])
    k, v = (inputs.rows(cu_k[-1], heads[1], heads[2]) for _ in range(2))
    caches = [torch.full((num_slots, *k.shape[1:]), torch.nan, dtype=dtype, device=bench.device) for _ in range(2)]
    # New tokens follow what is resident.
    firsts = [
        torch.zeros(count, dtype=torch.int64)
        if window is None
        else first_visible_slots(torch.arange(length, length + count), torch.arange(length), window)
        for count, length in zip(counts, lengths, strict=True)
    ]
    masks = [torch.arange(length) >= first[:, None] for first, length in zip(firsts, lengths, strict=True)]
    seen = torch.cat([mask.any(dim=0) for mask in masks]).to(bench.device)
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[used[seen]] = rows[seen]
    plan = plan_paged_attention(
        cu_q,
        list(used.split(lengths)),
        first_visible=None if window is None else torch.cat(firsts),
        **inputs.shape(heads),
    )
    state = AttentionState(
        torch.full(q.shape, torch.nan, device=bench.device), torch.full(q.shape[:2], torch.nan, device=bench.device)
    )
    paged_attention(plan, q, *caches, state, scale=heads[2] ** -0.5, soft_cap=soft_cap)
    expected = masked_state(cu_q, cu_k, masks, (q, k, v), heads[2] ** -0.5, soft_cap)
    queries = f"{len(counts)} requests of {min(counts)}-{max(counts)} queries and {min(lengths)}-{max(lengths)} slots"
    name = f"paged, {name_of(heads)}, {queries}, window {window}, soft cap {soft_cap}"
    yield from compare_states(name, dtype, state, expected)


def check_error_beside_sdpa(bench: Bench, dtype: torch.dtype, heads: Heads) -> Iterator[Check]:
    """Compare the error of rings with that of torch's SDPA in the same dtype, which it must not exceed by half."""
    inputs = Inputs(bench, dtype)
    tokens = bench.choose(1500, 26)
    q, k, v = (inputs.rows(tokens, n, heads[2]) for n in (heads[0], heads[1], heads[1]))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    exact = masked_state([0, tokens], [0, tokens], [mask], (q, k, v), heads[2] ** -0.5).out
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
    sdpa_error = float((theirs[0].transpose(0, 1).double() - exact).norm())
    for dop in bench.choose((1, 2, 4, 8), (1, 4)):
        state, _ = run_ring(inputs, (q, k, v), [tokens], dop)
        error = float((finalize(state, dtype).double() - exact).norm())
        yield within(f"ring of {dop}, {name_of(heads)}: error by SDPA's", dtype, error / sdpa_error, 1.5)
