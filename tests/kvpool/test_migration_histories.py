"""Pools, ledger and migrations of three instances together, in any order of steps, against a plain model."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from loongserve.comm.local import LocalWorld
from loongserve.kvpool.ledger import InstanceFull, LedgerError, Move, PlacementLedger
from loongserve.kvpool.migration import Migration, Outcome
from loongserve.kvpool.migration_queue import MigrationQueue

RANKS = (0, 1, 2)
NUM_SLOTS = 40
MAX_POSITION = 40
requests = st.integers(0, 3)
ranks = st.sampled_from(RANKS)


@dataclass(eq=False)
class Moving:
    """One migration as the manager knows it."""

    move: Move
    sender: Migration
    receiver: Migration
    num_settled: int = 0


class Cluster:
    """Three instances and the manager's ledger; what ends is booked."""

    def __init__(self, make_holder: Callable[..., Any], num_slots: int = NUM_SLOTS) -> None:
        self.world = LocalWorld(len(RANKS))
        self.holders = [make_holder(self.world.transport(rank), num_slots) for rank in RANKS]
        self.queues = [MigrationQueue() for _ in RANKS]
        self.ledger = PlacementLedger(dict.fromkeys(RANKS, num_slots))
        self.moving: list[Moving] = []
        self.dead: set[int] = set()

    def store(self, rank: int, request: int, begin: int, end: int) -> None:
        self.ledger.place(request, [(rank, begin, end)])
        # Backwards and one by one, so that most chunks are no runs.
        for position in reversed(range(begin, end)):
            self.holders[rank].store(request, position, position + 1)

    def start(self, request: int, begin: int, end: int, source: int, target: int, tokens: int = 2) -> Moving:
        move = self.ledger.begin_move(request, begin, end, source, target)
        moving = Moving(
            move,
            self.holders[source].sender(request, [(begin, end)], target, tokens),
            self.holders[target].receiver(request, [(begin, end)], source, tokens),
        )
        self.queues[source].add(moving.sender)
        self.queues[target].add(moving.receiver)
        self.moving.append(moving)
        return moving

    def step(self, rank: int) -> None:
        ended = self.queues[rank].step() if rank not in self.dead else []
        for moving in list(self.moving):
            moving.num_settled += (moving.sender in ended) + (moving.receiver in ended)
            if moving.num_settled == 2:
                self._book(moving)

    def _book(self, moving: Moving) -> None:
        self.moving.remove(moving)
        move = moving.move
        # A lost source does not undo what the target has; a lost target leaves all at the source.
        if moving.receiver.outcome is Outcome.COMMITTED:
            self.ledger.commit_move(move)
        else:
            self.ledger.cancel_move(move)

    def settle_all(self) -> None:
        for _ in range(400):
            if not self.moving:
                return
            for rank in RANKS:
                self.step(rank)
        raise AssertionError(f"{len(self.moving)} migrations do not end")

    def free(self, request: int) -> None:
        """As a manager does: the migrations of it end first."""
        for moving in self.moving:
            if moving.move.request == request:
                moving.sender.abort()
                moving.receiver.abort()
        while any(moving.move.request == request for moving in self.moving):
            for rank in RANKS:
                self.step(rank)
        self.ledger.free(request)
        for holder in self.holders:
            holder.free(request)


