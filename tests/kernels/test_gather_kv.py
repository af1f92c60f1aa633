"""gather_kv: slots of a pool to rows of K and V."""

import pytest
import torch

from loongserve.kernels.kv import gather_kv, save_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "slots",
    [[], [3], [24, 0, 7, 7, 13] * 9, [5, -1, 5, 0], [-1, -1]],
    ids=["none", "one", "many", "some", "all_skipped"],
)
def test_copies_slots(slots, dtype, device):
    """Other slots are NaN and must not come near a row, not even one of zeros."""
    slots = torch.tensor(slots, dtype=torch.int64, device=device)
    k_cache, v_cache = (torch.full((25, 3, 64), torch.nan, dtype=dtype, device=device) for _ in range(2))
    kept = slots[slots >= 0]
    for cache in (k_cache, v_cache):
        cache[kept] = torch.randn(25, 3, 64, device=device).to(dtype)[kept]
    out = tuple(torch.full((len(slots), 3, 64), torch.nan, dtype=dtype, device=device) for _ in range(2))
    for k, v in (gather_kv(k_cache, v_cache, slots), gather_kv(k_cache, v_cache, slots, out=out)):
        for rows, cache in ((k, k_cache), (v, v_cache)):
            assert torch.equal(rows[slots >= 0], cache[kept])
            assert not rows[slots < 0].any()
    assert gather_kv(k_cache, v_cache, slots, out=out) is out


def test_strided(device):
    wide, packed = torch.randn(8, 2, 2, 80, device=device), torch.zeros(5, 6, 80, device=device)
    slots = torch.tensor([7, 0, -1, 3, 2], device=device)
    gather_kv(wide[:, 0], wide[:, 1], slots, out=(packed[:, 2:4], packed[:, 4:]))
    kept = slots >= 0
    assert torch.equal(packed[kept, 2:4], wide[slots[kept], 0])
    assert torch.equal(packed[kept, 4:], wide[slots[kept], 1])
    assert not packed[:, :2].any()
    assert not packed[2].any()


def test_undoes_save_kv(device):
    k, v = torch.randn(2, 6, 1, 64, device=device)
    slots = torch.tensor([9, 4, 0, 2, 8, 5], device=device)
    k_cache, v_cache = torch.zeros(2, 10, 1, 64, device=device)
    save_kv(k, v, slots, k_cache, v_cache)
    gathered = gather_kv(k_cache, v_cache, slots)
    assert torch.equal(gathered[0], k)
    assert torch.equal(gathered[1], v)


def test_refuses_what_does_not_fit():
    cache, slots = torch.zeros(8, 2, 64), torch.arange(3)
    with pytest.raises(ValueError, match="k_cache and v_cache must be"):
        gather_kv(cache, cache[:4], slots)
    with pytest.raises(ValueError, match=r"slots must be torch\.int64, got torch\.int32"):
        gather_kv(cache, cache, slots.int())
    with pytest.raises(ValueError, match=r"out v must have shape \[3, 2, 64\], got \[2, 2, 64\]"):
        gather_kv(cache, cache, slots, out=(torch.zeros(3, 2, 64), torch.zeros(2, 2, 64)))
