"""merge_states, merge_many, merge_rows, finalize: the algebra of attention states."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states, state_from_flash_lse
from loongserve.kernels.state import AttentionState

# tokens, heads, head_dim
SHAPES = [
    pytest.param((1, 1, 64), id="one"),
    pytest.param((5, 3, 80), id="odd"),
    pytest.param((130, 9, 64), id="many"),
    pytest.param((3, 28, 128), id="many_heads"),
    pytest.param((2, 1, 256), id="wide_head"),
    pytest.param((0, 4, 64), id="no_tokens"),
]

LSE = st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4, width=32), st.floats(-5, 5, width=32))


def random_state(tokens, heads, head_dim, device="cpu", seed=0, spread=3.0):
    """Make a state in which about one row in five is empty."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, head_dim, generator=generator)
    lse = torch.randn(tokens, heads, generator=generator) * spread
    empty = torch.rand(tokens, heads, generator=generator) < 0.2
    return AttentionState(
        out.masked_fill(empty[..., None], 0.0).to(device), lse.masked_fill(empty, -math.inf).to(device)
    )


def state_of(lses, device, seed):
    """Make a state of one head with these LSE."""
    lse = torch.tensor(lses, dtype=torch.float32)[:, None]
    out = torch.randn(len(lses), 1, 64, generator=torch.Generator().manual_seed(seed))
    return AttentionState(out.masked_fill((lse == -math.inf)[..., None], 0.0).to(device), lse.to(device))


def double(state):
    return AttentionState(state.out.cpu().double(), state.lse.cpu().double())


def expected_merge(a, b):
    out = AttentionState.empty(*a.out.shape, dtype=torch.float64)
    return reference.merge_states(double(a), double(b), out)


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, device, nan_state, assert_state_close):
    a, b = random_state(*shape, device, seed=1), random_state(*shape, device, seed=2)
    out = nan_state(*shape)
    assert merge_states(a, b, out) is out
    assert_state_close(out, expected_merge(a, b))
    assert_state_close(merge_states(a, b), expected_merge(a, b))


def test_in_place(device, assert_state_close):
    a, b = random_state(7, 3, 64, device, seed=1), random_state(7, 3, 64, device, seed=2)
    expected = expected_merge(a, b)
    into_a = AttentionState(a.out.clone(), a.lse.clone())
    into_b = AttentionState(b.out.clone(), b.lse.clone())
    assert_state_close(merge_states(into_a, b, into_a), expected)
    assert_state_close(merge_states(a, into_b, into_b), expected)


def test_views_of_rows_and_heads(device, assert_state_close):
    """Merging into a view changes the viewed rows and no others."""
    whole, part = random_state(9, 4, 64, device, seed=1), random_state(4, 2, 64, device, seed=2)
    before = AttentionState(whole.out.clone(), whole.lse.clone())
    view = AttentionState(whole.out[3:7, 1:3], whole.lse[3:7, 1:3])
    expected = expected_merge(view, part)
    merge_states(view, part, view)
    assert_state_close(view, expected)
    before.out[3:7, 1:3], before.lse[3:7, 1:3] = view.out, view.lse
    assert torch.equal(whole.out, before.out)
    assert torch.equal(whole.lse, before.lse)


def test_two_empty_states_are_empty(device, nan_state):
    """flashinfer 4051, vllm 39148: merging two empty states gave NaN."""
    empty = AttentionState.empty(6, 3, 64, device)
    out = merge_states(empty, empty, nan_state(6, 3, 64))
    assert not out.out.any()
    assert (out.lse == -math.inf).all()


def test_empty_is_the_identity_to_the_bit(device):
    state = random_state(9, 3, 64, device, seed=3)
    empty = AttentionState.empty(9, 3, 64, device)
    for merged in (merge_states(state, empty), merge_states(empty, state)):
        assert torch.equal(merged.out, state.out)
        assert torch.equal(merged.lse, state.lse)