class MigrationMachine(RuleBasedStateMachine):
    """At every moment each token is whole somewhere, and all slots add up."""

    make_holder: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.make_holder)
        self.tokens: set[tuple[int, int]] = set()

    @rule(request=requests, rank=ranks, begin=st.integers(0, MAX_POSITION), num_tokens=st.integers(1, 12))
    def store(self, request: int, rank: int, begin: int, num_tokens: int) -> None:
        wanted = {(request, position) for position in range(begin, begin + num_tokens)}
        if wanted & self.tokens:
            return
        try:
            self.cluster.store(rank, request, begin, begin + num_tokens)
        except InstanceFull:
            assert num_tokens > self.cluster.ledger.free_slots(rank)
        else:
            self.tokens |= wanted

    @rule(data=st.data(), to=ranks)
    def start(self, data: st.DataObject, to: int) -> None:
        placed = [(r, *piece) for r in self.cluster.ledger.requests() for piece in self.cluster.ledger.placement(r)]
        if not placed:
            return
        request, source, low, high = data.draw(st.sampled_from(placed))
        begin = data.draw(st.integers(low, high - 1))
        end = data.draw(st.integers(begin + 1, high))
        try:
            self.cluster.start(request, begin, end, source, to)
        except InstanceFull:
            assert end - begin > self.cluster.ledger.free_slots(to)
        except LedgerError:
            moved = [m.move for m in self.cluster.moving if m.move.request == request]
            assert source == to or any(move.begin < end and begin < move.end for move in moved)

    @rule(rank=ranks, times=st.integers(1, 3))
    def step(self, rank: int, times: int) -> None:
        for _ in range(times):
            self.cluster.step(rank)

    @precondition(lambda self: self.cluster.moving)
    @rule(data=st.data(), side=st.sampled_from(["sender", "receiver"]))
    def give_up(self, data: st.DataObject, side: str) -> None:
        getattr(data.draw(st.sampled_from(self.cluster.moving)), side).abort()

    @rule(request=requests)
    def free(self, request: int) -> None:
        self.cluster.free(request)
        self.tokens = {token for token in self.tokens if token[0] != request}

    @rule()
    def poison(self) -> None:
        """What no request has is NaN: whoever reads it is found out."""
        for rank, holder in enumerate(self.cluster.holders):
            kept = [m.receiver._slots for m in self.cluster.moving if m.move.target == rank]
            kept += [m.sender._slots for m in self.cluster.moving if m.move.source == rank]
            holder.poison_foreign(kept)

    @invariant()
    def each_token_is_whole_somewhere(self) -> None:
        where: dict[tuple[int, int], int] = dict.fromkeys(self.tokens, 0)
        for holder in self.cluster.holders:
            for request in holder.table.requests():
                held = sorted(holder.held(request))
                assert holder.is_whole(request, held)
                for position in held:
                    # KeyError: of a token that nobody stored.
                    where[request, position] += 1
        for moving in self.cluster.moving:
            receiver, move = moving.receiver, moving.move
            if moving.sender.outcome is Outcome.COMMITTED and move.target not in self.cluster.dead:
                target = self.cluster.holders[move.target]
                assert target.is_whole(move.request, range(move.begin, move.end), receiver._slots)
                if receiver.outcome is None:
                    # Its slots are in no table yet.
                    where |= {(move.request, p): 1 for p in range(move.begin, move.end)}
        assert all(count >= 1 for count in where.values())
        if not self.cluster.moving:
            assert all(count == 1 for count in where.values())

    @invariant()
    def slots_add_up(self) -> None:
        self.cluster.ledger.check()
        for rank, holder in enumerate(self.cluster.holders):
            taken = sum(holder.table.tokens(request) for request in holder.table.requests())
            for moving in self.cluster.moving:
                if moving.move.target == rank and moving.receiver.outcome is None:
                    taken += moving.receiver._slots.numel()
            assert holder.num_free == NUM_SLOTS - taken
            assert self.cluster.moving or self.cluster.ledger.free_slots(rank) == holder.num_free

    def teardown(self) -> None:
        for request in range(4):
            self.cluster.free(request)
        assert [holder.num_free for holder in self.cluster.holders] == [NUM_SLOTS] * len(RANKS)
        assert self.cluster.ledger.total_free == NUM_SLOTS * len(RANKS)
        self.cluster.world.close()


@pytest.mark.timeout(120)
def test_random_histories_agree_with_the_model(make_holder: Callable[..., Any]) -> None:
    class Machine(MigrationMachine):
        pass

    Machine.make_holder = staticmethod(make_holder)
    run_state_machine_as_test(Machine, settings=settings(max_examples=120, stateful_step_count=30, deadline=None))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(25))
