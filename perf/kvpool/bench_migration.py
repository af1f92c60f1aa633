"""Migration within one thread beside a plain copy of the same bytes: what the protocol and the staging cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loongserve.comm.local import LocalWorld
from loongserve.kvpool.migration import Outcome
from loongserve.kvpool.migration_receiver import MigrationReceiver
from loongserve.kvpool.migration_sender import MigrationSender
from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

NUM_TOKENS, NUM_LAYERS = 4096, 8
# Runs are copied once, as the baseline does; scattered slots are gathered, copied and scattered.
LEAST_RATIO = {"runs": 0.25, "scattered": 0.05}


@pytest.mark.parametrize("layout", ["runs", "scattered"])
def test_migration(ratio_to: Callable[..., float], layout: str) -> None:
    with LocalWorld(2) as world:
        storages = [KVStorage(NUM_LAYERS, 2 * NUM_TOKENS, 2, 64, torch.float32) for _ in range(2)]
        tables = [SlotTable(SlotAllocator(2 * NUM_TOKENS)) for _ in range(2)]
        for storage in storages:
            storage.memory.zero_()
        if layout == "scattered":
            for table in tables:
                table.reserve(9, 0, 2 * NUM_TOKENS)
                for position in range(0, 2 * NUM_TOKENS, 2):
                    table.drop(9, position, position + 1)
        slots = tables[0].reserve(1, 0, NUM_TOKENS)
        for plane in (*storages[0].k, *storages[0].v):
            plane[slots] = torch.randn(NUM_TOKENS, 2, 64)
        expected = storages[0].v[-1][slots].clone()
        at = 0

        def migrate() -> None:
            nonlocal at
            source, target = at, 1 - at
            sides = [
                kind(
                    1,
                    [(0, NUM_TOKENS)],
                    1 - rank,
                    table=tables[rank],
                    storage=storages[rank],
                    transport=world.transport(rank),
                    staging_bytes=8 << 20,
                )
                for kind, rank in ((MigrationSender, source), (MigrationReceiver, target))
            ]
            while any(side.outcome is None for side in sides):
                for side in sides:
                    side.step()
            assert [side.settle() for side in sides] == [Outcome.COMMITTED] * 2
            at = target

        migrate()
        assert torch.equal(storages[1].v[-1][tables[1].slots(1, 0, NUM_TOKENS)], expected)
        num_bytes = NUM_TOKENS * storages[0].bytes_per_token
        source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        ratio = ratio_to(migrate, lambda: target.copy_(source), "copy", num_bytes / 1e9, "GB")
    assert ratio > LEAST_RATIO[layout]
