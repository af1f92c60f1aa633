"""What is Triton's own in paged_attention: how a plan cuts requests into parts, and that any cut gives the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.triton_paged_plan import MIN_PART_TOKENS, choose_part_tokens, make_work

HEADS = (3, 1)
# query counts, slot counts: decode beside a chunk, one request without slots, one without queries.
COUNTS = [1, 0, 6, 2, 1], [19, 5, 9, 0, 1]


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def make_inputs(dtype, head_dim, device):
    """Make queries, slots in random order, and a pool that is NaN but for the slots of requests with queries."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(COUNTS[0]), HEADS[0], head_dim, generator=generator).to(dtype).to(device)
    slots = torch.randperm(40, generator=generator)[: sum(COUNTS[1])].split(COUNTS[1])
    pool = torch.full((2, 40, HEADS[1], head_dim), torch.nan, dtype=dtype, device=device)
    for count, request_slots in zip(COUNTS[0], slots, strict=True):
        if count:
            rows = torch.randn(2, len(request_slots), HEADS[1], head_dim, generator=generator)
            pool[:, request_slots.to(device)] = rows.to(dtype).to(device)
    return q, slots, pool


def expected_state(q, slots, pool, scale):
    state = AttentionState.empty(*q.shape, dtype=torch.float64)
    begins = cumulated(COUNTS[0])
    for begin, end, request_slots in zip(begins, begins[1:], slots, strict=False):
        k, v = pool.cpu()[:, request_slots]
        visible = torch.ones(end - begin, len(request_slots), dtype=torch.bool)
        part = reference.attend(q[begin:end].cpu(), k, v, visible, scale, torch.float64)
        state.out[begin:end], state.lse[begin:end] = part.out, part.lse
    return state


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("part_tokens", "dtype", "head_dim"),
    [
        pytest.param(1, torch.float32, 64, id="a_slot_each"),
        pytest.param(7, torch.bfloat16, 80, id="a_few"),
        pytest.param(18, torch.float32, 96, id="a_whole_and_a_rest"),
        pytest.param(1000, torch.float32, 64, id="uncut"),
    ],
)
def test_any_number_of_parts(part_tokens, dtype, head_dim, device, nan_state, assert_state_close):
    """torchtitan 3235: split-KV decode gave NaN with some split counts. Here 1 to 19 parts a request."""
    q, slots, pool = make_inputs(dtype, head_dim, device)
    cu_seqlens_q = cumulated(COUNTS[0])
    shape = {"num_q_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": head_dim, "dtype": dtype, "device": device}
    plan = plan_paged_attention(cu_seqlens_q, slots, **shape)
    plan = replace(plan, payload=make_work(cu_seqlens_q, slots, HEADS, head_dim, dtype, device, part_tokens))
    # The workspace is not initialised: NaN in it must not matter.
    plan.payload.partial_out.fill_(torch.nan)
    plan.payload.partial_lse.fill_(torch.nan)
    out = nan_state(len(q), HEADS[0], head_dim)
    scale = head_dim**-0.5
    paged_attention(plan, q, pool[0], pool[1], out, scale=scale)
    assert_state_close(out, expected_state(q, slots, pool, scale), dtype)
    again = nan_state(len(q), HEADS[0], head_dim)
    paged_attention(plan, q, pool[0], pool[1], again, scale=scale)
    assert torch.equal(again.out, out.out)
    assert torch.equal(again.lse, out.lse)


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
def test_any_split_count_equals_one(device, max_examples, nan_state, assert_state_close):
    """torchtitan 3235: split-KV decode gave NaN with some split counts. Here any, of any requests, against one part."""
    head_dim, scale = 64, 0.125
    shape = {"num_q_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": head_dim, "dtype": torch.float32}

    @settings(max_examples=max_examples)
    @given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=1, max_size=3))
    def check(part_tokens, requests):
        counts, lengths = [queries for queries, _ in requests], [length for _, length in requests]
        cu_seqlens_q = cumulated(counts)
        generator = torch.Generator().manual_seed(part_tokens)
        q = torch.randn(sum(counts), HEADS[0], head_dim, generator=generator).to(device)
        pool = torch.randn(2, sum(lengths) + 1, HEADS[1], head_dim, generator=generator).to(device)
        slots = torch.randperm(sum(lengths), generator=generator).split(lengths)
        plan = plan_paged_attention(cu_seqlens_q, slots, **shape, device=device)
        states = []
        for tokens in (part_tokens, 1 << 40):
            work = make_work(cu_seqlens_q, slots, HEADS, head_dim, torch.float32, device, tokens)
            work.partial_out.fill_(torch.nan)
            work.partial_lse.fill_(torch.nan)
            out = nan_state(len(q), HEADS[0], head_dim)
            states.append(paged_attention(replace(plan, payload=work), q, pool[0], pool[1], out, scale=scale))
            parts = [-(-length // tokens) for queries, length in requests if queries and length > tokens]
            assert work.merges[:, 3].unique().tolist() == sorted(set(parts))
        assert_state_close(states[0], states[1])

    check()


def work_of(queries, lengths, part_tokens=None):
    slots = [torch.arange(length) for length in lengths]
    cpu = torch.device("cpu")
    return make_work(cumulated(queries), slots, (8, 2), 64, torch.bfloat16, cpu, part_tokens)


def test_one_long_request_leaves_the_others_alone():
    """LoongServe's artifact sizes the buffers of all requests by the longest one."""
    short = work_of([1] * 20, [100] * 20)
    mixed = work_of([1] * 21, [100] * 20 + [100_000])
    assert len(short.launches[0].items) == 20
    assert short.partial_out.shape[0] == 0
    items = mixed.launches[0].items
    long = items[items[:, 4] > 100]
    assert len(items) - len(long) == 20
    assert (items[items[:, 4] <= 100][:, 5] == -1).all()
    # One more query has partial states, one for each of its parts, and these cover its slots.
    assert mixed.partial_out.shape[0] == len(long) > 1
    assert long[:, 4].sum() == 100_000
    assert mixed.merges.tolist() == [[20, 0, 1, len(long)]]


def test_decode_and_chunks_get_their_own_tiles():
    work = work_of([1, 40, 4, 5], [30, 30, 30, 30])
    # 4 query heads a KV head: 4 and 16 rows are decode, 160 and 20 a prefill.
    assert [sorted(set(launch.items[:, 1].tolist())) for launch in work.launches] == [[1, 4], [5, 40]]


@pytest.mark.parametrize(
    ("lengths", "tiles", "max_items", "expected"),
    [
        pytest.param([], [], 8, 1, id="nothing"),
        pytest.param([0, 1], [1, 1], 8, 1, id="short"),
        pytest.param([64 * MIN_PART_TOKENS], [1], 8, 8, id="one_long"),
        pytest.param([64 * MIN_PART_TOKENS, *[1] * 99], [1] * 100, 8, 9, id="one_long_among_many"),
        pytest.param([8 * MIN_PART_TOKENS], [100], 8, 100, id="enough_tiles"),
    ],
)
def test_parts_share_the_work_out(lengths, tiles, max_items, expected):
    assert choose_part_tokens(lengths, tiles, max_items) == expected * MIN_PART_TOKENS
