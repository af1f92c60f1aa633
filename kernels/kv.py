"""Store rows of K and V in slots of a pool."""

from __future__ import annotations

from torch import Tensor

from loongserve.kernels.checks import check_cache, check_last_contiguous, check_slots
from loongserve.kernels.provider import get_provider


def save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store row i of ``k`` and ``v`` in slot ``slots[i]``; -1 stores nothing.

    Args:
        k: [tokens, kv_heads, head_dim], contiguous last dim.
        v: as ``k``.
        slots: [tokens] int64 on the same device; below num_slots, no slot twice but for -1 (values are not checked:
            that would wait for the device).
        k_cache: [num_slots, kv_heads, head_dim], dtype of ``k``, contiguous last dim; changed in place.
        v_cache: as ``k_cache``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if k.dim() != 3 or k.shape != v.shape:
        raise ValueError(f"k and v must be [tokens, kv_heads, head_dim] alike, got {list(k.shape)} and {list(v.shape)}")
    check_slots("slots", slots, k.shape[0], k.device)
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_last_contiguous(name, rows)
        check_cache(f"{name}_cache", cache, rows)
    get_provider(k.device).save_kv(k, v, slots, k_cache, v_cache)
