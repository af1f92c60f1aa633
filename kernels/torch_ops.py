"""The public functions as operators of torch: ``torch.compile(fullgraph=True)`` goes through code that calls them.

    import loongserve.kernels.torch_ops        once, anywhere, before compiling

registers the operators ``torch.ops.loongserve.*`` and has compiled code call these in place of the functions; nothing
else changes, and code that is not compiled does not notice. Each operator writes to tensors that it is given and
returns nothing, so its fake kernel has nothing to do; a function checks its arguments when the graph runs.

Plans are made outside of compiled code and passed in like any argument. A graph knows a plan by its handle, a tensor:
another plan, of other lengths, needs no other graph. The plan must live as long as it is used. This module alone
imports torch's compiler, which takes a second or two; no other module of ``kernels/`` imports it.
"""

# torch's decorators have no types that mypy can follow.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from loongserve.kernels import activation, kv, merge, norm, paged, rope, striped
from loongserve.kernels.plan_handle import find_plan
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan

_NAMESPACE = "loongserve"


def _define(schema: str, run: Any) -> Any:
    """Define an operator that writes to its arguments: its real kernel for every device, and a fake one."""
    name = schema.partition("(")[0]
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.define(qualified, schema.removeprefix(name))
    torch.library.impl(qualified, "default", run)
    torch.library.register_fake(qualified, _do_nothing)
    return getattr(getattr(torch.ops, _NAMESPACE), name)


def _do_nothing(*arguments: object) -> None:
    """Stand for an operator in tracing: no shape changes, and nothing is returned."""


