"""Attention of one member over one step: the ring for fresh KV, query exchange for resident KV, merged.

The order of posts within a layer is the same on every rank: queries, ring step by step, states. A member's layer:

    store local rows' KV
    post queries to holders            (they travel during what follows)
    own resident shard                 writes the state (identity where nothing is resident)
    ring: own block, then the others'  merges each block and saves the rows that the plan gives this member
    serve the peers' queries           post states back
    merge the states that come back    round once

Source: LoongServe sections 4.1 (proactive scale-down) and 4.2 (multi-master distributed decoding).
"""

import math
from typing import TypedDict

import torch
from torch import Tensor

from loongserve.comm.query import QueryExchange
from loongserve.comm.ring import RingExchange
from loongserve.comm.transport import Transport
from loongserve.kernels.kv import save_kv
from loongserve.kernels.merge import finalize, merge_rows
from loongserve.kernels.paged import PagedPlan, paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, StripedPlan, plan_striped_attention, striped_attention
from loongserve.kvpool.storage import KVStorage
from loongserve.runtime.batch import MemberBatch
from loongserve.runtime.model.config import ModelConfig


class _Heads(TypedDict):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class EspAttention:
    """One member's attention in one step; called once a layer, in layer order, by every member of the group.

    Args:
        batch: the step as this member sees it.
        config: heads and head_dim.
        storage: this instance's KV.
        transport: connects the members; ranks are instances.
        dtype: of q, k and v.
        device: of q, k and v.
    """

    def __init__(
        self,
        batch: MemberBatch,
        config: ModelConfig,
        storage: KVStorage,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._batch = batch
        self._storage = storage
        self._dtype = dtype
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._heads: _Heads = {
            "num_q_heads": config.num_q_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }
        self._state = AttentionState.empty(batch.num_rows, config.num_q_heads, config.head_dim, device)
        self._local_slots = batch.local_slots.to(device)
        self._resident: PagedPlan | None = None
        if batch.resident_slots:
            self._resident = self._plan_paged(batch.cu_seqlens_resident, batch.resident_slots, device)

        # Ordinary decode has no striped rows anywhere, and so no blocks.
        members = [j for j, rows in enumerate(batch.ring_rows) if batch.uses_ring or rows]
        self._blocks: dict[int, tuple[StripedPlan, Tensor | None]] = {}
        for member in members:
            block = batch.blocks[member]
            plan = plan_striped_attention(
                batch.cu_seqlens_striped,
                block.cu_seqlens_k,
                block.diagonals,
                dtype=dtype,
                device=device,
                **self._heads,
            )
            self._blocks[member] = (plan, None if block.slots is None else block.slots.to(device))
        self._ring: RingExchange | None = None
        if batch.uses_ring:
            self._ring = RingExchange(transport, batch.group, batch.ring_rows)
            # From here the next member takes them without another copy. A layer's pass is over before the next one's.
            shape = (batch.num_striped, config.num_kv_heads, config.head_dim)
            self._fresh = (transport.empty(shape, dtype, device), transport.empty(shape, dtype, device))

        self._exchange: QueryExchange | None = None
        self._remote: dict[int, tuple[PagedPlan, AttentionState]] = {}
        if batch.query_rows or batch.remote:
            self._exchange = QueryExchange(
                transport,
                {peer: rows.to(device) for peer, rows in batch.query_rows.items()},
                {peer: queries.num_rows for peer, queries in batch.remote.items()},
                num_heads=config.num_q_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
            )
            for peer, queries in batch.remote.items():
                # Not filled: attention overwrites it in each layer.
                rows = (queries.num_rows, config.num_q_heads)
                state = AttentionState(
                    transport.empty((*rows, config.head_dim), torch.float32, device),
                    transport.empty(rows, torch.float32, device),
                )
                self._remote[peer] = (self._plan_paged(queries.cu_seqlens_q, queries.slots, device), state)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend the step's rows to all that they may see, and store the new KV.

        Args:
            layer: which layer's caches.
            q: [rows, num_q_heads, head_dim], rotated, contiguous last dim.
            k: [rows, num_kv_heads, head_dim], rotated.
            v: [rows, num_kv_heads, head_dim].

        Returns:
            [rows, num_q_heads, head_dim] in the dtype of ``q``.

        Raises:
            PeerLost: a member of the group is gone.
        """
        k_cache, v_cache = self._storage.k[layer], self._storage.v[layer]
        state, striped = self._state, self._batch.num_striped
        if len(self._local_slots):
            save_kv(k[striped:], v[striped:], self._local_slots, k_cache, v_cache)
        if self._exchange is not None:
            self._exchange.start(q)
        if self._resident is not None:
            paged_attention(self._resident, q, k_cache, v_cache, state, scale=self._scale)
        else:
            _reset(state)
        self._attend_blocks(q[:striped], k[:striped], v[:striped], k_cache, v_cache)
        if self._exchange is not None:
            self._exchange_states(self._exchange, k_cache, v_cache)
        return finalize(state, self._dtype)

    def _attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        striped = q.shape[0]
        state = AttentionState(self._state.out[:striped], self._state.lse[:striped])
        if self._ring is None:
            blocks = iter([(self._batch.member, k, v)] if striped else [])
        else:
            # k and v are views of one product as a rule, so they are copied in any case.
            blocks = self._ring.blocks(self._fresh[0].copy_(k), self._fresh[1].copy_(v))
        for member, block_k, block_v in blocks:
            plan, slots = self._blocks[member]
            save = None if slots is None else KVSave(slots, k_cache, v_cache)
            striped_attention(plan, q, block_k, block_v, state, scale=self._scale, save=save)

    def _exchange_states(self, exchange: QueryExchange, k_cache: Tensor, v_cache: Tensor) -> None:
        for peer, queries in exchange.queries():
            plan, state = self._remote[peer]
            paged_attention(plan, queries, k_cache, v_cache, state, scale=self._scale)
            exchange.reply(peer, state.out, state.lse)
        for _, rows, out, lse in exchange.states():
            merge_rows(self._state, rows, AttentionState(out, lse))

    def _plan_paged(self, cu_seqlens_q: list[int], slots: list[Tensor], device: torch.device) -> PagedPlan:
        return plan_paged_attention(cu_seqlens_q, slots, dtype=self._dtype, device=device, **self._heads)


def _reset(state: AttentionState) -> None:
    """Make a state the identity again: what the layer before left there must not be merged."""
    state.out.zero_()
    state.lse.fill_(-math.inf)