def test_a_killed_rank_leaves_the_others_with_all_that_they_need(make_holder: Callable[..., Any], seed: int) -> None:
    """Random migrations, and a kill in the midst: every token that lay apart from the dead one is whole, none leaks."""
    rng = random.Random(seed)
    cluster = Cluster(make_holder)
    for request in range(3):
        cluster.store(request, request, 0, 20)
    for request in range(3):
        begin = rng.randrange(15)
        target = (request + rng.choice((1, 2))) % 3
        cluster.start(request, begin, begin + rng.randrange(1, 6), request, target, tokens=1)
    for _ in range(rng.randrange(25)):
        cluster.step(rng.choice(RANKS))
    dead = rng.choice(RANKS)
    cluster.world.kill(dead)
    cluster.dead.add(dead)
    for _ in range(50):
        for rank in RANKS:
            cluster.step(rank)
    alive = [cluster.holders[rank] for rank in RANKS if rank != dead]
    for rank in RANKS:
        if rank != dead:
            assert len(cluster.queues[rank]) == 0
    for request in range(3):
        held = [holder.held(request) for holder in alive]
        assert all(holder.is_whole(request, sorted(there)) for holder, there in zip(alive, held, strict=True))
        # Of the request of a live rank only what went to the dead one is gone; a token may be twice, never lost.
        moved = cluster.ledger.placement(request)
        on_dead = {p for rank, b, e in moved if rank == dead for p in range(b, e)}
        gone = set(range(20)) - set().union(*held)
        if request != dead:
            confirmed = [m for m in cluster.moving if m.move.request == request and m.move.target == dead]
            allowed = {
                p for m in confirmed if m.sender.outcome is Outcome.COMMITTED for p in range(m.move.begin, m.move.end)
            }
            assert gone <= allowed | on_dead
    for holder in alive:
        assert holder.num_free == NUM_SLOTS - sum(len(holder.held(request)) for request in range(3))
    cluster.world.close()


@pytest.mark.parametrize(
    "num_operations", [pytest.param(100_000, id="1e5"), pytest.param(1_000_000, id="1e6", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_many_operations_end_at_the_baseline(make_holder: Callable[..., Any], num_operations: int) -> None:
    """Random allocations, frees and migrations on three pools: tables and ledger agree, and nothing leaks."""
    rng = random.Random(0)
    num_slots = 3000
    cluster = Cluster(make_holder, num_slots)
    ledger = cluster.ledger
    ends: dict[int, int] = {}
    next_request = 0
    for _ in range(num_operations):
        draw = rng.random()
        rank = rng.randrange(3)
        if draw < 0.25 or not ends:
            # A prompt; refused where there is no room.
            num_tokens = min(int(rng.paretovariate(0.8)), 800)
            if num_tokens <= ledger.free_slots(rank):
                ledger.place(next_request, [(rank, 0, num_tokens)])
                cluster.holders[rank].table.reserve(next_request, 0, num_tokens)
                ends[next_request] = num_tokens
                next_request += 1
            continue
        request = rng.choice(list(ends)) if len(ends) < 8 else next(iter(ends))
        if draw < 0.7:
            if ledger.free_slots(rank):
                ledger.place(request, [(rank, ends[request], ends[request] + 1)])
                cluster.holders[rank].table.reserve(request, ends[request], ends[request] + 1)
                ends[request] += 1
            # To the end, so that another request is next.
            ends[request] = ends.pop(request)
        elif draw < 0.98:
            for holder in ledger.free(request):
                cluster.holders[holder].table.free(request)
            del ends[request]
        else:
            source, begin, end = rng.choice(ledger.placement(request))
            middle = rng.randrange(begin, end)
            end = min(end, middle + 50)
            if source != rank and end - middle <= ledger.free_slots(rank):
                moving = cluster.start(request, middle, end, source, rank, tokens=25)
                if rng.random() < 0.2:
                    rng.choice((moving.sender, moving.receiver)).abort()
                cluster.settle_all()
    ledger.check()
    for rank, holder in enumerate(cluster.holders):
        assert holder.num_free == ledger.free_slots(rank)
    for request in list(ends):
        cluster.free(request)
    assert [holder.num_free for holder in cluster.holders] == [num_slots] * 3
    assert ledger.total_free == 3 * num_slots
    everything = cluster.holders[0].table.allocator.allocate(num_slots)
    assert torch.equal(everything.sort().values, torch.arange(num_slots))
    cluster.world.close()
