"""Sliding windows, positions and soft caps: of striped attention by diagonals or positions, of paged by first slots."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.paged import first_visible_slots, paged_attention, plan_paged_attention
from loongserve.kernels.positional import plan_positional_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, stripe_bounds, striped_attention

FLOAT32 = torch.float32

# (query counts, key counts, diagonals, lower diagonals), (q heads, kv heads, head_dim), dtype, soft cap
STRIPED_CASES = [
    pytest.param(([1], [1], [0], [0]), (1, 1, 64), FLOAT32, None, id="itself"),
    pytest.param(([1, 1, 1], [1, 1, 1], [0, -1, 0], [-3, -3, 1]), (9, 3, 64), FLOAT32, 2.0, id="decode"),
    pytest.param(([90], [90], [0], [-9]), (2, 1, 64), FLOAT32, None, id="within_a_tile"),
    pytest.param(([80], [130], [0], [-50]), (2, 1, 80), FLOAT32, None, id="longer_than_a_tile"),
    pytest.param(([40, 0, 7], [99, 5, 0], [50, 0, 0], [20, 0, 0]), (3, 3, 64), FLOAT32, 5.0, id="before_and_after"),
    pytest.param(([9, 9, 9], [9, 9, 9], [0, -1, 0], [None, -1, -1 << 40]), (4, 2, 64), FLOAT32, None, id="some_bounds"),
    pytest.param(([9, 5], [9, 5], [0, 4], [1, 5]), (4, 2, 64), FLOAT32, None, id="nothing_between"),
    pytest.param(([11, 6], [11, 20], [-1, 1 << 40], [1 - 11, -2]), (28, 7, 128), torch.bfloat16, 1.0, id="bf16"),
    pytest.param(([12, 3, 1], [9, 4, 1], [0, -1, 0], None), (4, 1, 96), FLOAT32, 0.7, id="cap_alone"),
]


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def random_rows(tokens, heads, head_dim, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype).to(device)


def make_qkv(counts, heads, dtype, device):
    q_heads, kv_heads, head_dim = heads
    q = random_rows(sum(counts[0]), q_heads, head_dim, dtype, device, 0)
    k, v = (random_rows(sum(counts[1]), kv_heads, head_dim, dtype, device, seed) for seed in (1, 2))
    return q, k, v


def shape_of(heads, dtype, device):
    return {
        "num_q_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "dtype": dtype,
        "device": device,
    }


def masked_state(cu_q, cu_k, masks, q, k, v, scale, soft_cap=None):
    """Attend in float64 under the masks, by formulas of its own."""
    state = AttentionState.empty(*q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    spans = zip(pairwise(cu_q), pairwise(cu_k), masks, strict=True)
    for (q_begin, q_end), (k_begin, k_end), mask in spans:
        queries = q[q_begin:q_end].cpu().double().transpose(0, 1)
        keys, values = (t[k_begin:k_end].cpu().double().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
        scores = queries @ keys.transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~mask, -math.inf)
        state.out[q_begin:q_end] = (torch.softmax(scores, dim=-1).nan_to_num() @ values).transpose(0, 1)
        state.lse[q_begin:q_end] = scores.logsumexp(dim=-1).transpose(0, 1)
    return state


def band(num_q, num_k, upper, lower):
    ahead = torch.arange(num_k)[None, :] - torch.arange(num_q)[:, None]
    return (ahead <= upper) & (ahead >= (lower if lower is not None else -num_q))


@pytest.mark.parametrize(("lengths", "heads", "dtype", "soft_cap"), STRIPED_CASES)
def test_diagonals_agree_with_float64(lengths, heads, dtype, soft_cap, device, assert_state_close):
    q, k, v = make_qkv(lengths, heads, dtype, device)
    num_q, num_k, uppers, lowers = lengths
    cu_q, cu_k = cumulated(num_q), cumulated(num_k)
    plan = plan_striped_attention(cu_q, cu_k, uppers, lower_diagonals=lowers, **shape_of(heads, dtype, device))
    state = AttentionState.empty(len(q), heads[0], heads[2], device)
    scale = heads[2] ** -0.5
    slots = torch.arange(len(k), device=device).flip(0)
    save = KVSave(slots, torch.zeros_like(k), torch.zeros_like(v))
    striped_attention(plan, q, k, v, state, scale=scale, soft_cap=soft_cap, save=save)
    masks = [band(*each) for each in zip(num_q, num_k, uppers, lowers or [None] * len(num_q), strict=True)]
    assert_state_close(state, masked_state(cu_q, cu_k, masks, q, k, v, scale, soft_cap), dtype)
    assert torch.equal(save.k_cache.flip(0), k)


@pytest.mark.parametrize("provider", ["cpu", "triton"], indirect=True)
def test_keys_outside_the_window_are_not_read(device):
    """Tiles before the lower diagonal and after the upper are NaN here, and never visited."""
    q = torch.randn(8, 2, 64, device=device)
    k, v = torch.randn(300, 1, 64, device=device), torch.randn(300, 1, 64, device=device)
    k[:128], k[192:], v[:128], v[192:] = (torch.nan,) * 4
    shape = shape_of((2, 1, 64), FLOAT32, device)
    plan = plan_striped_attention([0, 8], [0, 300], [170], lower_diagonals=[140], **shape)
    state = AttentionState.empty(8, 2, 64, device)
    striped_attention(plan, q, k, v, state, scale=0.125)
    assert torch.isfinite(state.out).all()
    assert torch.isfinite(state.lse).all()


@pytest.mark.parametrize("dop", range(1, 9))
def test_stripe_bounds_are_those_of_the_positions(dop):
    """Against brute force, for all pairs of members and windows on both sides of the stride."""
    for query_first in range(dop):
        for key_first in range(-dop, 2 * dop):
            for window in (None, 1, 2, dop, dop + 1, 3 * dop - 1, 100):
                upper, lower = stripe_bounds(query_first, key_first, dop, window)
                assert (lower is None) == (window is None)
                distance = (query_first + torch.arange(9) * dop)[:, None] - (key_first + torch.arange(11) * dop)
                expected = distance >= 0 if window is None else (distance >= 0) & (distance < window)
                assert torch.equal(band(9, 11, upper, lower), expected), (query_first, key_first, window)


def test_any_striping_of_a_window_equals_one_pass(device, max_examples, assert_state_close):
    @settings(max_examples=max_examples // 2)
    @given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 7), st.integers(1, 35))
    def check(dop, length, rotation, window):
        heads = (3, 1, 64)
        q, k, v = make_qkv(([length], [length]), heads, FLOAT32, device)
        result = AttentionState.empty(length, 3, 64, device)
        members = [[t for t in range(length) if (t + rotation) % dop == member] for member in range(dop)]
        for mine in members:
            state = AttentionState.empty(len(mine), 3, 64, device)
            for theirs in members:
                upper, lower = stripe_bounds(*(each[0] if each else 0 for each in (mine, theirs)), dop, window)
                cu_q, cu_k = [0, len(mine)], [0, len(theirs)]
                shape = shape_of(heads, FLOAT32, device)
                plan = plan_striped_attention(cu_q, cu_k, [upper], lower_diagonals=[lower], **shape)
                striped_attention(plan, q[mine], k[theirs], v[theirs], state, scale=0.125)
            result.out[mine], result.lse[mine] = state.out, state.lse
        mask = band(length, length, 0, 1 - window)
        assert_state_close(result, masked_state([0, length], [0, length], [mask], q, k, v, 0.125))

    check()


# Positions of queries and keys, sequence by sequence.
POSITION_CASES = [
    pytest.param([([5, 3, 9], [9, 1, 7, 3])], id="any_order"),
    pytest.param([([4], [4]), ([], [3]), ([2], []), ([0, 1], [7, 9])], id="few"),
    pytest.param([([6, 6, 0], [6, 6, 2, -4])], id="twice_and_negative"),
    pytest.param([(list(range(60, 0, -1)), [*range(0, 90, 3), *range(1, 50)])], id="longer_than_a_tile"),
    pytest.param([([1 << 40, (1 << 40) + 7], [(1 << 40) - 6, 3])], id="beyond_32_bits"),
]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, 3.0)], ids=["all_before", "window_and_cap"])
@pytest.mark.parametrize("positions", POSITION_CASES)
def test_positions_agree_with_float64(positions, window, soft_cap, device, assert_state_close):
    heads = (4, 2, 64)
    counts = [len(queries) for queries, _ in positions], [len(keys) for _, keys in positions]
    cu_q, cu_k = cumulated(counts[0]), cumulated(counts[1])
    q, k, v = make_qkv(counts, heads, FLOAT32, device)
    packed = [torch.tensor([p for each in positions for p in each[i]], dtype=torch.int64) for i in range(2)]
    plan = plan_positional_attention(cu_q, cu_k, *packed, window=window, **shape_of(heads, FLOAT32, device))
    state = AttentionState.empty(len(q), 4, 64, device)
    striped_attention(plan, q, k, v, state, scale=0.125, soft_cap=soft_cap)
    masks = []
    for queries, keys in positions:
        distance = torch.tensor(queries, dtype=torch.int64)[:, None] - torch.tensor(keys, dtype=torch.int64)
        masks.append((distance >= 0) & (distance < (window or 1 << 60)))
    assert_state_close(state, masked_state(cu_q, cu_k, masks, q, k, v, 0.125, soft_cap))


def test_positions_of_stripes_are_planned_as_diagonals():
    shape = shape_of((4, 2, 64), FLOAT32, "cpu")
    queries, keys = torch.tensor([1, 4, 7, 10]), torch.tensor([2, 5, 8, 20])
    plan = plan_positional_attention([0, 3, 4], [0, 3, 4], queries, keys, window=4, **shape)
    assert plan.diagonals == (-1, -10)
    assert plan.lower_diagonals == (-1, -13)
    assert plan_positional_attention([0, 4], [0, 4], queries, keys, **shape).diagonals == ()


# (query counts, slot counts), first slots seen, (q heads, kv heads, head_dim), dtype, soft cap
PAGED_CASES = [
    pytest.param(([1], [1]), [0], (1, 1, 64), FLOAT32, 4.0, id="one_slot"),
    pytest.param(([1, 1, 1], [70, 0, 5]), [60, 0, 5], (9, 3, 64), FLOAT32, None, id="decode"),
    pytest.param(([1] * 5, [30, 41, 28, 60, 59]), [0, 20, 3, 4, 58], (9, 3, 64), FLOAT32, 1.0, id="like_lengths"),
    pytest.param(([3, 0, 2], [9, 4, 6]), [2, 9, 4, 1, 1], (4, 4, 64), FLOAT32, None, id="in_any_order"),
    pytest.param(([40], [90]), [*range(50, 90)], (2, 1, 80), FLOAT32, None, id="longer_than_a_tile"),
    pytest.param(([1], [600]), [530], (8, 1, 64), FLOAT32, 5.0, id="skips_parts"),
    pytest.param(([5, 1], [40, 40]), [0, 7, 7, 40, 39, 25], (28, 7, 128), torch.bfloat16, 2.0, id="bf16"),
]


@pytest.mark.parametrize(("lengths", "firsts", "heads", "dtype", "soft_cap"), PAGED_CASES)
def test_first_slots_agree_with_float64(lengths, firsts, heads, dtype, soft_cap, device, nan_state, assert_state_close):
    """Slots that no query of a request sees are NaN."""
    counts, slot_counts = lengths
    cu_q, cu_k = cumulated(counts), cumulated(slot_counts)
    q, k, v = make_qkv(lengths, heads, dtype, device)
    order = torch.randperm(len(k) + 9, generator=torch.Generator().manual_seed(3))[: len(k)]
    pool = [torch.full((len(k) + 9, *k.shape[1:]), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    first = torch.tensor(firsts, dtype=torch.int64)
    masks = []
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        mask = torch.arange(k_end - k_begin) >= first[q_begin:q_end, None]
        seen = k_begin + mask.any(dim=0).nonzero().squeeze(1)
        pool[0][order[seen].to(device)], pool[1][order[seen].to(device)] = k[seen], v[seen]
        masks.append(mask)
    slots = list(order.split(slot_counts))
    plan = plan_paged_attention(cu_q, slots, first_visible=first, **shape_of(heads, dtype, device))
    out = nan_state(len(q), heads[0], heads[2])
    scale = heads[2] ** -0.5
    paged_attention(plan, q, *pool, out, scale=scale, soft_cap=soft_cap)
    assert_state_close(out, masked_state(cu_q, cu_k, masks, q, k, v, scale, soft_cap), dtype)


@pytest.mark.parametrize("window", [1, 5, 100])
def test_first_visible_slots_reach_as_far_as_the_window(window):
    generator = torch.Generator().manual_seed(window)
    slots = torch.randperm(60, generator=generator)[:25].sort().values
    queries = torch.randint(60, 90, (12,), generator=generator)
    first = first_visible_slots(queries, slots, window)
    mask = queries[:, None] - slots < window
    assert torch.equal(torch.arange(25) >= first[:, None], mask)


# NumPy under Triton's interpreter says so where exp2 is infinite, which is right: tanh is 1 there.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_cap_of_large_scores(device, nan_state, assert_state_close):
    """Scores far beyond the cap become the cap, of either sign, and not NaN."""
    heads = (3, 1, 64)
    q, k, v = make_qkv(([6], [40]), heads, FLOAT32, device)
    expected = masked_state([0, 6], [0, 40], [torch.ones(6, 40, dtype=torch.bool)], q, k, v, 1000.0, 3.0)
    shape = shape_of(heads, FLOAT32, device)
    state = AttentionState.empty(6, 3, 64, device)
    striped_attention(plan_striped_attention([0, 6], [0, 40], [40], **shape), q, k, v, state, scale=1e3, soft_cap=3.0)
    assert_state_close(state, expected)
    plan = plan_paged_attention([0, 6], [torch.arange(40)], **shape)
    assert_state_close(paged_attention(plan, q, k, v, nan_state(6, 3, 64), scale=1e3, soft_cap=3.0), expected)


def test_a_cap_without_effect_is_no_cap(device, assert_state_close):
    heads = (2, 1, 64)
    q, k, v = make_qkv(([5], [5]), heads, FLOAT32, device)
    plan = plan_striped_attention([0, 5], [0, 5], [0], **shape_of(heads, FLOAT32, device))
    state = AttentionState.empty(5, 2, 64, device)
    striped_attention(plan, q, k, v, state, scale=0.01, soft_cap=30.0)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    assert_state_close(state, reference.attend(q.cpu(), k.cpu(), v.cpu(), visible, 0.01, torch.float64), torch.float16)


def test_refuses_what_does_not_fit():
    shape = shape_of((4, 2, 64), FLOAT32, "cpu")
    with pytest.raises(ValueError, match="expected 1 lower_diagonals, one a sequence, got 2"):
        plan_striped_attention([0, 1], [0, 1], [0], lower_diagonals=[0, 0], **shape)
    with pytest.raises(ValueError, match="window must be at least 1"):
        stripe_bounds(0, 0, 2, 0)
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        stripe_bounds(0, 0, 0)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"key_positions must have shape \[2\], got \[1\]"):
        plan_positional_attention([0, 1], [0, 2], one, one, **shape)
    with pytest.raises(ValueError, match="window must be at least 1"):
        plan_positional_attention([0, 1], [0, 1], one, one, window=0, **shape)
    with pytest.raises(ValueError, match="window must be at least 1"):
        first_visible_slots(one, one, 0)
    slots = [torch.arange(3)]
    with pytest.raises(ValueError, match=r"first_visible must have shape \[1\], got \[2\]"):
        plan_paged_attention([0, 1], slots, first_visible=torch.zeros(2, dtype=torch.int64), **shape)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"from 0 to the number of the request's slots, got {wrong} for query 0"):
            plan_paged_attention([0, 1], slots, first_visible=one + wrong, **shape)
    q, cache = torch.zeros(1, 4, 64), torch.zeros(3, 2, 64)
    state = AttentionState.empty(1, 4, 64)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="soft_cap must be positive"):
            paged_attention(
                plan_paged_attention([0, 1], slots, **shape), q, cache, cache, state, scale=1.0, soft_cap=cap
            )
        plan = plan_striped_attention([0, 1], [0, 3], [0], **shape)
        with pytest.raises(ValueError, match="soft_cap must be positive"):
            striped_attention(plan, q, cache, cache, state, scale=1.0, soft_cap=cap)