def _run_striped(
    out: Tensor,
    lse: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    handle: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> None:
    save = None
    if slots is not None and k_cache is not None and v_cache is not None:
        save = KVSave(slots, k_cache, v_cache)
    state = AttentionState(out, lse)
    striped.striped_attention(find_plan(handle), q, k, v, state, scale=scale, save=save, soft_cap=soft_cap)


def _run_paged(
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    soft_cap: float | None,
) -> None:
    state = AttentionState(out, lse)
    paged.paged_attention(find_plan(handle), q, k_cache, v_cache, state, scale=scale, soft_cap=soft_cap)


def _run_merge_states(out: Tensor, lse: Tensor, a_out: Tensor, a_lse: Tensor, b_out: Tensor, b_lse: Tensor) -> None:
    merge.merge_states(AttentionState(a_out, a_lse), AttentionState(b_out, b_lse), AttentionState(out, lse))


def _run_merge_many(out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    states = [AttentionState(*each) for each in zip(outs, lses, strict=True)]
    merge.merge_many(states, AttentionState(out, lse))


def _run_merge_rows(out: Tensor, lse: Tensor, rows: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    merge.merge_rows(AttentionState(out, lse), rows, AttentionState(part_out, part_lse))


def _run_finalize(out: Tensor, state_out: Tensor, state_lse: Tensor) -> None:
    merge.finalize(AttentionState(state_out, state_lse), out.dtype, out)


def _run_save_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    kv.save_kv(k, v, slots, k_cache, v_cache)


def _run_gather_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    kv.gather_kv(k_cache, v_cache, slots, out=(k, v))


def _run_rms_norm(out: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> None:
    norm.rms_norm(x, weight, eps, residual=residual, out=out)


def _run_apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rotary_dim: int | None, interleaved: bool
) -> None:
    rope.apply_rope(x, cos, sin, positions, rotary_dim=rotary_dim, interleaved=interleaved)


def _run_silu_and_mul(out: Tensor, x: Tensor) -> None:
    activation.silu_and_mul(x, out)


def _run_gelu_and_mul(out: Tensor, x: Tensor, approximate: Literal["none", "tanh"]) -> None:
    activation.gelu_and_mul(x, out, approximate=approximate)


_striped_attention = _define(
    "striped_attention(Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? k_cache, Tensor(d!)? v_cache, Tensor handle, "
    "Tensor q, Tensor k, Tensor v, Tensor? slots, float scale, float? soft_cap) -> ()",
    _run_striped,
)
_paged_attention = _define(
    "paged_attention(Tensor(a!) out, Tensor(b!) lse, Tensor handle, Tensor q, Tensor k_cache, Tensor v_cache, "
    "float scale, float? soft_cap) -> ()",
    _run_paged,
)
_merge_states = _define(
    "merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor a_out, Tensor a_lse, Tensor b_out, Tensor b_lse) -> ()",
    _run_merge_states,
)
_merge_many = _define("merge_many(Tensor(a!) out, Tensor(b!) lse, Tensor[] outs, Tensor[] lses) -> ()", _run_merge_many)
_merge_rows = _define(
    "merge_rows(Tensor(a!) out, Tensor(b!) lse, Tensor rows, Tensor part_out, Tensor part_lse) -> ()", _run_merge_rows
)
_finalize = _define("finalize(Tensor(a!) out, Tensor state_out, Tensor state_lse) -> ()", _run_finalize)
_save_kv = _define(
    "save_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots) -> ()", _run_save_kv
)
_gather_kv = _define(
    "gather_kv(Tensor(a!) k, Tensor(b!) v, Tensor k_cache, Tensor v_cache, Tensor slots) -> ()", _run_gather_kv
)
_rms_norm = _define(
    "rms_norm(Tensor(a!) out, Tensor(b!)? residual, Tensor x, Tensor weight, float eps) -> ()", _run_rms_norm
)
_apply_rope = _define(
    "apply_rope(Tensor(a!) x, Tensor cos, Tensor sin, Tensor positions, int? rotary_dim, bool interleaved) -> ()",
    _run_apply_rope,
)
_silu_and_mul = _define("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _run_silu_and_mul)
_gelu_and_mul = _define("gelu_and_mul(Tensor(a!) out, Tensor x, str approximate) -> ()", _run_gelu_and_mul)


# What compiled code calls in place of each function: same signature, same result.


@torch.compiler.substitute_in_graph(striped.striped_attention)
def _traced_striped_attention(
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
    slots, k_cache, v_cache = (None, None, None) if save is None else (save.slots, save.k_cache, save.v_cache)
    _striped_attention(state.out, state.lse, k_cache, v_cache, plan.handle, q, k, v, slots, scale, soft_cap)


@torch.compiler.substitute_in_graph(paged.paged_attention)
def _traced_paged_attention(
    plan: paged.PagedPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: AttentionState,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> AttentionState:
    _paged_attention(out.out, out.lse, plan.handle, q, k_cache, v_cache, scale, soft_cap)
    return out


@torch.compiler.substitute_in_graph(merge.merge_states)
def _traced_merge_states(a: AttentionState, b: AttentionState, out: AttentionState | None = None) -> AttentionState:
    if out is None:
        out = AttentionState(torch.empty_like(a.out), torch.empty_like(a.lse))
    _merge_states(out.out, out.lse, a.out, a.lse, b.out, b.lse)
    return out


@torch.compiler.substitute_in_graph(merge.merge_many)
def _traced_merge_many(states: Sequence[AttentionState], out: AttentionState | None = None) -> AttentionState:
    if out is None:
        out = AttentionState(torch.empty_like(states[0].out), torch.empty_like(states[0].lse))
    _merge_many(out.out, out.lse, [state.out for state in states], [state.lse for state in states])
    return out


@torch.compiler.substitute_in_graph(merge.merge_rows)
def _traced_merge_rows(state: AttentionState, rows: Tensor, part: AttentionState) -> None:
    _merge_rows(state.out, state.lse, rows, part.out, part.lse)


@torch.compiler.substitute_in_graph(merge.finalize)
def _traced_finalize(state: AttentionState, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty_like(state.out, dtype=dtype)
    _finalize(out, state.out, state.lse)
    return out


@torch.compiler.substitute_in_graph(kv.save_kv)
def _traced_save_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _save_kv(k_cache, v_cache, k, v, slots)


@torch.compiler.substitute_in_graph(kv.gather_kv)
def _traced_gather_kv(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        shape = (slots.shape[0], *k_cache.shape[1:])
        out = (k_cache.new_empty(shape), v_cache.new_empty(shape))
    _gather_kv(out[0], out[1], k_cache, v_cache, slots)
    return out


@torch.compiler.substitute_in_graph(norm.rms_norm)
def _traced_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm(out, residual, x, weight, eps)
    return out


@torch.compiler.substitute_in_graph(rope.apply_rope)
def _traced_apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> None:
    _apply_rope(x, cos, sin, positions, rotary_dim, interleaved)


@torch.compiler.substitute_in_graph(activation.silu_and_mul)
def _traced_silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    _silu_and_mul(out, x)
    return out


@torch.compiler.substitute_in_graph(activation.gelu_and_mul)
def _traced_gelu_and_mul(
    x: Tensor, out: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    if out is None:
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    _gelu_and_mul(out, x, approximate)
    return out
