"""Three ranks pass K and V blocks around a ring; each sees every block, its own first. Threads stand for ranks."""

from concurrent.futures import ThreadPoolExecutor

import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.ring import RingExchange

# Rows of each rank's block: they may differ, and be none.
ROWS = (3, 0, 2)

with LocalWorld(len(ROWS), max_delay_s=0.01) as world:

    def run(rank: int) -> list[tuple[int, int]]:
        """Go around once; answer (member, rows) in the order in which the blocks came."""
        ring = RingExchange(world.transport(rank), group=(0, 1, 2), rows=ROWS)
        k = torch.full((ROWS[rank], 2, 64), float(rank))
        seen = []
        for member, block_k, block_v in ring.blocks(k, -k):
            # While this block is computed on, the next is on its way.
            assert (block_k == member).all()
            assert (block_v == -member).all()
            seen.append((member, len(block_k)))
        return seen

    with ThreadPoolExecutor(len(ROWS)) as pool:
        for rank, seen in enumerate(pool.map(run, range(len(ROWS)))):
            print(f"rank {rank} saw (member, rows):", seen)
