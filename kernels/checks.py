"""Checks of arguments that the public functions of ``kernels/`` share: ValueError with expected and got."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from loongserve.kernels.state import AttentionState

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Check that query heads are a positive multiple of KV heads and that heads have a size."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads must be a positive multiple of num_kv_heads, got {num_q_heads}:{num_kv_heads}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")


def check_cu_seqlens(name: str, cu_seqlens: Sequence[int]) -> None:
    """Check that ``cu_seqlens`` are prefix sums: 0 first, never falling."""
    if len(cu_seqlens) == 0 or cu_seqlens[0] != 0:
        raise ValueError(f"{name} must start with 0, got {list(cu_seqlens)[:3]}")
    for index, (begin, end) in enumerate(pairwise(cu_seqlens)):
        if end < begin:
            raise ValueError(f"{name} must not fall, got {begin} then {end} at index {index}")


def check_cu_seqlens_pair(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> None:
    """Check the prefix sums of queries and keys of the same sequences."""
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if len(cu_seqlens_k) != len(cu_seqlens_q):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(cu_seqlens_q)} and {len(cu_seqlens_k)}"
        )


def check_window(window: int | None) -> None:
    """Check the size of a sliding window, in positions."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees itself) or None, got {window}")


def check_soft_cap(soft_cap: float | None) -> None:
    """Check the bound of the scores."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")


def check_plan_dtype(dtype: torch.dtype, provider: str) -> None:
    """Check that ``provider`` has attention for ``dtype``."""
    if dtype not in DTYPES and not (provider == "reference" and dtype == torch.float64):
        raise ValueError(
            f"dtype must be float32, bfloat16 or float16 (float64 is for the reference provider), got {dtype}"
        )


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check shape, dtype (None: any) and device."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check the device; a device without an index stands for any of its type."""
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    """Check that the last dimension is contiguous."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {list(tensor.stride())}")


def check_state(name: str, state: AttentionState, shape: tuple[int, ...], device: torch.device, provider: str) -> None:
    """Check a state of [tokens, heads, head_dim]: float32 (reference: or float64), out contiguous in its last dim."""
    if state.out.dtype != torch.float32 and not (provider == "reference" and state.out.dtype == torch.float64):
        raise ValueError(f"{name}.out must be float32 (float64 is for the reference), got {state.out.dtype}")
    if len(shape) != 3:
        raise ValueError(f"{name}.out must be [tokens, heads, head_dim], got {list(shape)}")
    check_tensor(f"{name}.out", state.out, shape, None, device)
    check_tensor(f"{name}.lse", state.lse, shape[:2], state.out.dtype, device)
    check_last_contiguous(f"{name}.out", state.out)


def check_slots(name: str, slots: Tensor, tokens: int, device: torch.device) -> None:
    """Check [tokens] int64 on the device; values are not read, which would wait for the device."""
    check_tensor(name, slots, (tokens,), torch.int64, device)


def check_cache(name: str, cache: Tensor, rows: Tensor) -> None:
    """Check that rows of K or V [tokens, kv_heads, head_dim] fit the cache [num_slots, kv_heads, head_dim]."""
    num_slots = cache.shape[0] if cache.dim() else 0
    check_tensor(name, cache, (num_slots, *rows.shape[1:]), rows.dtype, rows.device)
    check_last_contiguous(name, cache)