@pytest.mark.parametrize("difference", [1e4, -1e4])
def test_large_difference_is_exact(difference, device):
    """EasyContext 14: large differences of the LSE overflowed."""
    a, b = state_of([difference, 0.0, -5e3], device, 1), state_of([0.0, difference, 5e3 * difference], device, 2)
    merged = merge_states(a, b)
    larger = torch.maximum(a.lse, b.lse)
    assert torch.equal(merged.lse, larger)
    assert torch.equal(merged.out, torch.where((a.lse == larger)[..., None], a.out, b.out))


def test_is_a_commutative_monoid(device, max_examples):
    @settings(max_examples=max_examples)
    @given(st.lists(st.tuples(LSE, LSE, LSE), min_size=1, max_size=8))
    def check(rows):
        a, b, c = (state_of(lses, device, seed) for seed, lses in enumerate(zip(*rows, strict=True)))
        largest = max((abs(lse) for row in rows for lse in row if lse > -math.inf), default=0.0)
        # An LSE in between is rounded to float32, and an error of it is a relative error of the weights.
        tolerance = 4 * torch.finfo(torch.float32).eps * (8 + largest)
        for left, right in (
            (merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c))),
            (merge_states(a, b), merge_states(b, a)),
        ):
            torch.testing.assert_close(left.out, right.out, rtol=0, atol=4 * tolerance)
            torch.testing.assert_close(left.lse, right.lse, rtol=0, atol=tolerance)

    check()


def test_many_merges_stay_accurate(device, assert_state_close):
    """ring-flash-attention 42: the error grew with the number of ring steps."""
    parts = [random_state(5, 3, 64, device, seed) for seed in range(64)]
    state = AttentionState.empty(5, 3, 64, device)
    expected = double(state)
    for part in parts:
        merge_states(state, part, state)
        expected = expected_merge(expected, part)
    assert_state_close(state, expected)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]])
def test_many_at_once_agree_with_float64(shape, count, device, nan_state, assert_state_close):
    """Also in place, and where LSE are far apart; a row without keys in any state stays empty."""
    states = [random_state(*shape, device, seed, spread=3.0 if seed % 2 else 300.0) for seed in range(count)]
    for state in states:
        state.lse[:1], state.out[:1] = -math.inf, 0.0
    expected = double(states[0])
    for state in states[1:]:
        expected = expected_merge(expected, state)
    out = nan_state(*shape)
    assert merge_many(states, out) is out
    assert_state_close(out, expected)
    assert torch.equal(merge_many(states).out, out.out)
    assert_state_close(merge_many(states, states[0]), expected)


def test_many_at_once_are_the_same_as_one_by_one(device, max_examples):
    @settings(max_examples=max_examples)
    @given(st.lists(st.tuples(LSE, LSE, LSE, LSE, LSE), min_size=1, max_size=4))
    def check(rows):
        states = [state_of(lses, device, seed) for seed, lses in enumerate(zip(*rows, strict=True))]
        merged, many = states[0], merge_many(states)
        for state in states[1:]:
            merged = merge_states(merged, state)
        largest = max((abs(lse) for row in rows for lse in row if lse > -math.inf), default=0.0)
        tolerance = 4 * torch.finfo(torch.float32).eps * (8 + largest)
        torch.testing.assert_close(many.out, merged.out, rtol=0, atol=4 * tolerance)
        torch.testing.assert_close(many.lse, merged.lse, rtol=0, atol=tolerance)

    check()


def test_many_refuses_what_does_not_fit():
    a, b = AttentionState.empty(5, 3, 64), AttentionState.empty(5, 3, 64)
    with pytest.raises(ValueError, match="at least one state"):
        merge_many([])
    with pytest.raises(ValueError, match=r"states\[1\]\.out must have shape \[5, 3, 64\], got \[4, 3, 64\]"):
        merge_many([a, AttentionState.empty(4, 3, 64)])
    with pytest.raises(ValueError, match=r"out may be states\[0\], but is states\[1\]"):
        merge_many([a, b], b)


