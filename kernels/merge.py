"""Merge attention states over disjoint sets of keys.

    lse = log(exp(a.lse) + exp(b.lse))
    out = a.out * exp(a.lse - lse) + b.out * exp(b.lse - lse)

A commutative monoid with identity (0, -inf): any grouping of the keys gives the same result up to rounding. Differences
of the LSE of any size are exact (the smaller side rounds to nothing); two empty states merge to the empty state.

Source: LoongServe section 4.2; the merge of FlashInfer's attention states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loongserve.kernels.checks import check_slots, check_state, check_tensor
from loongserve.kernels.provider import load_provider, provider_name
from loongserve.kernels.state import AttentionState


def merge_states(a: AttentionState, b: AttentionState, out: AttentionState | None = None) -> AttentionState:
    """Merge two states of the same queries over disjoint keys.

    Args:
        a: [tokens, heads, head_dim] and [tokens, heads] float32; rows without keys are (0, -inf).
        b: as ``a``.
        out: where to write; may be ``a`` or ``b``, and a view such as ``state.rows(begin, end)``. None: a new state.

    Returns:
        ``out`` or the new state.

    Raises:
        ValueError: shapes, dtypes or devices differ.
    """
    device = a.out.device
    name = provider_name(device)
    check_state("a", a, tuple(a.out.shape), device, name)
    _check_like("b", b, a)
    if out is None:
        out = AttentionState(torch.empty_like(a.out), torch.empty_like(a.lse))
    else:
        _check_like("out", out, a)
    return load_provider(name).merge_states(a, b, out)


def merge_many(states: Sequence[AttentionState], out: AttentionState | None = None) -> AttentionState:
    """Merge any number of states of the same queries over disjoint keys, in fewer passes than two by two.

    Args:
        states: at least one; each [tokens, heads, head_dim] and [tokens, heads] float32.
        out: where to write; may be ``states[0]`` but share no memory with another. None: a new state.

    Returns:
        ``out`` or the new state.

    Raises:
        ValueError: there is no state, shapes, dtypes or devices differ, or ``out`` is a state other than the first.
    """
    if len(states) == 0:
        raise ValueError("merge_many needs at least one state, got none: AttentionState.empty is the merge of nothing")
    first = states[0]
    device = first.out.device
    name = provider_name(device)
    check_state("states[0]", first, tuple(first.out.shape), device, name)
    for index, state in enumerate(states[1:], start=1):
        _check_like(f"states[{index}]", state, first)
        if out is not None and out.out.numel() and out.out.data_ptr() == state.out.data_ptr():
            raise ValueError(f"out may be states[0], but is states[{index}]: put that state first")
    if out is None:
        out = AttentionState(torch.empty_like(first.out), torch.empty_like(first.lse))
    else:
        _check_like("out", out, first)
    return load_provider(name).merge_many(states, out)


def merge_rows(state: AttentionState, rows: Tensor, part: AttentionState) -> None:
    """Merge a state of some queries into those queries' rows of ``state``, in place.

    Args:
        state: [tokens, heads, head_dim] and [tokens, heads] float32.
        rows: [n] int64 on the same device: row i of ``part`` goes to row ``rows[i]`` of ``state``. In 0..tokens-1 and
            without duplicates (neither is checked: that would wait for the device).
        part: of n queries.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    device = state.out.device
    name = provider_name(device)
    check_state("state", state, tuple(state.out.shape), device, name)
    check_slots("rows", rows, part.num_tokens, device)
    check_state("part", part, (part.num_tokens, *state.out.shape[1:]), device, name)
    if part.out.dtype != state.out.dtype:
        raise ValueError(f"part.out must be {state.out.dtype}, got {part.out.dtype}")
    load_provider(name).merge_rows(state, rows, part)


def finalize(state: AttentionState, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Round the output of a state to ``dtype``: once, when every key has been merged.

    Args:
        state: [tokens, heads, head_dim] float32.
        dtype: of the result.
        out: [tokens, heads, head_dim] ``dtype``, contiguous last dim. None: a new tensor.

    Returns:
        ``out`` or the new tensor; 0 for queries without keys.

    Raises:
        ValueError: ``out`` does not fit.
    """
    if out is None:
        out = torch.empty_like(state.out, dtype=dtype)
    check_tensor("out", out, tuple(state.out.shape), dtype, state.out.device)
    return load_provider(provider_name(state.out.device)).finalize(state, out)


def state_from_flash_lse(out: Tensor, lse: Tensor) -> AttentionState:
    """Make a state of what another library's attention returned, where empty rows are marked with an LSE of +inf.

    Only here does +inf mean empty: in a state it is an overflow, and merging does not hide it.

    Args:
        out: [tokens, heads, head_dim], any floating dtype; ignored in empty rows.
        lse: [tokens, heads], natural logarithm; +inf or -inf in empty rows.

    Raises:
        ValueError: the shapes do not fit.
    """
    if out.dim() != 3:
        raise ValueError(f"out must be [tokens, heads, head_dim], got {list(out.shape)}")
    check_tensor("lse", lse, tuple(out.shape[:2]), None, out.device)
    empty = torch.isinf(lse)
    return AttentionState(
        out=out.float().masked_fill(empty.unsqueeze(-1), 0.0),
        lse=lse.float().masked_fill(empty, -math.inf),
    )


def _check_like(name: str, state: AttentionState, model: AttentionState) -> None:
    for field in ("out", "lse"):
        tensor, expected = getattr(state, field), getattr(model, field)
        check_tensor(f"{name}.{field}", tensor, tuple(expected.shape), expected.dtype, expected.device)
