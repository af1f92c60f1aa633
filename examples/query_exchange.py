"""Decode over KV in two processes: the query goes to the other holder, a state comes back, and the two are merged.

Run without arguments it makes the world, a file in memory without a name, and starts a process for each rank.
"""

import os
import subprocess
import sys

import torch

from loongserve.comm.query import QueryExchange
from loongserve.comm.shm import ShmTransport, create_shm_world
from loongserve.kernels.merge import merge_rows
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
# Rank 0 has the query and tokens 0..11, rank 1 the rest.
SHARDS = (slice(0, 12), slice(12, 20))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
    """Attend the one query to all the keys."""
    plan = plan_paged_attention([0, 1], [torch.arange(len(k))], **SHAPE)
    state = AttentionState.empty(1, 4, 64)
    paged_attention(plan, q, k, v, state, scale=0.125)
    return state


def run(rank: int, file: int) -> None:
    """Attend to the own shard; ask, or answer, for the other."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    keys, values = k[SHARDS[rank]], v[SHARDS[rank]]
    transport = ShmTransport(rank, file)
    sends, receives = ({1: torch.tensor([0])}, {}) if rank == 0 else ({}, {0: 1})
    exchange = QueryExchange(transport, sends, receives, num_heads=4, head_dim=64, dtype=torch.float32)
    exchange.start(q)
    # The query travels meanwhile.
    state = attend(q, keys, values) if rank == 0 else None
    for peer, query in exchange.queries():
        remote = attend(query, keys, values)
        exchange.reply(peer, remote.out, remote.lse)
    for _, rows, out, lse in exchange.states():
        assert state is not None
        merge_rows(state, rows, AttentionState(out, lse))
    if state is not None:
        torch.testing.assert_close(state.out, attend(q, k, v).out)
        print("two ranks and one pool agree:", state.out[0, 0, :4])
    transport.close()


def start_ranks() -> int:
    """Start a process for each rank; answer the first exit status that is not 0, if there is one."""
    file = create_shm_world(len(SHARDS))
    ranks = [
        subprocess.Popen([sys.executable, "-P", __file__, str(rank), str(file)], pass_fds=[file])
        for rank in range(len(SHARDS))
    ]
    os.close(file)
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(start_ranks())
    run(int(sys.argv[1]), int(sys.argv[2]))