def test_merge_rows(device, assert_state_close):
    state, part = random_state(9, 3, 64, device, seed=1), random_state(4, 3, 64, device, seed=2)
    rows = torch.tensor([8, 0, 5, 2], device=device)
    expected = double(state)
    expected.out[rows.cpu()], expected.lse[rows.cpu()] = (
        (merged := expected_merge(AttentionState(state.out[rows], state.lse[rows]), part)).out,
        merged.lse,
    )
    untouched = torch.tensor([1, 3, 4, 6, 7])
    before = state.out.cpu()[untouched].clone()
    merge_rows(state, rows, part)
    assert_state_close(state, expected)
    assert torch.equal(state.out.cpu()[untouched], before)


def test_merge_no_rows(device):
    state = random_state(3, 2, 64, device)
    before = state.out.clone()
    merge_rows(state, torch.empty(0, dtype=torch.int64, device=device), AttentionState.empty(0, 2, 64, device))
    assert torch.equal(state.out, before)


def test_merge_rows_into_a_view(device, assert_state_close):
    whole, part = random_state(9, 3, 64, device, seed=1), random_state(2, 3, 64, device, seed=2)
    expected = expected_merge(whole.rows(4, 6), part)
    merge_rows(whole.rows(3, 9), torch.tensor([1, 2], device=device), part)
    assert_state_close(whole.rows(4, 6), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finalize_rounds_once(dtype, device):
    state = random_state(5, 3, 64, device)
    assert torch.equal(finalize(state, dtype), state.out.to(dtype))
    out = torch.full((5, 3, 64), torch.nan, dtype=dtype, device=device)
    assert finalize(state, dtype, out) is out
    assert torch.equal(out, state.out.to(dtype))


def test_finalize_into_a_view(device):
    dtype = torch.bfloat16
    state = random_state(5, 3, 64, device)
    wide = torch.full((5, 4, 64), torch.nan, dtype=dtype, device=device)
    finalize(state, dtype, wide[:, :3])
    assert torch.equal(wide[:, :3], state.out.to(dtype))
    assert wide[:, 3].isnan().all()


def test_library_rows_marked_with_infinity_are_empty():
    """flashinfer 4051, flash-attention 978: libraries mark rows without keys with an LSE of +inf and junk output."""
    out = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    out[1] = torch.nan
    lse = torch.tensor([[0.5, 1.0], [math.inf, math.inf], [-math.inf, 2.0]])
    state = state_from_flash_lse(out, lse)
    assert state.out.dtype == torch.float32
    assert torch.equal(state.lse == -math.inf, torch.tensor([[False, False], [True, True], [True, False]]))
    assert not state.out[state.lse == -math.inf].any()
    assert torch.equal(state.out[0], out[0].float())


@pytest.mark.parametrize(
    ("b", "match"),
    [
        pytest.param(
            AttentionState.empty(4, 3, 64), r"b\.out must have shape \[5, 3, 64\], got \[4, 3, 64\]", id="rows"
        ),
        pytest.param(AttentionState.empty(5, 3, 64, dtype=torch.float64), "must be torch.float32", id="dtype"),
    ],
)
def test_refuses_what_does_not_fit(b, match):
    with pytest.raises(ValueError, match=match):
        merge_states(AttentionState.empty(5, 3, 64), b)


def test_refuses_rows_that_do_not_fit():
    state, part = AttentionState.empty(5, 3, 64), AttentionState.empty(2, 3, 64)
    with pytest.raises(ValueError, match=r"rows must have shape \[2\]"):
        merge_rows(state, torch.tensor([1]), part)
    with pytest.raises(ValueError, match=r"rows must be torch\.int64"):
        merge_rows(state, torch.tensor([1, 2], dtype=torch.int32), part)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16"):
        finalize(state, torch.bfloat16, torch.empty(5, 3, 64))
