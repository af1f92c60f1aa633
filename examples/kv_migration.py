"""Two processes hold the KV of one request; part of it moves to the other while both could go on computing.

Also a migration that the destination has no room for, and one that is given up halfway: the tokens stay where they are.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import multiprocessing

from loongserve.comm.gloo import GlooTransport
from loongserve.kvpool.migration import Outcome
from loongserve.kvpool.migration_receiver import MigrationReceiver
from loongserve.kvpool.migration_sender import MigrationSender
from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

REQUEST = 1
NUM_TOKENS = 1000


def run(rank: int, store: Path) -> None:
    """Be one instance: rank 0 has all tokens and sends, rank 1 receives."""
    torch.set_num_threads(1)
    transport = GlooTransport(rank, 2, store)
    storage = KVStorage(
        num_layers=4, num_slots=1200 if rank else 2000, num_kv_heads=2, head_dim=64, dtype=torch.float32
    )
    table = SlotTable(SlotAllocator(storage.num_slots))
    pool = {"table": table, "storage": storage, "transport": transport, "staging_bytes": 1 << 20}
    if rank == 0:
        slots = table.reserve(REQUEST, 0, NUM_TOKENS)
        for layer in range(storage.num_layers):
            storage.k[layer][slots] = torch.arange(float(NUM_TOKENS))[:, None, None].expand(-1, 2, 64)
            storage.v[layer][slots] = -storage.k[layer][slots]

    def migrate(begin: int, end: int, gives_up: bool = False) -> Outcome:
        """Move a range from rank 0 to rank 1; a runtime would step between the steps of its iterations."""
        if rank == 0:
            migration = MigrationSender(REQUEST, [(begin, end)], peer=1, **pool)
        else:
            migration = MigrationReceiver(REQUEST, [(begin, end)], peer=0, **pool)
        if gives_up and rank == 0:
            migration.abort()
        migration.run(timeout_s=30)
        outcome = migration.settle()
        print(f"rank {rank}: positions {begin}..{end - 1} {outcome.value}, {table.allocator.num_free} slots free")
        return outcome

    assert migrate(250, 1000, gives_up=True) is Outcome.CANCELLED
    assert migrate(250, 1000) is Outcome.COMMITTED
    if rank == 1:
        table.reserve(2, 0, 400)
    assert migrate(0, 250) is Outcome.REFUSED
    begin, end = (250, 1000) if rank else (0, 250)
    slots = table.slots(REQUEST, begin, end)
    assert (storage.k[3][slots][:, 0, 0] == torch.arange(float(begin), float(end))).all()
    sys.stdout.flush()
    transport.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(Path(folder) / "store",), nprocs=2)
