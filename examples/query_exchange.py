"""Decode over KV on two ranks: the query goes to the other holder, a state comes back, and the two are merged."""

from concurrent.futures import ThreadPoolExecutor

import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.query import QueryExchange
from loongserve.kernels.merge import merge_rows
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
# Rank 0 has the query and tokens 0..11, rank 1 the rest.
SHARDS = (slice(0, 12), slice(12, 20))

with LocalWorld(2) as world:

    def run(rank: int) -> AttentionState:
        """Attend to the own shard; ask, or answer, for the other."""
        sends, receives = ({1: torch.tensor([0])}, {}) if rank == 0 else ({}, {0: 1})
        heads = {"num_heads": 4, "head_dim": 64, "dtype": torch.float32}
        exchange = QueryExchange(world.transport(rank), sends, receives, **heads)
        keys, values = k[SHARDS[rank]], v[SHARDS[rank]]
        plan = plan_paged_attention([0, 1], [torch.arange(len(keys))], **SHAPE)
        state = AttentionState.empty(1, 4, 64)
        exchange.start(q)
        for peer, query in exchange.queries():
            paged_attention(plan, query, keys, values, state, scale=0.125)
            exchange.reply(peer, state.out, state.lse)
        if rank == 0:
            paged_attention(plan, q, keys, values, state, scale=0.125)
        for _, rows, out, lse in exchange.states():
            merge_rows(state, rows, AttentionState(out, lse))
        return state

    with ThreadPoolExecutor(2) as pool:
        state = next(pool.map(run, range(2)))

plan = plan_paged_attention([0, 1], [torch.arange(20)], **SHAPE)
whole = paged_attention(plan, q, k, v, AttentionState.empty(1, 4, 64), scale=0.125)
torch.testing.assert_close(state.out, whole.out)
print("two ranks and one pool agree:", state.out[0, 0, :4])
