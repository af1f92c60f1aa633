"""Attention on CPUs in C++: plans and calls of the kernels that ``native_build`` compiles.

Many queries of a sequence go through packed tiles, few of them (decode) through rows as they lie. The calls let go of
the interpreter's lock and use as many threads as ``torch.get_num_threads()`` says at that time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loongserve.kernels.native_build import load_native
from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
# Heads that the kernels take: others go to torch.
_MIN_HEAD_DIM, _MAX_HEAD_DIM, _HEAD_DIM_STEP = 16, 256, 8
# Up to this many rows (queries times heads of a group) are streamed; packing pays above.
MAX_STREAMED_ROWS = 16
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Tensor(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("stride_token", _INT), ("stride_head", _INT))


class _State(ctypes.Structure):
    _fields_ = (
        ("out", _POINTER),
        ("lse", _POINTER),
        ("stride_out_token", _INT),
        ("stride_out_head", _INT),
        ("stride_lse_token", _INT),
        ("stride_lse_head", _INT),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("q_heads", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("dtype", _INT),
        ("sequences", _INT),
        ("q_begins", _POINTER),
        ("q_ends", _POINTER),
        ("k_begins", _POINTER),
        ("k_ends", _POINTER),
        ("upper", _POINTER),
        ("lower", _POINTER),
        ("first", _POINTER),
        ("slots", _POINTER),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("threads", _INT),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Some sequences of a plan for one kernel; all tensors int64."""

    # [sequences] each: ranges of rows of q and of keys.
    ranges: Tensor
    # [sequences]; None: no bound.
    upper: Tensor | None
    lower: Tensor | None


@dataclass(frozen=True, slots=True)
class NativePayload:
    """What the native kernels keep in a plan."""

    library: ctypes.CDLL
    tiled: Work | None
    streamed: Work | None
    # [keys] int64, or None where keys lie in order.
    slots: Tensor | None
    # [queries] int64: first visible key of each; None: 0.
    first: Tensor | None


