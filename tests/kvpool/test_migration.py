"""Migration: whole and part, aborted at every step, with a peer lost at every step, over each transport."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loongserve.comm.gloo import GlooTransport
from loongserve.comm.local import LocalWorld
from loongserve.comm.ring import RingExchange
from loongserve.comm.transport import (
    Handle,
    MessageMismatch,
    Op,
    PeerLost,
    Recv,
    Send,
    Transport,
    TransportClosed,
    TransportTimeout,
)
from loongserve.kvpool.migration import Migration, MigrationError, Outcome
from loongserve.kvpool.migration_queue import MigrationQueue

RANGES = [(0, 5), (7, 20)]
MOVED = [*range(5), *range(7, 20)]
# More steps than any migration here takes.
MAX_STEPS = 40

MakeHolder = Callable[..., Any]


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    with LocalWorld(3) as made:
        yield made


@pytest.fixture
def pair(world: LocalWorld, make_holder: MakeHolder) -> tuple[Any, Any]:
    """Request 1 lies on the first: positions 0..21."""
    source, target = (make_holder(world.transport(rank)) for rank in range(2))
    source.store(1, 0, 22)
    return source, target


def drive(*sides: Migration) -> list[Outcome]:
    """Step in turn to the end; lost peers end a side too."""
    for _ in range(MAX_STEPS):
        ended = [step_or_lose(side) for side in sides]
        if all(ended):
            return [side.settle() for side in sides]
    raise AssertionError("the migration does not end")


def step_or_lose(side: Migration) -> bool:
    try:
        return side.step()
    except (PeerLost, TransportClosed):
        assert side.outcome is not None
        return True


@pytest.mark.parametrize("tokens", [1, 3, 18, 100], ids=lambda tokens: f"{tokens}-a-chunk")
@pytest.mark.parametrize("scattered", ["neither", "source", "target", "both"])
def test_tokens_arrive_and_pools_add_up(
    pair: tuple[Any, Any], scatter: Callable[..., None], scattered: str, tokens: int
) -> None:
    source, target = pair
    if scattered in ("source", "both"):
        source.free(1)
        scatter(source, 1, 20)
    if scattered in ("target", "both"):
        scatter(target, 2, 20)
        target.table.drop(2, 0, 19)
    total = source.table.tokens(1)
    before = target.num_free
    sender, receiver = source.sender(1, RANGES, 1, tokens), target.receiver(1, RANGES, 0, tokens)
    # All of it is reserved at once.
    assert target.num_free == before - len(MOVED)
    assert drive(sender, receiver) == [Outcome.COMMITTED, Outcome.COMMITTED]
    assert target.table.ranges(1) == ((0, 5), (7, 20))
    assert target.is_whole(1, MOVED)
    assert source.held(1) == set(range(total)) - set(MOVED)
    assert source.is_whole(1, sorted(source.held(1)))
    assert source.num_free == source.num_slots - total + len(MOVED)
    assert target.num_free == before - len(MOVED)


@pytest.mark.parametrize("layout", ["runs", "scattered"])
@pytest.mark.parametrize("how", ["source", "target", "both"])
def test_giving_up_at_any_step(
    world: LocalWorld, make_holder: MakeHolder, scatter: Callable[..., None], how: str, layout: str
) -> None:
    """Both sides agree, the tokens lie on just one of them, and the channel serves a next migration."""
    seen = set()
    for at in range(MAX_STEPS):
        source, target = (make_holder(world.transport(rank), 44) for rank in range(2))
        if layout == "runs":
            source.store(1, 0, 22)
        else:
            scatter(source, 1, 22)
            # Of the target holes alone are left.
            target.table.reserve(2, 0, 44)
            for position in range(0, 44, 2):
                target.table.drop(2, position, position + 1)
        taken = target.table.tokens(2)
        sides = source.sender(1, RANGES, 1, 2), target.receiver(1, RANGES, 0, 2)
        for step in range(at):
            # Of a pair of steps sometimes the one comes first, sometimes the other.
            sides[(step // 2 + step) % 2].step()
        for side, name in zip(sides, ("source", "target"), strict=True):
            if how in (name, "both"):
                side.abort()
        first, second = drive(*sides)
        assert first is second
        seen.add(first)
        committed = first is Outcome.COMMITTED
        assert target.held(1) == (set(MOVED) if committed else set())
        assert source.held(1) == (set(range(22)) - target.held(1))
        for holder in (source, target):
            assert holder.is_whole(1, sorted(holder.held(1)))
            assert holder.num_free == 44 - len(holder.held(1)) - holder.table.tokens(2)
        assert target.table.tokens(2) == taken
        assert drive(source.sender(1, [(5, 7)], 1), target.receiver(1, [(5, 7)], 0)) == [Outcome.COMMITTED] * 2
        assert target.is_whole(1, [5, 6])
    assert seen >= {Outcome.CANCELLED, Outcome.COMMITTED}
    assert (Outcome.REFUSED in seen) == (how != "source")


@pytest.mark.parametrize("dead", [0, 1], ids=["source", "target"])
def test_losing_the_peer_at_any_step(make_holder: MakeHolder, dead: int) -> None:
    """The source has its tokens unless it read that they are there; the target has all of them or no slot taken."""
    seen = set()
    for at in range(MAX_STEPS):
        with LocalWorld(2) as world:
            source, target = (make_holder(world.transport(rank)) for rank in range(2))
            source.store(1, 0, 22)
            sides = source.sender(1, RANGES, 1, 2), target.receiver(1, RANGES, 0, 2)
            for step in range(at):
                sides[(step // 2 + step) % 2].step()
            world.kill(dead)
            drive(*sides)
            alive, holder = sides[1 - dead], (source, target)[1 - dead]
            seen.add(alive.outcome)
            if alive.outcome is Outcome.LOST:
                assert isinstance(alive.error, PeerLost)
                assert alive.error.rank == dead
            gave = dead == 1 and alive.outcome is Outcome.COMMITTED
            got = dead == 0 and alive.outcome is Outcome.COMMITTED
            expected = set(MOVED) if got else set() if dead == 0 else set(range(22)) - (set(MOVED) if gave else set())
            assert holder.held(1) == expected
            assert holder.is_whole(1, sorted(expected))
            assert holder.num_free == holder.num_slots - len(expected)
    assert seen == {Outcome.LOST, Outcome.COMMITTED}


def test_attention_over_migrated_slots_is_the_same(
    pair: tuple[Any, Any], scatter: Callable[..., None], attend_all: Callable[..., Any]
) -> None:
    """Whole and part, with NaN in every slot that is not the request's."""
    source, target = pair
    scatter(target, 2, 15)
    target.table.drop(2, 0, 14)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    before = attend_all(pair, 1, q)
    for ranges, tolerance in (([(3, 9), (12, 13)], 1e-5), ([(0, 3), (9, 12), (13, 22)], 0.0)):
        assert drive(source.sender(1, ranges, 1, 3), target.receiver(1, ranges, 0, 3)) == [Outcome.COMMITTED] * 2
        for holder in pair:
            holder.poison_foreign()
        after = attend_all(pair, 1, q)
        # All on one side again, it is the same sum in the same order.
        torch.testing.assert_close(after.out, before.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(after.lse, before.lse, rtol=tolerance, atol=tolerance)
    assert source.num_free == source.num_slots


def test_no_room_is_refused_and_the_reason_given(pair: tuple[Any, Any]) -> None:
    source, target = pair
    target.store(2, 0, 30)
    sender, receiver = source.sender(1, RANGES, 1), target.receiver(1, RANGES, 0)
    assert drive(sender, receiver) == [Outcome.REFUSED] * 2
    assert "asked for 18 KV slots, 10 are free" in receiver.reason
    assert "no room for 18 tokens" in sender.reason
    assert (source.num_free, target.num_free) == (18, 10)


def test_positions_that_are_held_are_refused(pair: tuple[Any, Any]) -> None:
    source, target = pair
    target.store(1, 19, 20)
    receiver = target.receiver(1, RANGES, 0)
    assert drive(source.sender(1, RANGES, 1), receiver) == [Outcome.REFUSED] * 2
    assert "already holds positions of [(7, 20)]" in receiver.reason


def test_sides_that_were_told_different_things(pair: tuple[Any, Any]) -> None:
    source, target = pair
    sender = source.sender(1, [(0, 4)], 1)
    assert drive(sender, target.receiver(1, [(0, 5)], 0)) == [Outcome.CANCELLED] * 2
    assert "told of 5 tokens, this side of 4" in sender.reason
    assert (source.num_free, target.num_free) == (18, 40)


def test_sides_with_unequal_staging_agree_on_the_smaller(pair: tuple[Any, Any]) -> None:
    source, target = pair
    assert drive(source.sender(1, RANGES, 1, 9), target.receiver(1, RANGES, 0, 2)) == [Outcome.COMMITTED] * 2
    assert target.is_whole(1, MOVED)


def test_a_request_freed_at_the_source_keeps_its_memory_to_the_end(pair: tuple[Any, Any]) -> None:
    source, target = pair
    sender, receiver = source.sender(1, RANGES, 1, 2), target.receiver(1, RANGES, 0, 2)
    sender.step()
    source.free(1)
    assert source.num_free == source.num_slots - len(MOVED)
    # What comes now must not get these slots.
    source.store(2, 0, source.num_free)
    assert drive(sender, receiver) == [Outcome.COMMITTED] * 2
    assert target.is_whole(1, MOVED)
    assert source.is_whole(2, range(22))
    source.free(2)
    assert source.num_free == source.num_slots


def test_a_request_freed_in_part_at_the_source(pair: tuple[Any, Any]) -> None:
    source, target = pair
    sender, receiver = source.sender(1, [(0, 20)], 1, 2), target.receiver(1, [(0, 20)], 0, 2)
    source.table.drop(1, 3, 6)
    assert drive(sender, receiver) == [Outcome.COMMITTED] * 2
    assert source.table.ranges(1) == ((20, 22),)
    assert source.num_free == source.num_slots - 2


class RecordingTransport(Transport):
    """Passes ops on and keeps a list of them."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size, inner.num_channels)
        self._inner = inner
        self.tensors: list[tuple[type[Op], torch.Tensor]] = []

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        assert channel == 1
        self.tensors += [(type(op), op.tensor) for op in ops if op.tensor.numel() > 3]
        return self._inner.post(ops, channel)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def memory_of(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage behind tensors, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
def test_runs_are_moved_without_staging_and_others_within_it(
    world: LocalWorld, make_holder: MakeHolder, scatter: Callable[..., None], scattered: bool
) -> None:
    source, target = (make_holder(RecordingTransport(world.transport(rank))) for rank in range(2))
    if scattered:
        scatter(source, 1, 20)
    else:
        source.store(1, 0, 20)
    assert drive(source.sender(1, [(0, 20)], 1, 4), target.receiver(1, [(0, 20)], 0, 4)) == [Outcome.COMMITTED] * 2
    for holder, direction in ((source, Send), (target, Recv)):
        used = memory_of([tensor for kind, tensor in holder.transport.tensors if kind is direction])
        pool = memory_of(holder.planes)
        staging = {address: size for address, size in used.items() if address not in pool}
        assert (used.keys() & pool.keys() == set()) == scattered
        assert (sum(staging.values()) > 0) == scattered
        assert sum(staging.values()) <= 2 * 4 * holder.storage.bytes_per_token


@pytest.fixture(params=["local-delayed", "gloo"])
def transports(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Transport]]:
    made: list[Transport] = []
    if request.param == "gloo":
        slots: dict[int, Transport] = {}

        def connect(rank: int) -> None:
            slots[rank] = GlooTransport(rank, 2, tmp_path / "store")

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made += [slots[0], slots[1]]
    else:
        world = LocalWorld(2, seed=3, max_delay_s=0.002)
        made += [world.transport(0), world.transport(1)]
    yield made
    for transport in made:
        transport.close()


@pytest.mark.timeout(60)
def test_threads_of_their_own_while_iterations_go_on(
    transports: list[Transport], make_holder: MakeHolder, scatter: Callable[..., None]
) -> None:
    """Three migrations there and back on channel 1, a ring on channel 0 all the while."""
    holders = [make_holder(transport) for transport in transports]
    scatter(holders[0], 1, 20)
    moving = threading.Event()
    errors: list[BaseException] = []

    def iterate(rank: int) -> None:
        ring = RingExchange(transports[rank], (0, 1), (2, 3))
        block = torch.full((2 + rank, 1, 16), float(rank))
        try:
            for _ in range(30):
                for member, k, v in ring.blocks(block, -block):
                    assert (k == member).all()
                    assert (v == -member).all()
            assert moving.wait(30)
        except BaseException as error:
            errors.append(error)

    def migrate(rank: int) -> None:
        holder = holders[rank]
        try:
            for turn in range(3):
                sends = turn % 2 == rank
                side = (holder.sender if sends else holder.receiver)(1, RANGES, 1 - rank, 3)
                assert side.run(30) is Outcome.COMMITTED
                side.settle()
            moving.set()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for body in (iterate, migrate) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors, errors
    assert holders[1].held(1) == set(MOVED)
    assert holders[1].is_whole(1, MOVED)
    assert [holder.num_free for holder in holders] == [38, 22]


@pytest.mark.timeout(60)
def test_a_deadline_leaves_it_to_be_run_on_or_ended(pair: tuple[Any, Any], world: LocalWorld) -> None:
    source, target = pair
    sender = source.sender(1, RANGES, 1)
    with pytest.raises(TransportTimeout):
        sender.run(0.01)
    with pytest.raises(RuntimeError, match="has not ended"):
        sender.settle()
    receiver = target.receiver(1, RANGES, 0)
    other = threading.Thread(target=receiver.run, args=(30,))
    other.start()
    assert sender.run(30) is Outcome.COMMITTED
    other.join()
    assert receiver.settle() is Outcome.COMMITTED
    assert sender.settle() is sender.settle() is Outcome.COMMITTED

    sender = source.sender(1, [(5, 7)], 1)
    with pytest.raises(TransportTimeout):
        sender.run(0.01)
    world.transport(0).abort()
    with pytest.raises(TransportClosed):
        sender.run(30)
    assert sender.settle() is Outcome.LOST
    assert source.held(1) == {5, 6, 20, 21}


def test_pools_of_different_models_do_not_mix(world: LocalWorld, make_holder: MakeHolder) -> None:
    source, target = (make_holder(world.transport(rank)) for rank in range(2))
    source.store(1, 0, 8)
    target.storage.k, target.storage.v = target.storage.k[:1], target.storage.v[:1]
    sides = source.sender(1, [(0, 8)], 1), target.receiver(1, [(0, 8)], 0)
    with pytest.raises((MessageMismatch, MigrationError)):
        drive(*sides)


def test_a_foreign_message_on_the_channel_is_noticed(pair: tuple[Any, Any], world: LocalWorld) -> None:
    _, target = pair
    receiver = target.receiver(1, RANGES, 0)
    receiver.step()
    world.transport(0).post([Send(torch.tensor([70, 1]), 1)], channel=1)
    with pytest.raises(MigrationError, match="announces 70 tokens"):
        receiver.step()
    assert receiver.settle() is Outcome.LOST
    assert target.num_free == target.num_slots


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        pytest.param([], "at least one position", id="none"),
        pytest.param([(3, 3)], "begin < end", id="empty"),
        pytest.param([(0, 5), (4, 6)], "not overlapping", id="overlap"),
        pytest.param([(-1, 2)], "begin < end", id="negative"),
    ],
)
def test_bad_ranges_are_refused(pair: tuple[Any, Any], ranges: list[tuple[int, int]], message: str) -> None:
    source, target = pair
    for make, peer in ((source.sender, 1), (target.receiver, 0)):
        with pytest.raises(ValueError, match=message):
            make(1, ranges, peer)
    with pytest.raises(ValueError, match="room for two tokens of 256 bytes, got 0"):
        source.sender(1, RANGES, 1, 0)
    assert (source.num_free, target.num_free) == (18, 40)


def test_a_queue_runs_one_a_peer_in_order_and_all_peers_at_once(world: LocalWorld, make_holder: MakeHolder) -> None:
    holders = [make_holder(world.transport(rank)) for rank in range(3)]
    holders[0].store(1, 0, 20)
    holders[2].store(2, 0, 10)
    queues = [MigrationQueue() for _ in range(3)]
    # Between 0 and 1 there and back: the second would meet the first's messages if it did not wait.
    for source, target, request, ranges in ((0, 1, 1, [(0, 10)]), (2, 0, 2, [(0, 10)]), (0, 1, 1, [(10, 20)])):
        queues[source].add(holders[source].sender(request, ranges, target))
        queues[target].add(holders[target].receiver(request, ranges, source))
    assert [len(queue) for queue in queues] == [3, 2, 1]
    assert [m.ranges for m in queues[0].find(1)] == [((0, 10),), ((10, 20),)]
    ended: list[Migration] = []
    for _ in range(MAX_STEPS):
        for queue in queues:
            ended += queue.step()
    assert [m.outcome for m in ended] == [Outcome.COMMITTED] * 6
    assert [len(queue) for queue in queues] == [0, 0, 0]
    assert holders[1].is_whole(1, range(20))
    assert holders[0].is_whole(2, range(10))
    assert [holder.num_free for holder in holders] == [30, 20, 40]


def test_a_queue_outlives_a_lost_peer(world: LocalWorld, make_holder: MakeHolder) -> None:
    source = make_holder(world.transport(0))
    source.store(1, 0, 20)
    queue = MigrationQueue()
    for ranges in ([(0, 3)], [(3, 9)]):
        queue.add(source.sender(1, ranges, 1))
    assert queue.step() == []
    world.kill(1)
    ended = queue.step()
    assert [m.outcome for m in ended] == [Outcome.LOST] * 2
    assert all(isinstance(m.error, PeerLost) for m in ended)
    assert source.is_whole(1, range(20))
    assert source.num_free == 20


def test_a_queue_gives_nothing_back_while_messages_may_come(pair: tuple[Any, Any], world: LocalWorld) -> None:
    _, target = pair
    queue = MigrationQueue()
    queue.add(target.receiver(1, RANGES, 0))
    assert queue.step() == []
    world.transport(0).post([Send(torch.tensor([70, 1]), 1)], channel=1)
    with pytest.raises(MigrationError):
        queue.step()
    assert (len(queue), target.num_free) == (1, target.num_slots - len(MOVED))
    world.transport(1).abort()
    assert [m.outcome for m in queue.step()] == [Outcome.LOST]
    assert target.num_free == target.num_slots
