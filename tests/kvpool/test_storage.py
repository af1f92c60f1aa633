"""KVStorage: shapes and sizes."""

import pytest
import torch

from loongserve.kvpool.storage import KVStorage, bytes_per_token, slots_for_bytes


def test_two_tensors_a_layer() -> None:
    storage = KVStorage(3, 10, 2, 8, torch.bfloat16)
    assert len(storage.k) == len(storage.v) == 3
    for tensor in (*storage.k, *storage.v):
        assert tensor.shape == (10, 2, 8)
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
    assert len({tensor.data_ptr() for tensor in (*storage.k, *storage.v)}) == 6


def test_bytes_are_counted() -> None:
    storage = KVStorage(3, 10, 2, 8, torch.float32)
    assert storage.bytes_per_token == 2 * 3 * 2 * 8 * 4 == bytes_per_token(3, 2, 8, torch.float32)
    assert storage.num_bytes == 10 * storage.bytes_per_token
    assert slots_for_bytes(storage.num_bytes + 1, 3, 2, 8, torch.float32) == 10


def test_an_empty_pool_is_legal() -> None:
    assert KVStorage(1, 0, 1, 4, torch.float32).k[0].shape == (0, 1, 4)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads must be at least 1, got 0"):
        KVStorage(1, 1, 0, 4, torch.float32)
    with pytest.raises(ValueError, match="hold no KV slot"):
        slots_for_bytes(7, 1, 1, 4, torch.float32)
