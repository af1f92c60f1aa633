"""RingExchange: right data in the right order, overlap, and nothing touched while in flight."""

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.ring import RingExchange
from loongserve.comm.transport import Handle, Op, Transport, TransportClosed, TransportTimeout

MakeWorld = Callable[[int], list[Transport]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_blocks_come_in_ring_order_with_the_right_data(
    size: int, make_world: MakeWorld, on_threads: Any, guard: Any, exchanges: ModuleType
) -> None:
    history = []
    group = tuple(reversed(range(size)))
    for dtype in exchanges.DTYPES:
        for rows in ((4,) * size, tuple(range(size)), (0,) * (size - 1) + (7,), (0,) * size):
            history.append(exchanges.Iteration(len(history), group, rows, dtype, num_layers=2))
    on_threads(guard(make_world(size)), lambda transport: exchanges.play(transport, history))


def test_several_groups_at_once(make_world: MakeWorld, on_threads: Any, exchanges: ModuleType) -> None:
    """Disjoint groups need not know of each other; one rank alone is a group too."""
    groups = {0: (0, 3), 3: (0, 3), 1: (4, 1), 4: (4, 1), 2: (2,)}

    def body(transport: Transport) -> None:
        group = groups[transport.rank]
        rows = (3, 5)[: len(group)]
        exchanges.play(transport, [exchanges.Iteration(number, group, rows, num_layers=2) for number in range(20)])

    on_threads(make_world(5), body)


@pytest.mark.parametrize("chunk", range(10))
def test_random_overlapping_histories(chunk: int, on_threads: Any, exchanges: ModuleType) -> None:
    """Groups that overlap, issued to all ranks in one order, neither deadlock nor mix their data up."""
    for seed in range(chunk * 100, chunk * 100 + 100):
        play_on_threads(seed, on_threads, exchanges)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_many_random_overlapping_histories(chunk: int, on_threads: Any, exchanges: ModuleType) -> None:
    for seed in range(1000 + chunk * 2000, 1000 + chunk * 2000 + 2000):
        play_on_threads(seed, on_threads, exchanges)


def play_on_threads(seed: int, on_threads: Any, exchanges: ModuleType) -> None:
    size = 2 + seed % 4
    history = exchanges.make_history(seed, size)
    # Most without delays, which is fast; the others with delays around a thread switch.
    with LocalWorld(size, seed=seed, max_delay_s=0.0005 if seed % 5 == 0 else 0.0, timeout_s=30) as world:
        try:
            on_threads([world.transport(rank) for rank in range(size)], lambda rank: exchanges.play(rank, history))
        except Exception as error:
            error.add_note(f"history of seed {seed} on {size} ranks")
            raise


def test_another_order_on_one_rank_is_noticed(on_threads: Any, exchanges: ModuleType) -> None:
    """Proves the histories able to fail: two iterations swapped on one rank mix their data up."""
    history = [exchanges.Iteration(number, (0, 1, 2), (2, 2, 2)) for number in range(2)]
    with LocalWorld(3, timeout_s=5) as world, pytest.raises(AssertionError, match="wrong data"):
        on_threads(
            [world.transport(rank) for rank in range(3)],
            lambda transport: exchanges.play(transport, history[::-1] if transport.rank == 1 else history),
        )


def test_a_buffer_sent_and_received_at_once_is_noticed(on_threads: Any, guard: Any) -> None:
    """Proves the guard and the delays able to fail: with one buffer for two the ring corrupts what it passes on."""

    def body(transport: Transport) -> None:
        ring = RingExchange(transport, range(4), (8,) * 4)
        buffer = (torch.empty(8, 1, 2), torch.empty(8, 1, 2))
        for _ in range(20):
            k = torch.full((8, 1, 2), float(transport.rank))
            for member, k_block, _ in ring.blocks(k, k.clone(), [buffer, buffer]):
                if not (k_block == member).all():
                    raise AssertionError("wrong data")

    with LocalWorld(4, seed=3, max_delay_s=0.003) as world:
        transports = [world.transport(rank) for rank in range(4)]
        with pytest.raises(AssertionError, match="wrong data"):
            on_threads(transports, body)
    with LocalWorld(4, seed=3, max_delay_s=0.003) as world:
        transports = [world.transport(rank) for rank in range(4)]
        with pytest.raises(AssertionError, match="in flight"):
            on_threads(guard(transports), body)


class RecordingTransport(Transport):
    """Writes down what is posted and waited for, and answers every receive with nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, 1)
        self.events: list[str] = []

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        number = sum(event.startswith("post") for event in self.events)
        self.events.append(f"post {number}")
        transport = self

        class Recorded(Handle):
            def wait(self, timeout_s: float | None = None) -> None:
                transport.events.append(f"wait {number}")

            def done(self) -> bool:
                return True

        return Recorded()

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def test_each_transfer_is_posted_before_a_block_and_waited_for_after_it() -> None:
    transport = RecordingTransport(0, 4)
    k = torch.zeros(2, 1, 4)
    for member, _, _ in RingExchange(transport, range(4), (2,) * 4).blocks(k, k):
        transport.events.append(f"compute {member}")
    assert transport.events == [
        "post 0", "compute 0", "wait 0",
        "post 1", "compute 3", "wait 1",
        "post 2", "compute 2", "wait 2",
        "compute 1",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_transfer_and_compute_overlap(size: int, on_threads: Any, exchanges: ModuleType) -> None:
    """A pass takes the longer of transfer and compute, not their sum; all three are measured in this run."""
    step_s = 0.005

    def best_of(delay_s: float, compute_s: float) -> float:
        iteration = exchanges.Iteration(0, tuple(range(size)), (2,) * size, compute_s=compute_s)
        times = []
        with LocalWorld(size, max_delay_s=delay_s) as world:
            transports = [world.transport(rank) for rank in range(size)]
            for _ in range(8):
                start_s = time.perf_counter()
                on_threads(transports, lambda transport: exchanges.run_iteration(transport, iteration))
                times.append(time.perf_counter() - start_s)
        return min(times)

    transfer_s = best_of(step_s, 0.0)
    compute_s = best_of(0.0, step_s)
    both_s = best_of(step_s, step_s)
    # Half of the sum at best, on a machine with other work to do less; perf/ asks for all of it.
    assert both_s <= 0.75 * (transfer_s + compute_s)


def test_buffers_are_made_once_and_may_be_given(on_threads: Any) -> None:
    def body(transport: Transport) -> None:
        rows = (1, 4, 2)
        ring = RingExchange(transport, (0, 1, 2), rows)
        k = torch.full((rows[transport.rank], 2, 3), float(transport.rank))
        v = torch.full((rows[transport.rank], 2, 5), -float(transport.rank))
        first = [block[1].data_ptr() for block in ring.blocks(k, v)]
        assert [block[1].data_ptr() for block in ring.blocks(k, v)] == first
        given = [(torch.empty(6, 2, 3), torch.empty(6, 2, 5)) for _ in range(2)]
        blocks = list(ring.blocks(k, v, given))
        assert [block[1].data_ptr() for block in blocks] == [k.data_ptr(), *(pair[0].data_ptr() for pair in given)]
        for member, k_block, v_block in blocks:
            assert k_block.shape == (rows[member], 2, 3)
            assert v_block.shape == (rows[member], 2, 5)
            assert (k_block == member).all()
            assert (v_block == -member).all()

    with LocalWorld(3) as world:
        on_threads([world.transport(rank) for rank in range(3)], body)


def test_a_consumer_that_stops_early_holds_no_one_beyond_the_deadline() -> None:
    """Its neighbours time out, or are woken when it aborts; itself it refuses another pass."""
    k = torch.zeros(2, 1, 4)
    with LocalWorld(3, timeout_s=0.2) as world:
        rings = [RingExchange(world.transport(rank), range(3), (2, 2, 2)) for rank in range(3)]
        blocks = rings[0].blocks(k, k)
        next(blocks)
        del blocks
        with pytest.raises(RuntimeError, match="not finished"):
            rings[0].blocks(k, k)
        outcomes: dict[int, type[BaseException] | None] = {}

        def go_on(rank: int) -> None:
            outcomes[rank] = None
            try:
                list(rings[rank].blocks(k, k))
            except TransportTimeout as error:
                outcomes[rank] = type(error)

        threads = [threading.Thread(target=go_on, args=(rank,), daemon=True) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        # Rank 1 gets rank 0's own block in the first step, and the one that it should have passed on never.
        assert outcomes == {1: TransportTimeout, 2: TransportTimeout}


def test_lost_and_closed_members() -> None:
    k = torch.zeros(2, 1, 4)
    with LocalWorld(2) as world:
        blocks = RingExchange(world.transport(0), (0, 1), (2, 2)).blocks(k, k)
        next(blocks)
        world.kill(1)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            next(blocks)
        with pytest.raises(TransportClosed):
            next(RingExchange(world.transport(1), (0, 1), (2, 2)).blocks(k, k))


@pytest.mark.parametrize(
    ("group", "rows", "channel", "message"),
    [
        ((0, 0), (1, 1), 0, "each rank once"),
        ((0, 3), (1, 1), 0, r"ranks in \[0, 3\)"),
        ((1, 2), (1, 1), 0, "must hold this rank"),
        ((0, 1), (1,), 0, "expected 2, got 1"),
        ((0, 1), (1, -1), 0, "not be negative"),
        ((0, 1), (1, 1), 2, "channel"),
    ],
)
def test_wrong_groups_are_refused(group: tuple[int, ...], rows: tuple[int, ...], channel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingExchange(RecordingTransport(0, 3), group, rows, channel)


def test_wrong_blocks_and_buffers_are_refused() -> None:
    ring = RingExchange(RecordingTransport(0, 3), (0, 1, 2), (2, 3, 1))
    good = torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match="k_local must have 2 rows"):
        ring.blocks(torch.zeros(3, 1, 4), good)
    with pytest.raises(ValueError, match="v_local must be contiguous"):
        ring.blocks(good, torch.zeros(2, 1, 8)[:, :, ::2])
    pair = (torch.zeros(3, 1, 4), torch.zeros(3, 1, 4))
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        ring.blocks(good, good, [pair])
    with pytest.raises(ValueError, match="at least 3 rows"):
        ring.blocks(good, good, [pair, (torch.zeros(2, 1, 4), torch.zeros(3, 1, 4))])
    with pytest.raises(ValueError, match="float32"):
        ring.blocks(good, good, [pair, (torch.zeros(3, 1, 4).half(), torch.zeros(3, 1, 4))])
