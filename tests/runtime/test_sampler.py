"""The sampler: order of the filters, randomness by (seed, position) alone, independence of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.runtime import sampler
from loongserve.runtime.protocol import SamplingParams
from loongserve.runtime.sampler import sample, uniform


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _draws(row: list[float], params: SamplingParams, count: int) -> np.ndarray:
    """Relative frequency of each token over ``count`` positions."""
    logits = torch.tensor([row]).expand(count, -1).contiguous()
    return np.bincount(sample(logits, [params] * count, range(count)), minlength=len(row)) / count


def test_greedy_takes_the_lowest_id_at_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -2.0, -0.5]])
    assert sample(logits, [SamplingParams()] * 3, [0, 9, 4]) == [1, 0, 3]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 7), [], []) == []


def test_frequencies_follow_the_softmax() -> None:
    row, temperature = [1.0, 0.0, -1.0, 2.0, 0.5], 0.7
    expected = torch.softmax(torch.tensor(row) / temperature, 0).numpy()
    got = _draws(row, SamplingParams(temperature=temperature, seed=3), 20_000)
    # 5 standard deviations of the most variable entry.
    assert np.abs(got - expected).max() < 5 * np.sqrt(0.25 / 20_000)


def test_top_p_is_measured_on_what_top_k_left() -> None:
    # Probabilities 0.4, 0.3, 0.2, 0.1; the two that top-k keeps are 4/7 and 3/7, so that top_p 0.5 keeps one alone.
    row = np.log([0.3, 0.4, 0.1, 0.2]).tolist()
    assert _draws(row, SamplingParams(1.0, top_p=0.5, top_k=2), 200).tolist() == [0.0, 1.0, 0.0, 0.0]
    # Without top-k, 0.4 falls short of 0.5 and the token that crosses is kept.
    got = _draws(row, SamplingParams(1.0, top_p=0.5), 20_000)
    np.testing.assert_allclose(got, [3 / 7, 4 / 7, 0.0, 0.0], atol=0.02)


def test_temperature_comes_before_top_p() -> None:
    row = np.log([0.6, 0.3, 0.1]).tolist()
    assert _draws(row, SamplingParams(0.1, top_p=0.9), 200).tolist() == [1.0, 0.0, 0.0]
    assert (_draws(row, SamplingParams(10.0, top_p=0.9), 200) > 0).all()


def test_top_k_at_ties_keeps_the_lowest_ids() -> None:
    got = _draws([1.0, 0.0, 1.0, 1.0, 1.0], SamplingParams(1.0, top_k=2), 500)
    assert got[0] > 0.3
    assert got[2] > 0.3
    assert got[0] + got[2] == 1.0


def test_top_k_one_is_greedy() -> None:
    logits = _logits(16, 501).round()
    greedy = sample(logits, [SamplingParams()] * 16, range(16))
    assert sample(logits, [SamplingParams(1.5, top_k=1, seed=8)] * 16, range(16)) == greedy
    assert sample(logits, [SamplingParams(1.5, top_p=1e-9, seed=8)] * 16, range(16)) == greedy


def test_flat_nucleus_wider_than_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _logits(8, 3000) / 10
    params = [SamplingParams(1.0, top_p=0.95, seed=5)] * 8
    expected = sample(logits, params, range(8))
    monkeypatch.setattr(sampler, "NUCLEUS_FIRST_LOOK", 3000)
    assert sample(logits, params, range(8)) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e308])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 3e38, -3e38, float("-inf")]])
    params = [SamplingParams(temperature, top_p=0.9, seed=1)]
    for position in range(50):
        (token,) = sample(logits, params, [position])
        assert token != 4
        assert token == 2 or temperature > 1


def test_banned_tokens_are_never_drawn() -> None:
    row = [float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]
    assert _draws(row, SamplingParams(1e3), 400)[[0, 2, 4]].sum() == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 4.0]),
            st.sampled_from([1.0, 0.9, 0.2]),
            st.sampled_from([0, 1, 5, 10_000]),
            st.integers(0, 2**64 - 1),
            st.integers(0, 1 << 20),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 1000),
)
def test_rows_are_independent(rows: list[tuple[float, float, int, int, int]], seed: int) -> None:
    logits = _logits(len(rows), 1333, seed)
    params = [SamplingParams(*row[:4]) for row in rows]
    positions = [row[4] for row in rows]
    batched = sample(logits, params, positions)
    assert batched == [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(len(rows))]
    assert batched[::-1] == sample(logits.flip(0), params[::-1], positions[::-1])


def test_randomness_is_a_function_of_seed_and_position() -> None:
    points = {(seed, position): uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(200)}
    assert len(set(points.values())) == len(points)
    assert all(0.0 <= point < 1.0 for point in points.values())
    assert points == {key: uniform(*key) for key in points}
    # A change of the generator would change every seeded answer.
    assert uniform(7, 11) == np.random.Generator(np.random.Philox(key=7, counter=11)).random()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 4, dtype=torch.float64), [SamplingParams()], [0])
    with pytest.raises(ValueError, match="2 rows, 1 params"):
        sample(torch.zeros(2, 4), [SamplingParams()], [0, 1])
    broken = torch.zeros(3, 4)
    broken[2, 1] = float("nan")
    with pytest.raises(ValueError, match="row 2"):
        sample(broken, [SamplingParams()] * 3, [0, 1, 2])
