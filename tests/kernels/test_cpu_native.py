"""What is the native CPU kernels' own: bounds below, soft cap, first visible slots, threads, any number of parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import cpu_native
from loongserve.kernels.native_build import ISA_VARIABLE
from loongserve.kernels.state import AttentionState

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FAR = 1 << 62


@pytest.fixture(params=["", "portable", "portable_bf16"], autouse=True)
def isa(request, monkeypatch):
    """The instruction set: this machine's, and what stands for those that it has not."""
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return request.param


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def attend(q, k, v, visible, scale, soft_cap):
    """Attend in float64, with rows that see nothing the identity."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ahd,bhd->hab", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
    return AttentionState(torch.einsum("hab,bhd->ahd", weights, v), lse.t())


def expected_striped(lengths, q, k, v, lowers, scale, soft_cap):
    state = AttentionState.empty(*q.shape, dtype=torch.float64)
    cu_q, cu_k = cumulated(lengths[0]), cumulated(lengths[1])
    for i, (upper, lower) in enumerate(zip(lengths[2], lowers, strict=True)):
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        distance = torch.arange(lengths[1][i]) - torch.arange(lengths[0][i])[:, None]
        visible = (distance <= upper) & (distance >= lower)
        part = attend(q[rows], k[columns], v[columns], visible, scale, soft_cap)
        state.out[rows], state.lse[rows] = part.out, part.lse
    return state


def make_qkv(lengths, heads, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths[0]), heads[0]), (sum(lengths[1]), heads[1]), (sum(lengths[1]), heads[1]))
    return [torch.randn(*shape, heads[2], generator=generator).to(dtype) for shape in shapes]


def run_striped(lengths, heads, q, k, v, lowers, scale, soft_cap=0.0):
    plan = cpu_native.plan_striped_attention(
        cumulated(lengths[0]),
        cumulated(lengths[1]),
        lengths[2],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=q.dtype,
        device=torch.device("cpu"),
        lower_diagonals=tuple(lowers),
    )
    state = AttentionState.empty(len(q), heads[0], heads[2])
    cpu_native.striped_attention(plan, q, k, v, state, scale=scale, soft_cap=soft_cap or None)
    return state


# (query counts, key counts, upper bounds), lower bounds
WINDOWS = [
    pytest.param(([40, 1], [40, 9], [0, 5]), [-7, 2], id="window"),
    pytest.param(([300], [600], [290]), [-5], id="over_tiles"),
    pytest.param(([5, 3], [5, 3], [0, 0]), [1, FAR], id="empty"),
    pytest.param(([50, 1], [30, 30], [FAR, FAR]), [-FAR, -FAR], id="everything"),
    pytest.param(([90], [400], [FAR]), [280], id="from_below_only"),
]


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize(("lengths", "lowers"), WINDOWS)
def test_windows_and_soft_cap(lengths, lowers, soft_cap, assert_state_close):
    heads = (6, 2, 64)
    q, k, v = make_qkv(lengths, heads, FLOAT32)
    state = run_striped(lengths, heads, q, k, v, lowers, 0.5, soft_cap)
    assert_state_close(state, expected_striped(lengths, q, k, v, lowers, 0.5, soft_cap))


@pytest.mark.parametrize("scale", [0.0, -0.2, -5.0])
def test_scales_that_are_not_positive(scale, assert_state_close):
    lengths, heads = ([19, 1], [23, 40], [2, FAR]), (4, 1, 32)
    q, k, v = make_qkv(lengths, heads, FLOAT32)
    lowers = [-FAR, -FAR]
    state = run_striped(lengths, heads, q, k, v, lowers, scale)
    assert_state_close(state, expected_striped(lengths, q, k, v, lowers, scale, 0.0))


@pytest.mark.parametrize("head_dim", [16, 24, 40, 72, 80, 96, 112, 128, 192, 248, 256])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_head_sizes(head_dim, dtype, assert_state_close):
    """Around every row of the wider tensors is NaN, which must not be read."""
    lengths, heads = ([20, 1], [35, 21], [11, 20]), (3, 1, head_dim)
    wide = []
    for rows in make_qkv(lengths, heads, dtype):
        larger = torch.full((rows.shape[0], rows.shape[1] + 1, head_dim + 8), torch.nan, dtype=dtype)
        view = larger[:, 1:, 3 : head_dim + 3]
        view.copy_(rows)
        wide.append(view)
    state = run_striped(lengths, heads, *wide, [-FAR, -FAR], head_dim**-0.5)
    assert_state_close(state, expected_striped(lengths, *wide, [-FAR, -FAR], head_dim**-0.5, 0.0), dtype)


def test_any_lengths_and_bounds(assert_state_close):
    """Lengths from 1 to 200, any diagonal and window, against float64."""
    length = st.integers(0, 200)

    @settings(max_examples=40)
    @given(
        st.lists(st.tuples(length, length, st.integers(-60, 250), st.integers(0, 300)), min_size=1, max_size=3),
        st.sampled_from([(1, 1, 64), (9, 3, 64), (7, 1, 40)]),
        st.sampled_from([FLOAT32, BFLOAT16]),
    )
    def check(sequences, heads, dtype):
        lengths = tuple([sequence[i] for sequence in sequences] for i in range(3))
        lowers = [upper - window for _, _, upper, window in sequences]
        q, k, v = make_qkv(lengths, heads, dtype)
        state = run_striped(lengths, heads, q, k, v, lowers, 0.125)
        assert_state_close(state, expected_striped(lengths, q, k, v, lowers, 0.125, 0.0), dtype)

    check()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("counts", [([1, 1], [40, 200]), ([30, 2], [300, 70]), ([4], [5000])], ids=str)
def test_first_visible_slots(counts, dtype, assert_state_close):
    """A query may see its request's slots from an index on only, down to none; foreign slots are NaN."""
    heads, total = (6, 2, 64), sum(counts[1])
    generator = torch.Generator().manual_seed(0)
    pool = torch.full((2, total + 50, heads[1], heads[2]), torch.nan, dtype=dtype)
    slots = list(torch.randperm(total + 50, generator=generator)[:total].split(counts[1]))
    for request_slots in slots:
        rows = torch.randn(2, len(request_slots), *heads[1:], generator=generator)
        pool[:, request_slots] = rows.to(dtype)
    q = torch.randn(sum(counts[0]), heads[0], heads[2], generator=generator).to(dtype)
    first = torch.tensor([(i * 37) % (n + 1) for n, m in zip(counts[1], counts[0], strict=True) for i in range(m)])
    first[-1] = counts[1][-1]
    plan = cpu_native.plan_paged_attention(
        cumulated(counts[0]),
        slots,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=dtype,
        device=torch.device("cpu"),
        first_visible=first,
    )
    out = AttentionState(torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan))
    cpu_native.paged_attention(plan, q, pool[0], pool[1], out, scale=0.125, soft_cap=5.0)
    expected = AttentionState.empty(*q.shape, dtype=torch.float64)
    for begin, end, request_slots in zip(cumulated(counts[0]), cumulated(counts[0])[1:], slots, strict=False):
        visible = torch.arange(len(request_slots)) >= first[begin:end, None]
        part = attend(q[begin:end], pool[0, request_slots], pool[1, request_slots], visible, 0.125, 5.0)
        expected.out[begin:end], expected.lse[begin:end] = part.out, part.lse
    assert_state_close(out, expected, dtype)