def can_run(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether native kernels are there, and for heads and numbers like these."""
    fits = _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM and head_dim % _HEAD_DIM_STEP == 0
    return fits and dtype in _DTYPES and load_native() is not None


def _library() -> ctypes.CDLL:
    library = load_native()
    if library is None:
        raise RuntimeError("there are no native CPU kernels: ask can_run before making a plan")
    return library


def plan_striped_attention(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    diagonals: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    lower_diagonals: tuple[int | None, ...] | None = None,
) -> StripedPlan:
    """Share the sequences out; key b is visible to query a iff a + lower <= b <= a + diagonal."""
    q_spans, k_spans = list(pairwise(cu_seqlens_q)), list(pairwise(cu_seqlens_k))
    # A lone query sees one range of keys, which is what is streamed.
    streamed = [
        i
        for i, (begin, end) in enumerate(q_spans)
        if end - begin == 1 and num_q_heads // num_kv_heads <= MAX_STREAMED_ROWS
    ]
    others = sorted(set(range(len(q_spans))).difference(streamed))
    payload = NativePayload(
        library=_library(),
        tiled=_make_work(others, q_spans, k_spans, diagonals, lower_diagonals),
        streamed=_make_work(streamed, q_spans, k_spans, diagonals, lower_diagonals),
        slots=None,
        first=None,
    )
    return StripedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        cu_seqlens_k=tuple(cu_seqlens_k),
        diagonals=tuple(diagonals),
        lower_diagonals=lower_diagonals,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=payload,
    )


def plan_paged_attention(
    cu_seqlens_q: Sequence[int],
    slots: Sequence[Tensor],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    first_visible: Tensor | None = None,
) -> PagedPlan:
    """Share the requests out; query i sees the slots of its request from index ``first_visible[i]`` on."""
    slots = tuple(request_slots.to(device) for request_slots in slots)
    cu_slots = [0]
    for request_slots in slots:
        cu_slots.append(cu_slots[-1] + len(request_slots))
    q_spans, k_spans = list(pairwise(cu_seqlens_q)), list(pairwise(cu_slots))
    group = num_q_heads // num_kv_heads
    streamed = [
        i
        for i, (begin, end) in enumerate(q_spans)
        if (end - begin) * group <= MAX_STREAMED_ROWS and (first_visible is None or end - begin == 1)
    ]
    others = sorted(set(range(len(q_spans))).difference(streamed))
    payload = NativePayload(
        library=_library(),
        tiled=_make_work(others, q_spans, k_spans, None, None),
        streamed=_make_work(streamed, q_spans, k_spans, None, None),
        slots=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
        first=None if first_visible is None else first_visible.to(device).contiguous(),
    )
    return PagedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        slots=slots,
        first_visible=first_visible,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=payload,
    )


def _make_work(
    chosen: list[int],
    q_spans: list[tuple[int, int]],
    k_spans: list[tuple[int, int]],
    upper: Sequence[int] | None,
    lower: Sequence[int | None] | None,
) -> Work | None:
    if not chosen:
        return None
    ranges = [(*q_spans[i], *k_spans[i]) for i in chosen]
    bounds = [None if b is None else torch.tensor([_clamp(b[i]) for i in chosen]) for b in (upper, lower)]
    return Work(torch.tensor(ranges, dtype=torch.int64).t().contiguous(), bounds[0], bounds[1])


def _clamp(bound: int | None) -> int:
    """Keep sums with token indices within 64 bits; no lower bound is one below all."""
    if bound is None:
        return -(1 << 60)
    return max(-(1 << 60), min(1 << 60, bound))


def striped_attention(
    plan: StripedPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    *,
    scale: float,
    save: KVSave | None = None,
    soft_cap: float | None = None,
) -> None:
    """Merge one block into ``state`` and save its rows as they are packed."""
    saving: tuple[object, object, object] = (None, None, None)
    # Kept alive over the call.
    slots = None
    if save is not None:
        slots = save.slots.contiguous()
        saving = (_POINTER(slots.data_ptr()), ctypes.byref(_tensor(save.k_cache)), ctypes.byref(_tensor(save.v_cache)))
    _run(plan, q, k, v, state, scale, soft_cap, saving)


def paged_attention(
    plan: PagedPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: AttentionState,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> AttentionState:
    """Start from the identity and merge."""
    out.out.zero_()
    out.lse.fill_(-torch.inf)
    _run(plan, q, k_cache, v_cache, out, scale, soft_cap, (None, None, None))
    return out


def _run(
    plan: StripedPlan | PagedPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    scale: float,
    soft_cap: float | None,
    saving: tuple[object, object, object],
) -> None:
    payload = cast(NativePayload, plan.payload)
    tensors = [ctypes.byref(_tensor(each)) for each in (q, k, v)]
    states = _State(state.out.data_ptr(), state.lse.data_ptr(), *state.out.stride()[:2], *state.lse.stride())
    for name, work in (("loong_tiled_attention", payload.tiled), ("loong_streamed_attention", payload.streamed)):
        if work is None:
            continue
        begin = work.ranges.data_ptr()
        stride = work.ranges.stride(0) * work.ranges.itemsize
        shape = _Shape(
            plan.num_q_heads,
            plan.num_kv_heads,
            plan.head_dim,
            _DTYPES[plan.dtype],
            work.ranges.shape[1],
            begin,
            begin + stride,
            begin + 2 * stride,
            begin + 3 * stride,
            _pointer(work.upper),
            _pointer(work.lower),
            _pointer(payload.first),
            _pointer(payload.slots),
            scale,
            # 0: none.
            soft_cap or 0.0,
            torch.get_num_threads(),
        )
        if getattr(payload.library, name)(ctypes.byref(shape), *tensors, ctypes.byref(states), *saving) != 0:
            raise MemoryError(f"no memory for the buffers of {name}")


def _tensor(tensor: Tensor) -> _Tensor:
    return _Tensor(tensor.data_ptr(), *tensor.stride()[:2])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
