"""Instances that hold known KV, for the tests of migration."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from loongserve.comm.transport import Transport
from loongserve.kernels.merge import merge_many
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState
from loongserve.kvpool.migration_receiver import MigrationReceiver
from loongserve.kvpool.migration_sender import MigrationSender
from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 16
MAX_POSITIONS = 64


class Holder:
    """One instance without a model: its pool is NaN but for the tokens that it holds."""

    # Of every (request, position): [planes, positions, heads, head_dim] by request.
    ROWS = torch.randn(
        4, 2 * NUM_LAYERS, MAX_POSITIONS, NUM_KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)
    )

    def __init__(self, transport: Transport, num_slots: int = 40) -> None:
        self.transport = transport
        self.num_slots = num_slots
        self.table = SlotTable(SlotAllocator(num_slots))
        self.storage = KVStorage(NUM_LAYERS, num_slots, NUM_KV_HEADS, HEAD_DIM, torch.float32)
        self.planes = [plane for pair in zip(self.storage.k, self.storage.v, strict=True) for plane in pair]
        for plane in self.planes:
            plane.fill_(torch.nan)

    @property
    def num_free(self) -> int:
        return self.table.allocator.num_free

    def store(self, request: int, begin: int, end: int) -> None:
        slots = self.table.reserve(request, begin, end)
        for index, plane in enumerate(self.planes):
            plane[slots] = self.ROWS[request, index, begin:end]

    def free(self, request: int) -> None:
        """Give back a request's slots; what was there can be seen no more."""
        self.table.free(request)

    def held(self, request: int) -> set[int]:
        return {position for begin, end in self.table.ranges(request) for position in range(begin, end)}

    def is_whole(self, request: int, positions: Sequence[int], slots: torch.Tensor | None = None) -> bool:
        """Whether these positions have their own rows in all planes."""
        if slots is None:
            slots = torch.cat([self.table.slots(request, p, p + 1) for p in positions] or [torch.empty(0).long()])
        return all(
            torch.equal(plane[slots], self.ROWS[request, i, list(positions)]) for i, plane in enumerate(self.planes)
        )

    def poison_foreign(self, kept: Sequence[torch.Tensor] = ()) -> None:
        """Write NaN to every slot that no request holds, but for ``kept``."""
        own = [self.table.slots(r, b, e) for r in self.table.requests() for b, e in self.table.ranges(r)]
        foreign = torch.ones(self.num_slots, dtype=torch.bool)
        foreign[torch.cat([torch.empty(0, dtype=torch.int64), *own, *kept])] = False
        for plane in self.planes:
            plane[foreign] = torch.nan

    def attend(self, request: int, q: torch.Tensor) -> AttentionState:
        """The state of a query over all that lies here, layer 1."""
        state = AttentionState.empty(len(q), q.shape[1], HEAD_DIM, "cpu")
        slots = torch.cat([self.table.slots(request, b, e) for b, e in self.table.ranges(request)])
        plan = plan_paged_attention(
            [0, len(q)],
            [slots],
            num_q_heads=q.shape[1],
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        paged_attention(plan, q, self.storage.k[1], self.storage.v[1], state, scale=0.25)
        return state

    def sender(self, request: int, ranges: Sequence[tuple[int, int]], peer: int, tokens: int = 4) -> MigrationSender:
        """``tokens``: a chunk."""
        staging = 2 * tokens * self.storage.bytes_per_token
        return MigrationSender(
            request,
            ranges,
            peer,
            table=self.table,
            storage=self.storage,
            transport=self.transport,
            staging_bytes=staging,
        )

    def receiver(
        self, request: int, ranges: Sequence[tuple[int, int]], peer: int, tokens: int = 4
    ) -> MigrationReceiver:
        staging = 2 * tokens * self.storage.bytes_per_token
        return MigrationReceiver(
            request,
            ranges,
            peer,
            table=self.table,
            storage=self.storage,
            transport=self.transport,
            staging_bytes=staging,
        )


def scatter(holder: Holder, request: int, num_tokens: int) -> None:
    """Store a request so that no two of its positions are neighbours in the pool."""
    holder.table.reserve(99, 0, 2 * num_tokens)
    for position in range(0, 2 * num_tokens, 2):
        holder.table.drop(99, position, position + 1)
    for position in range(num_tokens):
        holder.store(request, position, position + 1)
    holder.table.free(99)
    slots = holder.table.slots(request, 0, num_tokens).tolist()
    assert all(after != before + 1 for before, after in pairwise(slots))


def attend_all(holders: Sequence[Holder], request: int, q: torch.Tensor) -> AttentionState:
    """The state over a request's tokens wherever they lie."""
    return merge_many([holder.attend(request, q) for holder in holders if holder.table.tokens(request)])


@pytest.fixture
def make_holder() -> Callable[..., Holder]:
    return Holder


@pytest.fixture(name="scatter")
def scatter_fixture() -> Callable[..., None]:
    return scatter


@pytest.fixture(name="attend_all")
def attend_all_fixture() -> Callable[..., AttentionState]:
    return attend_all