def test_threads_give_the_same(assert_state_close):
    """Row tiles of three sequences and parts of a long decode, on one thread and on four."""
    lengths, heads = ([200, 1, 130], [200, 4000, 130], [0, FAR, -1]), (6, 2, 64)
    q, k, v = make_qkv(lengths, heads, FLOAT32)
    expected = expected_striped(lengths, q, k, v, [-FAR] * 3, 0.125, 0.0)
    threads = torch.get_num_threads()
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            assert_state_close(run_striped(lengths, heads, q, k, v, [-FAR] * 3, 0.125), expected)
    finally:
        torch.set_num_threads(threads)


def test_any_number_of_parts_equals_one(assert_state_close):
    """torchtitan 3235: a decode cut into parts gave NaN for some numbers of them. Here threads and lengths set it."""
    heads = (6, 2, 16)
    shape = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "dtype": FLOAT32, "device": torch.device("cpu")}
    threads = torch.get_num_threads()

    @settings(max_examples=30)
    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.integers(2, 8))
    def check(lengths, many):
        generator = torch.Generator().manual_seed(many)
        q = torch.randn(len(lengths), heads[0], heads[2], generator=generator)
        pool = torch.randn(2, sum(lengths) + 1, *heads[1:], generator=generator)
        slots = torch.randperm(sum(lengths), generator=generator).split(lengths)
        plan = cpu_native.plan_paged_attention(range(len(lengths) + 1), slots, **shape)
        states = []
        for number in (1, many):
            torch.set_num_threads(number)
            out = AttentionState(torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan))
            states.append(cpu_native.paged_attention(plan, q, pool[0], pool[1], out, scale=0.25))
        assert_state_close(states[1], states[0])

    try:
        check()
    finally:
        torch.set_num_threads(threads)


def test_longer_than_a_chunk_of_keys(assert_state_close):
    lengths, heads = ([7], [9000], [8990]), (2, 1, 16)
    q, k, v = make_qkv(lengths, heads, FLOAT32)
    state = run_striped(lengths, heads, q, k, v, [-FAR], 0.25)
    assert_state_close(state, expected_striped(lengths, q, k, v, [-FAR], 0.25, 0.0))


def test_can_run():
    assert cpu_native.can_run(64, BFLOAT16)
    assert not cpu_native.can_run(20, BFLOAT16)
    assert not cpu_native.can_run(264, FLOAT32)
    assert not cpu_native.can_run(64, torch.float64)
