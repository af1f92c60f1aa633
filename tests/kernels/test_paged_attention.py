"""paged_attention: queries over slots anywhere in a pool."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.merge import merge_states
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState

FLOAT32 = torch.float32

# (query counts, slot counts), (q heads, kv heads, head_dim), dtype
CASES = [
    pytest.param(([1], [1]), (1, 1, 64), FLOAT32, id="one_slot"),
    pytest.param(([1, 1, 1], [70, 0, 5]), (9, 3, 64), FLOAT32, id="decode"),
    pytest.param(([1] * 7, [30, 41, 0, 60, 59, 1, 2]), (9, 3, 64), FLOAT32, id="decode_of_like_lengths"),
    pytest.param(([0, 2, 0], [3, 0, 0]), (4, 4, 64), FLOAT32, id="empty_members"),
    pytest.param(([0], [0]), (4, 2, 64), FLOAT32, id="nothing"),
    pytest.param(([1], [0]), (4, 2, 64), FLOAT32, id="no_slots"),
    pytest.param(([19, 1, 3], [33, 64, 129]), (28, 7, 128), FLOAT32, id="many_queries"),
    pytest.param(([150], [21]), (2, 1, 96), FLOAT32, id="longer_than_a_tile"),
    pytest.param(([1], [700]), (8, 1, 256), FLOAT32, id="mqa_wide_head"),
    pytest.param(([1, 2], [300, 17]), (9, 3, 64), torch.bfloat16, id="bf16"),
    pytest.param(([1, 1, 1], [20, 31, 17]), (28, 7, 128), torch.bfloat16, id="bf16_decode_of_like_lengths"),
    pytest.param(([5, 1], [40, 40]), (4, 4, 80), torch.float16, id="f16"),
]


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def make_pool(num_slots, heads, dtype, device, seed=0):
    """Make a pool of NaN."""
    return tuple(torch.full((num_slots, heads[1], heads[2]), torch.nan, dtype=dtype, device=device) for _ in range(2))


def scattered(counts, num_slots, seed=0):
    """Deal out distinct slots in random order."""
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return list(order[: sum(counts)].split(counts)) if counts else []


def fill(pool, slots, seed=1):
    """Write random K and V to the slots, the same for the same seed and counts wherever the slots are."""
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = pool
    for request_slots in slots:
        shape = (len(request_slots), *k_cache.shape[1:])
        k_cache[request_slots] = torch.randn(shape, generator=generator).to(k_cache)
        v_cache[request_slots] = torch.randn(shape, generator=generator).to(v_cache)


def make_queries(counts, heads, dtype, device, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(counts), heads[0], heads[2], generator=generator).to(dtype).to(device)


def run(counts, slots, heads, dtype, device, q, pool, out, scale):
    plan = plan_paged_attention(
        cumulated(counts),
        [request_slots.to(device) for request_slots in slots],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=dtype,
        device=device,
    )
    return paged_attention(plan, q, *pool, out, scale=scale)


def expected_state(counts, slots, q, pool, scale):
    """Attend in float64 to the slots of each request, gathered by plain indexing."""
    state = AttentionState.empty(*q.shape, dtype=torch.float64)
    for begin, end, request_slots in zip(cumulated(counts), cumulated(counts)[1:], slots, strict=False):
        k, v = (cache.cpu()[request_slots] for cache in pool)
        visible = torch.ones(end - begin, len(request_slots), dtype=torch.bool)
        part = reference.attend(q[begin:end].cpu(), k, v, visible, scale, torch.float64)
        state.out[begin:end], state.lse[begin:end] = part.out, part.lse
    return state


@pytest.mark.parametrize(("lengths", "heads", "dtype"), CASES)
def test_agrees_with_float64(lengths, heads, dtype, device, nan_state, assert_state_close):
    """vllm 41623: foreign slots were read; here they are NaN, as is the output before the call."""
    counts, slot_counts = lengths
    pool = make_pool(sum(slot_counts) + 13, heads, dtype, device)
    slots = scattered(slot_counts, sum(slot_counts) + 13)
    fill(pool, slots)
    q = make_queries(counts, heads, dtype, device)
    out = nan_state(len(q), heads[0], heads[2])
    scale = heads[2] ** -0.5
    assert run(counts, slots, heads, dtype, device, q, pool, out, scale) is out
    assert_state_close(out, expected_state(counts, slots, q, pool, scale), dtype)


# Where the slots of a request of 1300 tokens begin and end: one run, a few long ones, mixed, in falling order.
LAYOUTS = [
    pytest.param([(40, 1340)], id="one_run"),
    pytest.param([(700, 1400), (10, 610)], id="two_runs"),
    pytest.param([(0, 900), *((slot, slot + 1) for slot in range(1000, 1800, 2))], id="run_and_singles"),
    pytest.param([(slot, slot + 1) for slot in range(1299, -1, -1)], id="falling"),
]


@pytest.mark.parametrize("num_queries", [1, 23])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_placement_of_slots(layout, num_queries, device, nan_state, assert_state_close):
    heads = (3, 1, 64)
    slots = [torch.cat([torch.arange(begin, end) for begin, end in layout])]
    pool = make_pool(1802, heads, FLOAT32, device)
    fill(pool, slots)
    q = make_queries([num_queries], heads, FLOAT32, device)
    out = run([num_queries], slots, heads, FLOAT32, device, q, pool, nan_state(num_queries, 3, 64), 0.125)
    assert_state_close(out, expected_state([num_queries], slots, q, pool, 0.125))


def test_any_placement_equals_one_contiguous_pool(device, max_examples, nan_state, assert_state_close):
    heads = (3, 1, 64)

    @settings(max_examples=max_examples)
    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=4), st.integers(0, 99))
    def check(requests, seed):
        counts, slot_counts = [queries for queries, _ in requests], [slots for _, slots in requests]
        total = sum(slot_counts)
        q = make_queries(counts, heads, FLOAT32, device)
        together, apart = make_pool(total + 1, heads, FLOAT32, device), make_pool(total + 9, heads, FLOAT32, device)
        in_order = list(torch.arange(total).split(slot_counts))
        anywhere = scattered(slot_counts, total + 9, seed)
        fill(together, in_order)
        fill(apart, anywhere)
        first = run(counts, in_order, heads, FLOAT32, device, q, together, nan_state(len(q), 3, 64), 0.125)
        second = run(counts, anywhere, heads, FLOAT32, device, q, apart, nan_state(len(q), 3, 64), 0.125)
        expected = expected_state(counts, in_order, q, together, 0.125)
        assert_state_close(first, expected)
        assert_state_close(second, expected)

    check()


def test_any_split_over_pools_equals_the_whole(device, max_examples, nan_state, assert_state_close):
    """torchtitan 3235: split-KV decode gave NaN for some split counts."""
    heads = (4, 2, 64)

    @settings(max_examples=max_examples)
    @given(st.integers(1, 3), st.lists(st.integers(0, 3), max_size=40))
    def check(num_queries, owners):
        slots = scattered([len(owners)], len(owners) + 3)
        pool = make_pool(len(owners) + 3, heads, FLOAT32, device)
        fill(pool, slots)
        q = make_queries([num_queries], heads, FLOAT32, device)
        state = AttentionState.empty(num_queries, 4, 64, device)
        for owner in range(4):
            part = [slots[0][torch.tensor([each == owner for each in owners], dtype=torch.bool)]]
            shard = run([num_queries], part, heads, FLOAT32, device, q, pool, nan_state(num_queries, 4, 64), 0.125)
            merge_states(state, shard, state)
        assert_state_close(state, expected_state([num_queries], slots, q, pool, 0.125))

    check()


def test_no_slots_is_the_identity(device, nan_state):
    """flash-attention 978: no keys gave +inf; the LoongServe artifact merged uninitialised memory."""
    heads = (4, 2, 64)
    q = make_queries([2, 3], heads, FLOAT32, device)
    none = torch.empty(0, dtype=torch.int64)
    out = run(
        [2, 3], [none, none], heads, FLOAT32, device, q, make_pool(4, heads, FLOAT32, device), nan_state(5, 4, 64), 1
    )
    assert not out.out.any()
    assert (out.lse == -math.inf).all()
    pool = make_pool(0, heads, FLOAT32, device)
    out = run([2, 3], [none, none], heads, FLOAT32, device, q, pool, nan_state(5, 4, 64), 1)
    assert (out.lse == -math.inf).all()


def test_requests_may_share_slots(device, nan_state, assert_state_close):
    """A common prefix is stored once."""
    heads = (4, 2, 64)
    pool = make_pool(30, heads, FLOAT32, device)
    fill(pool, [torch.arange(30)])
    slots = [torch.arange(20), torch.arange(30).flip(0)]
    q = make_queries([1, 1], heads, FLOAT32, device)
    out = run([1, 1], slots, heads, FLOAT32, device, q, pool, nan_state(2, 4, 64), 0.125)
    assert_state_close(out, expected_state([1, 1], slots, q, pool, 0.125))


@pytest.mark.parametrize("counts", [[1, 2], [1, 1]], ids=["mixed", "decode"])
def test_plan_serves_every_layer(counts, device, nan_state, assert_state_close):
    """One plan runs over other caches and queries: strided views of larger tensors here."""
    heads, slots, total = (4, 2, 64), [torch.tensor([5, 2, 9]), torch.arange(3, 8)], sum(counts)
    arguments = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": FLOAT32, "device": device}
    plan = plan_paged_attention(cumulated(counts), [each.to(device) for each in slots], **arguments)
    for seed in range(2):
        wide = torch.full((10, 2, 2, 64), torch.nan, device=device)
        pool = (wide[:, 0], wide[:, 1])
        fill(pool, slots, seed)
        q = torch.cat((make_queries([total], heads, FLOAT32, device, seed),) * 2, dim=1)[:, 2:6]
        whole = nan_state(total + 2, 4, 64)
        paged_attention(plan, q, *pool, whole.rows(1, total + 1), scale=0.3)
        assert_state_close(whole.rows(1, total + 1), expected_state(counts, slots, q, pool, 0.3))
        assert whole.out[[0, total + 1]].isnan().all()


def test_large_scores(device, nan_state, assert_state_close):
    """EasyContext 14: scores beyond the range of exp must neither overflow nor become NaN."""
    heads, slots = (3, 1, 64), scattered([50], 50)
    pool = make_pool(50, heads, FLOAT32, device)
    fill(pool, slots)
    pool[0].mul_(4)
    q = make_queries([1], heads, FLOAT32, device) * 4
    out = run([1], slots, heads, FLOAT32, device, q, pool, nan_state(1, 3, 64), 4.0)
    expected = expected_state([1], slots, q, pool, 4.0)
    assert expected.lse.min() > 200
    assert_state_close(out, expected, torch.float16)


def test_refuses_inconsistent_plans():
    arguments = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": FLOAT32, "device": "cpu"}
    slots = torch.arange(3)
    with pytest.raises(ValueError, match="expected 2 slot tensors, one a request, got 1"):
        plan_paged_attention([0, 1, 2], [slots], **arguments)
    with pytest.raises(ValueError, match=r"slots\[1\] must be \[n\] int64, got \[3\] torch\.int32"):
        plan_paged_attention([0, 1, 2], [slots, slots.int()], **arguments)
    with pytest.raises(ValueError, match="head_dim must be positive"):
        plan_paged_attention([0, 1], [slots], **{**arguments, "head_dim": 0})


def test_refuses_tensors_that_do_not_fit_the_plan():
    arguments = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": FLOAT32, "device": "cpu"}
    plan = plan_paged_attention([0, 1], [torch.arange(3)], **arguments)
    q, cache, out = torch.zeros(1, 4, 64), torch.zeros(5, 2, 64), AttentionState.empty(1, 4, 64)
    with pytest.raises(ValueError, match=r"q must have shape \[1, 4, 64\]"):
        paged_attention(plan, torch.zeros(2, 4, 64), cache, cache, out, scale=1.0)
    with pytest.raises(ValueError, match=r"k_cache must have shape \[5, 2, 64\], got \[5, 1, 64\]"):
        paged_attention(plan, q, cache[:, :1], cache, out, scale=1.0)
    with pytest.raises(ValueError, match=r"v_cache must be torch\.float32, got torch\.bfloat16"):
        paged_attention(plan, q, cache, cache.bfloat16(), out, scale=1.0)
    with pytest.raises(ValueError, match="k_cache and v_cache must have one shape"):
        paged_attention(plan, q, cache, cache[:4], out, scale=1.0)
    with pytest.raises(ValueError, match=r"out\.out must have shape"):
        paged_attention(plan, q, cache, cache, AttentionState.empty(2, 4, 64), scale=1.0)
