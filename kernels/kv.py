"""Move rows of K and V between packed tensors and the slots of a pool: ``save_kv`` scatters, ``gather_kv`` gathers."""

from __future__ import annotations

from torch import Tensor

from loongserve.kernels.checks import check_cache, check_last_contiguous, check_slots, check_tensor
from loongserve.kernels.provider import get_provider


def save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store row i of ``k`` and ``v`` in slot ``slots[i]``; -1 stores nothing.

    Dense writing is the case without -1.

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


def gather_kv(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Copy K and V of slot ``slots[i]`` to row i; -1 gives zeros.

    Args:
        k_cache: [num_slots, kv_heads, head_dim], contiguous last dim.
        v_cache: as ``k_cache``.
        slots: [tokens] int64 on the same device, in any order, duplicates are legal; below num_slots (not checked: that
            would wait for the device).
        out: K and V to write to, each [tokens, kv_heads, head_dim], dtype of the caches, contiguous last dim, and no
            part of the caches. None: new tensors.

    Returns:
        K and V: ``out`` or the new tensors.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if k_cache.dim() != 3 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must be [num_slots, kv_heads, head_dim] alike, got {list(k_cache.shape)} and "
            f"{list(v_cache.shape)}"
        )
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype, k_cache.device)
    shape = (slots.numel(), *k_cache.shape[1:])
    check_slots("slots", slots, slots.numel(), k_cache.device)
    if out is None:
        out = (k_cache.new_empty(shape), v_cache.new_empty(shape))
    for name, cache, rows in (("k", k_cache, out[0]), ("v", v_cache, out[1])):
        check_last_contiguous(f"{name}_cache", cache)
        check_tensor(f"out {name}", rows, shape, k_cache.dtype, k_cache.device)
        check_last_contiguous(f"out {name}", rows)
    get_provider(k_cache.device).gather_kv(k_cache, v_cache, slots, *out)
    return out
