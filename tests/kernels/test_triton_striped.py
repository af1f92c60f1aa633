"""What is Triton's own in striped_attention: the tiles that a plan lists, head sizes, refusals."""

import pytest
import torch

from loongserve.kernels import reference
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import plan_striped_attention, striped_attention
from loongserve.kernels.triton_provider import plan_striped_attention as triton_plan
from loongserve.kernels.triton_striped_plan import list_tiles

# query counts, key counts, diagonals, group, block_m
TILE_CASES = [
    pytest.param(([1], [1], [0]), 1, 16, id="one"),
    pytest.param(([1], [1], [-1]), 1, 16, id="blind"),
    pytest.param(([0, 40, 7], [9, 33, 0], [0, -1, 0]), 3, 16, id="gqa_3_empty_members"),
    pytest.param(([100], [100], [0]), 4, 128, id="gqa_4"),
    pytest.param(([50, 50], [200, 10], [1 << 40, -(1 << 40)]), 1, 16, id="all_and_nothing"),
    pytest.param(([90], [20], [-60]), 7, 32, id="only_the_last_rows"),
]


def cumulated(counts):
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


@pytest.mark.parametrize(("lengths", "group", "block_m"), TILE_CASES)
def test_tiles_cover_the_seeing_rows_and_no_blind_tile(lengths, group, block_m):
    cu_q, cu_k = cumulated(lengths[0]), cumulated(lengths[1])
    tiles = list_tiles(cu_q, cu_k, lengths[2], group, block_m).tolist()
    work = []
    covered = set()
    for q_begin, num_queries, row_begin, k_begin, num_keys, diagonal, _ in tiles:
        sequence = next(i for i, begin in enumerate(cu_q) if begin == q_begin and lengths[0][i] == num_queries)
        assert (k_begin, num_keys) == (cu_k[sequence], lengths[1][sequence])
        rows = range(row_begin, min(row_begin + block_m, num_queries * group))
        seen = [max(0, min(num_keys, row // group + diagonal + 1)) for row in rows]
        assert max(seen) > 0
        assert seen == [max(0, min(num_keys, row // group + lengths[2][sequence] + 1)) for row in rows]
        assert covered.isdisjoint((sequence, row) for row in rows)
        covered.update((sequence, row) for row in rows)
        work.append(max(seen))
    assert work == sorted(work, reverse=True)
    for sequence, (num_queries, num_keys, diagonal) in enumerate(zip(*lengths, strict=True)):
        for row in range(num_queries * group):
            if min(num_keys, row // group + diagonal + 1) > 0:
                assert (sequence, row) in covered


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 112, 192])
def test_head_sizes(head_dim, dtype, device, assert_state_close):
    """Heads that are not a power of two are split in two: 112 is 64 and 48, padded to 64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(20, 3, head_dim, generator=generator).to(dtype).to(device)
    # A wider tensor around K and V, NaN where a tail must not be read.
    k, v = (torch.full((35, 1, head_dim + 16), torch.nan, dtype=dtype, device=device)[..., :head_dim] for _ in "kv")
    k.copy_(torch.randn(35, 1, head_dim, generator=generator))
    v.copy_(torch.randn(35, 1, head_dim, generator=generator))
    plan = plan_striped_attention(
        [0, 20], [0, 35], [11], num_q_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype, device=device
    )
    state = AttentionState.empty(20, 3, head_dim, device)
    striped_attention(plan, q, k, v, state, scale=head_dim**-0.5)
    visible = torch.ones(20, 35, dtype=torch.bool).tril(11)
    expected = reference.attend(q.cpu(), k.cpu(), v.cpu(), visible, head_dim**-0.5, torch.float64)
    assert_state_close(state, expected, dtype)


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
def test_foreign_rows_of_the_block_are_not_read(device):
    """vllm 41623: rows of other sequences are NaN here, on both sides of the one that is looked at."""
    q = torch.randn(9, 2, 64, device=device)
    k, v = torch.randn(75, 1, 64, device=device), torch.randn(75, 1, 64, device=device)
    k[:20], k[33:], v[:20], v[33:] = (torch.nan,) * 4
    plan = plan_striped_attention(
        [0, 0, 9, 9],
        [0, 20, 33, 75],
        [0, 3, 0],
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=64,
        dtype=torch.float32,
        device=device,
    )
    state = AttentionState.empty(9, 2, 64, device)
    striped_attention(plan, q, k, v, state, scale=0.125)
    assert torch.isfinite(state.out).all()
    assert torch.isfinite(state.lse).all()


@pytest.mark.parametrize("head_dim", [8, 272])
def test_refuses_head_sizes_out_of_range(head_dim):
    with pytest.raises(ValueError, match=f"takes head_dim 16 to 256, got {head_dim}"):
        triton_plan(
            [0, 1],
            [0, 1],
            [0],
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("provider", ["triton"], indirect=True)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_refuses_scales_that_are_not_positive(scale, device):
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "device": device}
    plan = plan_striped_attention([0, 1], [0, 1], [0], **shape)
    rows = torch.zeros(1, 1, 64, device=device)
    with pytest.raises(ValueError, match="scale must be positive"):
        striped_attention(plan, rows, rows, rows, AttentionState.empty(1, 1, 64, device), scale=scale)
