"""striped_attention: one ring step, and rings made of them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

FLOAT32 = torch.float32
EVERYTHING = 1 << 20

# (query counts, key counts, diagonals), (q heads, kv heads, head_dim), dtype
CASES = [
    pytest.param(([1], [1], [0]), (1, 1, 64), FLOAT32, id="one_token"),
    pytest.param(([1, 1, 1], [1, 1, 1], [0, -1, 0]), (9, 3, 64), FLOAT32, id="decode"),
    pytest.param(([7, 7], [7, 7], [0, -1]), (9, 3, 64), FLOAT32, id="gqa_odd"),
    pytest.param(([0, 5, 3, 0], [4, 0, 3, 0], [0, 0, -1, -1]), (4, 4, 64), FLOAT32, id="empty_members"),
    pytest.param(([0], [0], [0]), (4, 2, 64), FLOAT32, id="nothing"),
    pytest.param(([131], [131], [-1]), (2, 1, 128), FLOAT32, id="longer_than_a_tile"),
    pytest.param(([33, 2], [65, 17], [EVERYTHING, EVERYTHING]), (8, 2, 96), FLOAT32, id="all_visible"),
    pytest.param(([5, 9], [12, 4], [-3, -9]), (4, 1, 64), FLOAT32, id="far_below"),
    pytest.param(([5, 9, 1], [12, 4, 9], [4, 2, 5]), (4, 1, 64), FLOAT32, id="above"),
    pytest.param(([12, 3], [9, 4], [0, -1]), (28, 7, 128), torch.bfloat16, id="bf16"),
    pytest.param(([6], [40], [20]), (2, 1, 256), torch.float16, id="f16_wide_head"),
]


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def random_rows(tokens, heads, head_dim, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype).to(device)


def make_plan(lengths, heads, dtype, device):
    q_lengths, k_lengths, diagonals = lengths
    return plan_striped_attention(
        cumulated(q_lengths),
        cumulated(k_lengths),
        diagonals,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        dtype=dtype,
        device=device,
    )


def make_qkv(lengths, heads, dtype, device, seed=0):
    q_heads, kv_heads, head_dim = heads
    q = random_rows(sum(lengths[0]), q_heads, head_dim, dtype, device, seed)
    k = random_rows(sum(lengths[1]), kv_heads, head_dim, dtype, device, seed + 1)
    v = random_rows(sum(lengths[1]), kv_heads, head_dim, dtype, device, seed + 2)
    return q, k, v


def expected_state(lengths, q, k, v, scale):
    """Attend in float64 from scratch, sequence by sequence."""
    state = AttentionState.empty(q.shape[0], q.shape[1], q.shape[2], dtype=torch.float64)
    cu_q, cu_k = cumulated(lengths[0]), cumulated(lengths[1])
    for index, diagonal in enumerate(lengths[2]):
        rows, columns = slice(cu_q[index], cu_q[index + 1]), slice(cu_k[index], cu_k[index + 1])
        visible = torch.ones(lengths[0][index], lengths[1][index], dtype=torch.bool).tril(diagonal)
        part = reference.attend(q[rows].cpu(), k[columns].cpu(), v[columns].cpu(), visible, scale, torch.float64)
        state.out[rows], state.lse[rows] = part.out, part.lse
    return state


def causal_state(q, k, v, scale):
    """Attend causally in float64 in one pass."""
    return expected_state(([len(q)], [len(k)], [0]), q, k, v, scale)


@pytest.mark.parametrize(("lengths", "heads", "dtype"), CASES)
def test_agrees_with_float64(lengths, heads, dtype, device, assert_state_close):
    """flash-attention 1537: members without queries or keys, as in ``empty_members``, are legal."""
    q, k, v = make_qkv(lengths, heads, dtype, device)
    state = AttentionState.empty(len(q), heads[0], heads[2], device)
    scale = heads[2] ** -0.5
    striped_attention(make_plan(lengths, heads, dtype, device), q, k, v, state, scale=scale)
    assert_state_close(state, expected_state(lengths, q, k, v, scale), dtype)


@pytest.mark.parametrize(("lengths", "heads", "dtype"), CASES[2:6])
def test_merges_into_the_running_state(lengths, heads, dtype, device, assert_state_close):
    """A second block is merged with the first; queries that see no key of it keep their state to the bit."""
    q, k, v = make_qkv(lengths, heads, dtype, device)
    _, k2, v2 = make_qkv(lengths, heads, dtype, device, seed=7)
    state = AttentionState.empty(len(q), heads[0], heads[2], device)
    plan = make_plan(lengths, heads, dtype, device)
    scale = heads[2] ** -0.5
    striped_attention(plan, q, k, v, state, scale=scale)
    first = AttentionState(state.out.clone(), state.lse.clone())
    striped_attention(plan, q, k2, v2, state, scale=scale)

    part = expected_state(lengths, q, k2, v2, scale)
    expected = reference.merge_states(expected_state(lengths, q, k, v, scale), part, AttentionState(part.out, part.lse))
    assert_state_close(state, expected, dtype)
    blind = (part.lse == -math.inf).to(device)
    assert torch.equal(state.out[blind], first.out[blind])


def test_masked_rows_and_empty_blocks_leave_the_state_alone(device):
    """flash-attention 978, flashinfer 4452: a row without visible keys gave +inf or junk."""
    heads = (4, 2, 64)
    for lengths in (([4], [4], [-4]), ([4], [0], [0]), ([3, 1], [2, 1], [-9, -1])):
        q, k, v = make_qkv(lengths, heads, FLOAT32, device)
        empty = AttentionState.empty(4, 4, 64, device)
        striped_attention(make_plan(lengths, heads, FLOAT32, device), q, k, v, empty, scale=0.125)
        assert not empty.out.any()
        assert (empty.lse == -math.inf).all()
        state = AttentionState(torch.randn(4, 4, 64, device=device), torch.randn(4, 4, device=device))
        before = AttentionState(state.out.clone(), state.lse.clone())
        striped_attention(make_plan(lengths, heads, FLOAT32, device), q, k, v, state, scale=0.125)
        assert torch.equal(state.out, before.out)
        assert torch.equal(state.lse, before.lse)


def test_large_scores(device, assert_state_close):
    """EasyContext 14: scores beyond the range of exp must neither overflow nor become NaN."""
    lengths, heads = ([9, 1], [9, 1], [0, 0]), (3, 1, 64)
    q, k, v = make_qkv(lengths, heads, FLOAT32, device)
    q, k = q * 4, k * 4
    state = AttentionState.empty(10, 3, 64, device)
    striped_attention(make_plan(lengths, heads, FLOAT32, device), q, k, v, state, scale=4.0)
    expected = expected_state(lengths, q, k, v, 4.0)
    assert expected.lse.max() > 200
    assert_state_close(state, expected, torch.float16)


def test_strided_inputs(device, assert_state_close):
    """Q, K and V are views of one projection, the state a view of a larger one."""
    lengths, heads = ([6, 3], [6, 3], [0, -1]), (4, 2, 64)
    packed = random_rows(9, 8, 64, FLOAT32, device, seed=3)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    whole = AttentionState.empty(12, 4, 64, device)
    striped_attention(make_plan(lengths, heads, FLOAT32, device), q, k, v, whole.rows(2, 11), scale=0.125)
    assert_state_close(whole.rows(2, 11), expected_state(lengths, q, k, v, 0.125))
    assert not whole.out[[0, 1, 11]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_rows_as_they_pass(dtype, device, assert_state_close):
    lengths, heads = ([5, 0, 40], [8, 3, 40], [0, 0, -1]), (6, 2, 64)
    q, k, v = make_qkv(lengths, heads, dtype, device)
    k_cache, v_cache = (torch.full((80, 2, 64), torch.nan, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:51].to(device)
    slots[::4] = -1
    state = AttentionState.empty(len(q), 6, 64, device)
    plan = make_plan(lengths, heads, dtype, device)
    striped_attention(plan, q, k, v, state, scale=0.125, save=KVSave(slots, k_cache, v_cache))
    assert_state_close(state, expected_state(lengths, q, k, v, 0.125), dtype)
    kept = slots >= 0
    assert torch.equal(k_cache[slots[kept]], k[kept])
    assert torch.equal(v_cache[slots[kept]], v[kept])
    others = torch.ones(80, dtype=torch.bool, device=device)
    others[slots[kept]] = False
    assert k_cache[others].isnan().all()
    assert v_cache[others].isnan().all()


def test_saves_where_nobody_looks(device):
    """A member without queries, and rows that no query sees, save all the same."""
    for lengths in (([0, 0], [3, 2], [0, -1]), ([1, 1], [3, 2], [-5, -1])):
        heads = (2, 1, 64)
        q, k, v = make_qkv(lengths, heads, FLOAT32, device)
        cache = torch.zeros(5, 1, 64, device=device)
        v_cache = torch.zeros_like(cache)
        save = KVSave(torch.tensor([4, 2, 0, 1, 3], device=device), cache, v_cache)
        state = AttentionState.empty(len(q), 2, 64, device)
        striped_attention(make_plan(lengths, heads, FLOAT32, device), q, k, v, state, scale=1.0, save=save)
        assert torch.equal(cache[save.slots], k)
        assert torch.equal(v_cache[save.slots], v)


def ring(q, k, v, rotations, starts, dop, device, dtype):
    """Attend causally to packed sequences as ``dop`` members of a ring would, each by striped_attention alone.

    Token t of sequence i goes to member (t + rotations[i]) % dop. Returns the state in the order of the tokens.
    """
    q_heads, head_dim = q.shape[1:]
    lengths = [end - begin for begin, end in pairwise(starts)]
    rows = [
        [
            [t for t in range(length) if (t + rotation) % dop == member]
            for length, rotation in zip(lengths, rotations, strict=True)
        ]
        for member in range(dop)
    ]
    packed = [
        torch.tensor([starts[i] + t for i, tokens in enumerate(rows[m]) for t in tokens], dtype=torch.int64)
        for m in range(dop)
    ]
    result = AttentionState.empty(len(q), q_heads, head_dim)
    for member in range(dop):
        state = AttentionState.empty(len(packed[member]), q_heads, head_dim, device)
        for step in range(dop):
            peer = (member - step) % dop
            firsts = [((member - rotation) % dop, (peer - rotation) % dop) for rotation in rotations]
            plan = make_plan(
                (
                    [len(tokens) for tokens in rows[member]],
                    [len(tokens) for tokens in rows[peer]],
                    [0 if first_key <= first_query else -1 for first_query, first_key in firsts],
                ),
                (q_heads, k.shape[1], head_dim),
                dtype,
                device,
            )
            block_q, block_k, block_v = q[packed[member]], k[packed[peer]], v[packed[peer]]
            scale = head_dim**-0.5
            striped_attention(plan, block_q.to(device), block_k.to(device), block_v.to(device), state, scale=scale)
        result.out[packed[member]], result.lse[packed[member]] = state.out.cpu(), state.lse.cpu()
    return result


def test_any_striping_equals_one_pass(device, max_examples, assert_state_close):
    """EasyContext 47 and 10, DeepSpeed 7842: lengths shorter than the ring or not divisible by it gave garbage."""

    @settings(max_examples=max_examples)
    @given(
        st.integers(1, 8),
        st.lists(st.tuples(st.integers(0, 21), st.integers(0, 7)), min_size=1, max_size=3),
    )
    def check(dop, sequences):
        lengths = [length for length, _ in sequences]
        starts = cumulated(lengths)
        q, k, v = make_qkv((lengths, lengths, None), (3, 1, 64), FLOAT32, "cpu")
        rotations = [rotation % dop for _, rotation in sequences]
        state = ring(q, k, v, rotations, starts, dop, device, FLOAT32)
        assert_state_close(state, expected_state((lengths, lengths, [0] * len(lengths)), q, k, v, 0.125))

    check()


@pytest.mark.parametrize("dop", [1, 2, 4, 8])
def test_error_does_not_grow_with_the_ring(dop, device, assert_state_close):
    """ring-flash-attention 42: bf16 partial outputs were rounded at every ring step."""
    lengths = [60]
    dtype = torch.bfloat16
    q, k, v = make_qkv((lengths, lengths, None), (3, 1, 64), dtype, "cpu")
    state = ring(q, k, v, [dop // 2], [0, 60], dop, device, dtype)
    expected = causal_state(q, k, v, 0.125)
    assert_state_close(state, expected, dtype)
    # A limit that holds at every DoP: what rounding the output twice would cost.
    rounding = (expected.out - expected.out.to(dtype).double()).norm()
    assert (state.out.double() - expected.out).norm() < 2 * rounding


@pytest.mark.parametrize("provider", ["cpu", "cpu-torch", "cpu-portable", "cpu-bf16-pairs", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16, torch.float16], ids=str)
def test_no_less_accurate_than_sdpa_however_long_the_ring(dtype, provider, device):
    """The error against float64 is within 1.5 times that of SDPA in the same dtype, at DoP 1, 2, 4 and 8 alike."""
    tokens, heads, dops = 512, (6, 2, 64), (1, 2, 4, 8)
    if provider == "triton" and device.type == "cpu":
        # The interpreter is slow.
        tokens, heads, dops = 32, (2, 1, 64), (1, 4)
    q, k, v = make_qkv(([tokens], [tokens], None), heads, dtype, "cpu")
    expected = causal_state(q, k, v, 0.125).out
    q4, k4, v4 = (each.transpose(0, 1)[None].to(device) for each in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
    sdpa_error = (sdpa[0].transpose(0, 1).cpu().double() - expected).norm().item()
    for dop in dops:
        state = ring(q, k, v, [dop // 2], [0, tokens], dop, device, dtype)
        error = (state.out.to(dtype).double() - expected).norm().item()
        assert error <= 1.5 * sdpa_error, f"DoP {dop}: error {error:.3g}, SDPA's {sdpa_error:.3g}"


def test_split_keys_equal_the_whole(device, max_examples, assert_state_close):
    @settings(max_examples=max_examples)
    @given(st.integers(1, 9), st.integers(0, 40), st.lists(st.integers(0, 40), max_size=3), st.integers(-12, 45))
    def check(num_q, num_k, cuts, diagonal):
        heads = (4, 2, 64)
        q, k, v = make_qkv(([num_q], [num_k], None), heads, FLOAT32, device)
        edges = sorted({0, num_k, *(min(cut, num_k) for cut in cuts)})
        state = AttentionState.empty(num_q, 4, 64, device)
        for begin, end in pairwise(edges):
            plan = make_plan(([num_q], [end - begin], [diagonal - begin]), heads, FLOAT32, device)
            striped_attention(plan, q, k[begin:end], v[begin:end], state, scale=0.125)
        assert_state_close(state, expected_state(([num_q], [num_k], [diagonal]), q, k, v, 0.125))

    check()


def test_refuses_inconsistent_plans():
    arguments = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": FLOAT32, "device": "cpu"}
    with pytest.raises(ValueError, match=r"multiple of num_kv_heads, got 4:3"):
        plan_striped_attention([0, 1], [0, 1], [0], **{**arguments, "num_kv_heads": 3})
    with pytest.raises(ValueError, match="must have one length, got 2 and 3"):
        plan_striped_attention([0, 1], [0, 1, 1], [0], **arguments)
    with pytest.raises(ValueError, match="expected 1 diagonals, one a sequence, got 2"):
        plan_striped_attention([0, 1], [0, 1], [0, 0], **arguments)
    with pytest.raises(ValueError, match="cu_seqlens_k must not fall, got 3 then 2"):
        plan_striped_attention([0, 1, 1], [0, 3, 2], [0, 0], **arguments)
    with pytest.raises(ValueError, match="cu_seqlens_q must start with 0"):
        plan_striped_attention([1, 2], [0, 1], [0], **arguments)
    with pytest.raises(ValueError, match="dtype must be float32"):
        plan_striped_attention([0, 1], [0, 1], [0], **{**arguments, "dtype": torch.int32})


def test_refuses_tensors_that_do_not_fit_the_plan():
    lengths, heads = ([2], [3], [0]), (4, 2, 64)
    q, k, v = make_qkv(lengths, heads, FLOAT32, "cpu")
    plan = make_plan(lengths, heads, FLOAT32, "cpu")
    state = AttentionState.empty(2, 4, 64)
    cache = torch.zeros(8, 2, 64)
    with pytest.raises(ValueError, match=r"q must have shape \[2, 4, 64\], got \[1, 4, 64\]"):
        striped_attention(plan, q[:1], k, v, state, scale=1.0)
    with pytest.raises(ValueError, match=r"k must be torch\.float32, got torch\.bfloat16"):
        striped_attention(plan, q, k.bfloat16(), v, state, scale=1.0)
    with pytest.raises(ValueError, match="v must be contiguous in its last dimension"):
        striped_attention(plan, q, k, v.transpose(1, 2).contiguous().transpose(1, 2), state, scale=1.0)
    with pytest.raises(ValueError, match=r"state\.out must have shape"):
        striped_attention(plan, q, k, v, AttentionState.empty(3, 4, 64), scale=1.0)
    with pytest.raises(ValueError, match=r"save\.slots must have shape \[3\], got \[2\]"):
        striped_attention(plan, q, k, v, state, scale=1.0, save=KVSave(torch.tensor([0, 1]), cache, cache))
    with pytest.raises(ValueError, match=r"save\.k_cache must have shape \[8, 2, 64\], got \[8, 1, 64\]"):
        striped_attention(plan, q, k, v, state, scale=1.0, save=KVSave(torch.arange(3), cache[:, :1], cache))
