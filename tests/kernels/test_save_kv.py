"""save_kv: rows of K and V to slots."""

import pytest
import torch

from loongserve.kernels.kv import save_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("skip", [1, 3], ids=["none_skipped", "some_skipped"])
def test_stores_rows_and_touches_nothing_else(dtype, skip, device):
    k, v = (torch.randn(10, 3, 64, device=device).to(dtype) for _ in range(2))
    slots = torch.randperm(25, generator=torch.Generator().manual_seed(0))[:10].to(device)
    if skip > 1:
        slots[::skip] = -1
    k_cache, v_cache = (torch.full((25, 3, 64), torch.nan, dtype=dtype, device=device) for _ in range(2))
    save_kv(k, v, slots, k_cache, v_cache)
    kept = slots >= 0
    untouched = torch.ones(25, dtype=torch.bool, device=device)
    untouched[slots[kept]] = False
    for rows, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[slots[kept]], rows[kept])
        assert cache[untouched].isnan().all()


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no_rows", "all_skipped"])
def test_stores_nothing(slots, device):
    k = torch.ones(len(slots), 2, 64, device=device)
    cache = torch.zeros(4, 2, 64, device=device)
    save_kv(k, k, torch.tensor(slots, dtype=torch.int64, device=device), cache, cache)
    assert not cache.any()


def test_strided_rows_and_caches(device):
    packed = torch.randn(5, 6, 64, device=device)
    k, v = packed[:, 2:4], packed[:, 4:]
    wide = torch.zeros(8, 2, 2, 64, device=device)
    slots = torch.tensor([7, -1, 0, 3, 2], device=device)
    save_kv(k, v, slots, wide[:, 0], wide[:, 1])
    kept = torch.tensor([0, 2, 3, 4], device=device)
    assert torch.equal(wide[slots[kept], 0], k[kept])
    assert torch.equal(wide[slots[kept], 1], v[kept])
    assert not wide[[1, 4, 5, 6]].any()


def test_refuses_what_does_not_fit():
    k, cache, slots = torch.zeros(3, 2, 64), torch.zeros(8, 2, 64), torch.arange(3)
    with pytest.raises(ValueError, match="k and v must be"):
        save_kv(k, k[:2], slots, cache, cache)
    with pytest.raises(ValueError, match=r"slots must be torch\.int64, got torch\.int32"):
        save_kv(k, k, slots.int(), cache, cache)
    with pytest.raises(ValueError, match=r"slots must have shape \[3\], got \[2\]"):
        save_kv(k, k, slots[:2], cache, cache)
    with pytest.raises(ValueError, match=r"v_cache must be torch\.float32, got torch\.bfloat16"):
        save_kv(k, k, slots, cache, cache.bfloat16())
