"""Paged attention on CPUs.

Three ways, chosen request by request in the plan. Short decodes are gathered together, padded to one length, and
attended to in one go, for what they cost is calls, not arithmetic. Of the rest, slots in few runs are read in place,
run by run, and merged; other slots are gathered. Inputs below float32 are widened after gathering. Slots that no query
of a request sees are left out; where its queries then see different slots, these are gathered and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loongserve.kernels.cpu_attention import attend, attend_masked, softmax_
from loongserve.kernels.cpu_elementwise import merge_states
from loongserve.kernels.paged import PagedPlan
from loongserve.kernels.state import AttentionState

# Slots whose runs are at least this long on average are read in place.
_MIN_RUN_TOKENS = 256
# Decodes over at most this many slots are taken together,
_MAX_SHORT_TOKENS = 384
# as long as the gathered slots, padding included, are at most this many
_MAX_BATCH_TOKENS = 4096
# and the longest is at most this many times the shortest.
_MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class _Single:
    """One request's queries and its slots: contiguous runs or, where there are none, slots to gather."""

    q_begin: int
    q_end: int
    runs: tuple[tuple[int, int], ...]
    slots: Tensor | None


@dataclass(frozen=True, slots=True)
class _Windowed:
    """One request whose queries see different slots."""

    q_begin: int
    q_end: int
    slots: Tensor
    # [queries] int64: index in ``slots`` of the first that each sees.
    first_visible: Tensor

    def find_visible(self, begin: int, end: int) -> tuple[int, int, Tensor | None]:
        """Answer the slots that queries begin..end-1 see, for ``attend_masked``."""
        firsts = self.first_visible[begin:end]
        first, last = int(firsts.min()), len(self.slots)
        return first, last, torch.arange(first, last) >= firsts[:, None]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests of one query each, padded to the longest."""

    # [requests] int64
    queries: Tensor
    # [requests * longest] int64, padded with a slot of the request: foreign slots may hold anything, even NaN.
    slots: Tensor
    # [requests * kv_heads * longest] int64: slot * kv_heads + head, to gather heads first from a contiguous cache.
    rows: Tensor
    # [requests, 1, longest] bool: true where there is padding.
    padding: Tensor


@dataclass(frozen=True, slots=True)
class _Payload:
    singles: tuple[_Single, ...]
    windowed: tuple[_Windowed, ...]
    batches: tuple[_Batch, ...]
    # Queries without slots, [rows] int64.
    empty: Tensor


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
    """Choose a way for every request."""
    slots = tuple(request_slots.to(device) for request_slots in slots)
    singles: list[_Single] = []
    windowed: list[_Windowed] = []
    short: list[tuple[int, Tensor]] = []
    empty: list[int] = []
    for (begin, end), request_slots in zip(pairwise(cu_seqlens_q), slots, strict=True):
        firsts = None if first_visible is None or end == begin else first_visible[begin:end]
        if firsts is not None:
            skipped = int(firsts.min())
            request_slots, firsts = request_slots[skipped:], firsts - skipped
            if not firsts.any():
                firsts = None
        if len(request_slots) == 0:
            empty.extend(range(begin, end))
        elif firsts is not None:
            windowed.append(_Windowed(begin, end, request_slots, firsts))
        elif end - begin == 1 and len(request_slots) <= _MAX_SHORT_TOKENS:
            short.append((begin, request_slots))
        elif end > begin:
            runs = _find_runs(request_slots)
            singles.append(_Single(begin, end, runs, None if runs else request_slots))
    batches = []
    for batch in _group_by_length(short):
        if len(batch) > 1:
            batches.append(_pad(batch, num_kv_heads))
        else:
            query, request_slots = batch[0]
            runs = _find_runs(request_slots)
            singles.append(_Single(query, query + 1, runs, None if runs else request_slots))
    return PagedPlan(
        provider="cpu",
        cu_seqlens_q=tuple(cu_seqlens_q),
        slots=slots,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        payload=_Payload(tuple(singles), tuple(windowed), tuple(batches), torch.tensor(empty, dtype=torch.int64)),
        first_visible=first_visible,
    )


def _find_runs(slots: Tensor) -> tuple[tuple[int, int], ...]:
    """Split slots into contiguous runs (begin, end); none if they are short on average and more than one."""
    breaks = (slots.diff() != 1).nonzero().squeeze(1).add_(1)
    if len(breaks) and (len(breaks) + 1) * _MIN_RUN_TOKENS > len(slots):
        return ()
    edges = [0, *breaks.tolist(), len(slots)]
    first = slots[edges[:-1]].tolist()
    return tuple((slot, slot + end - begin) for slot, (begin, end) in zip(first, pairwise(edges), strict=True))


def _group_by_length(requests: list[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """Group requests so that none of the limits on batches is passed."""
    groups: list[list[tuple[int, Tensor]]] = []
    for query, slots in sorted(requests, key=lambda request: len(request[1])):
        if groups:
            group = groups[-1]
            if (len(group) + 1) * len(slots) <= _MAX_BATCH_TOKENS and len(slots) <= _MAX_PADDING * len(group[0][1]):
                group.append((query, slots))
                continue
        groups.append([(query, slots)])
    return groups


def _pad(requests: list[tuple[int, Tensor]], kv_heads: int) -> _Batch:
    longest = max(len(slots) for _, slots in requests)
    padded = torch.stack([torch.cat((slots, slots[-1:].expand(longest - len(slots)))) for _, slots in requests])
    lengths = torch.tensor([len(slots) for _, slots in requests])
    return _Batch(
        queries=torch.tensor([query for query, _ in requests], dtype=torch.int64),
        slots=padded.flatten(),
        rows=(padded[:, None, :] * kv_heads + torch.arange(kv_heads)[:, None]).flatten(),
        padding=(torch.arange(longest) >= lengths[:, None]).unsqueeze(1),
    )


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
    """Attend as planned."""
    payload = cast(_Payload, plan.payload)
    q = q.float()
    for single in payload.singles:
        _attend_single(single, q, k_cache, v_cache, out.rows(single.q_begin, single.q_end), scale, soft_cap)
    for each in payload.windowed:
        k, v = (cache.index_select(0, each.slots).float() for cache in (k_cache, v_cache))
        part = attend_masked(q[each.q_begin : each.q_end], k, v, scale, soft_cap, each.find_visible)
        out.out[each.q_begin : each.q_end], out.lse[each.q_begin : each.q_end] = part.out, part.lse
    for batch in payload.batches:
        _attend_batch(batch, q, k_cache, v_cache, out, scale, soft_cap)
    if len(payload.empty):
        out.out.index_fill_(0, payload.empty, 0.0)
        out.lse.index_fill_(0, payload.empty, -torch.inf)
    return out


def _attend_single(
    single: _Single,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: AttentionState,
    scale: float,
    soft_cap: float | None,
) -> None:
    queries = q[single.q_begin : single.q_end]
    if single.slots is not None:
        pieces = [(k_cache.index_select(0, single.slots), v_cache.index_select(0, single.slots))]
    else:
        pieces = [(k_cache[begin:end], v_cache[begin:end]) for begin, end in single.runs]
    for index, (k, v) in enumerate(pieces):
        part = attend(queries, k.float(), v.float(), scale, causal=False, soft_cap=soft_cap)
        if index:
            merge_states(out, part, out)
        else:
            out.out.copy_(part.out)
            out.lse.copy_(part.lse)


def _attend_batch(
    batch: _Batch,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: AttentionState,
    scale: float,
    soft_cap: float | None,
) -> None:
    requests, (_, kv_heads, head_dim) = len(batch.queries), k_cache.shape
    group = q.shape[1] // kv_heads
    # [requests * kv_heads, group, head_dim]
    queries = q.index_select(0, batch.queries).mul_(scale).view(requests * kv_heads, group, head_dim)
    k, v = (_gather_heads_first(batch, cache).float() for cache in (k_cache, v_cache))
    scores = torch.bmm(queries, k.transpose(1, 2))
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.view(requests, kv_heads * group, -1).masked_fill_(batch.padding, -torch.inf)
    weights, lse = softmax_(scores)
    out.out.index_copy_(0, batch.queries, torch.bmm(weights, v).view(requests, kv_heads * group, head_dim))
    out.lse.index_copy_(0, batch.queries, lse.view(requests, kv_heads * group))


def _gather_heads_first(batch: _Batch, cache: Tensor) -> Tensor:
    """Gather [requests * kv_heads, longest, head_dim], in one copy where the cache is contiguous."""
    _, kv_heads, head_dim = cache.shape
    requests = len(batch.queries)
    if cache.is_contiguous():
        return cache.view(-1, head_dim).index_select(0, batch.rows).view(requests * kv_heads, -1, head_dim)
    gathered = cache.index_select(0, batch.slots).view(requests, -1, kv_heads, head_dim)
    return gathered.transpose(1, 2).flatten(0, 1)
