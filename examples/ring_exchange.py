"""Two processes pass K and V blocks around a ring, by memory that they share; each sees all blocks, its own first.

Run without arguments it makes the world, a file in memory without a name, and starts a process for each rank.
"""

import os
import subprocess
import sys

import torch

from loongserve.comm.ring import RingExchange
from loongserve.comm.shm import ShmTransport, create_shm_world

# Rows of each rank's block: they may differ, and be none.
ROWS = (3, 2)


def run(rank: int, file: int) -> None:
    """Go around once; say (member, rows) in the order in which the blocks came."""
    transport = ShmTransport(rank, file)
    ring = RingExchange(transport, group=(0, 1), rows=ROWS)
    # A tensor that the transport makes goes to the next member in one copy; any other one can be sent too.
    k = transport.empty((ROWS[rank], 2, 64), torch.float32).fill_(rank)
    seen = []
    for member, block_k, block_v in ring.blocks(k, -k):
        # While this block is computed on, the next is on its way.
        assert (block_k == member).all()
        assert (block_v == -member).all()
        seen.append((member, len(block_k)))
    print(f"rank {rank} saw (member, rows):", seen)
    transport.close()


def start_ranks() -> int:
    """Start a process for each rank; answer the first exit status that is not 0, if there is one."""
    file = create_shm_world(len(ROWS))
    ranks = [
        subprocess.Popen([sys.executable, "-P", __file__, str(rank), str(file)], pass_fds=[file])
        for rank in range(len(ROWS))
    ]
    os.close(file)
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(start_ranks())
    run(int(sys.argv[1]), int(sys.argv[2]))
