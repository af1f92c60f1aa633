"""LocalTransport: order, delays, failure, and messages that are taken from the sender only when delivered."""

import threading
import time

import pytest
import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.transport import (
    Handle,
    MessageMismatch,
    PeerLost,
    Recv,
    Send,
    TransportClosed,
    TransportError,
    TransportTimeout,
)


def wait_in_thread(handle: Handle) -> tuple[threading.Thread, list[TransportError]]:
    errors: list[TransportError] = []

    def run() -> None:
        try:
            handle.wait()
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("max_delay_s", [0.0, 0.002])
@pytest.mark.parametrize("receive_first", [True, False])
def test_each_lane_is_a_fifo(max_delay_s: float, receive_first: bool) -> None:
    """The n-th send meets the n-th receive of its (peer, channel), whichever side is first."""
    with LocalWorld(3, channels=2, seed=1, max_delay_s=max_delay_s) as world:
        lanes = [(source, channel) for source in (0, 1) for channel in (0, 1)]
        targets = {(lane, number): torch.full((1,), -1.0) for number in range(50) for lane in lanes}
        handles = []

        def send() -> None:
            for (source, channel), number in targets:
                tensor = torch.tensor([float(number * 10 + source * 2 + channel)])
                handles.append(world.transport(source).post([Send(tensor, 2)], channel))

        def receive() -> None:
            for ((source, channel), _), tensor in targets.items():
                handles.append(world.transport(2).post([Recv(tensor, source)], channel))

        for action in (receive, send) if receive_first else (send, receive):
            action()
        for handle in handles:
            handle.wait()
            assert handle.done()
        for ((source, channel), number), tensor in targets.items():
            assert tensor.item() == number * 10 + source * 2 + channel


def test_data_is_taken_when_it_is_delivered() -> None:
    """A sender that overwrites its tensor in flight corrupts the message: so tests can find that mistake."""
    with LocalWorld(2, max_delay_s=0.2) as world:
        source, target = torch.ones(4), torch.zeros(4)
        handles = [world.transport(0).post([Send(source, 1)]), world.transport(1).post([Recv(target, 0)])]
        assert not any(handle.done() for handle in handles)
        source.fill_(2)
        for handle in handles:
            handle.wait()
        assert target.tolist() == [2.0] * 4


def test_delays_are_at_most_the_longest_and_depend_on_the_seed_alone() -> None:
    def order(seed: int) -> list[int]:
        arrivals: list[int] = []
        with LocalWorld(5, seed=seed, max_delay_s=0.2) as world:
            threads = []
            for source in range(1, 5):
                world.transport(source).post([Send(torch.ones(1), 0)])
                handle = world.transport(0).post([Recv(torch.ones(1), source)])

                def note(handle: Handle = handle, source: int = source) -> None:
                    handle.wait()
                    arrivals.append(source)

                threads.append(threading.Thread(target=note, daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join(10)
        return arrivals

    orders = [order(seed) for seed in (1, 1, 2, 3, 4)]
    assert all(sorted(each) == [1, 2, 3, 4] for each in orders)
    assert orders[0] == orders[1]
    assert len({tuple(each) for each in orders}) > 1


def test_one_timer_thread_for_a_world_and_none_without_delays() -> None:
    before = threading.active_count()
    for max_delay_s, num_threads in ((0.0, 0), (0.01, 1)):
        with LocalWorld(2, max_delay_s=max_delay_s) as world:
            targets = [torch.zeros(1) for _ in range(100)]
            handles = [world.transport(1).post([Recv(target, 0)]) for target in targets]
            for _ in targets:
                world.transport(0).post([Send(torch.ones(1), 1)])
            assert threading.active_count() == before + num_threads
            for handle in handles:
                handle.wait()
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("sent", "received", "named"),
    [
        (torch.zeros(3), torch.zeros(4), ("3 elements", "receives 4")),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), ("float32", "int32")),
    ],
)
def test_ends_that_disagree_both_learn_it(sent: torch.Tensor, received: torch.Tensor, named: tuple[str, ...]) -> None:
    with LocalWorld(2) as world:
        handles = [world.transport(0).post([Send(sent, 1)]), world.transport(1).post([Recv(received, 0)])]
        for handle in handles:
            with pytest.raises(MessageMismatch) as info:
                handle.wait()
            for words in named:
                assert words in str(info.value)


@pytest.mark.parametrize("max_delay_s", [0.0, 30.0])
def test_a_killed_peer_fails_pending_and_later_ops(max_delay_s: float) -> None:
    """Also messages already on their way are lost; ops among the others go on."""
    with LocalWorld(3, max_delay_s=max_delay_s) as world:
        alive, victim = world.transport(0), world.transport(2)
        pending = [
            alive.post([Recv(torch.zeros(1), 2)]),
            alive.post([Send(torch.zeros(1), 2), Recv(torch.zeros(1), 1)], 1),
        ]
        if max_delay_s:
            victim.post([Send(torch.zeros(1), 0)])
        mine = victim.post([Recv(torch.zeros(1), 1)])
        waiters = [wait_in_thread(handle) for handle in pending]
        world.kill(2)
        for thread, errors in waiters:
            thread.join(10)
            assert [type(error) for error in errors] == [PeerLost]
            assert [error.rank for error in errors if isinstance(error, PeerLost)] == [2]
        for op in (Send(torch.zeros(1), 2), Recv(torch.zeros(1), 2)):
            handle = alive.post([op])
            assert handle.done()
            with pytest.raises(PeerLost, match="rank 2 is lost"):
                handle.wait()
        with pytest.raises(TransportClosed):
            mine.wait()
        with pytest.raises(TransportClosed):
            victim.post([Send(torch.zeros(1), 0)])
        handle = alive.post([Send(torch.zeros(1), 1)])
        world.transport(1).post([Recv(torch.zeros(1), 0)])
        if not max_delay_s:
            handle.wait()


@pytest.mark.parametrize("how", ["close", "abort"])
def test_closing_wakes_every_waiter(how: str) -> None:
    with LocalWorld(2) as world:
        mine = [wait_in_thread(world.transport(0).post([Recv(torch.zeros(1), 1)], channel)) for channel in (0, 1)]
        peers = [wait_in_thread(world.transport(1).post([Recv(torch.zeros(1), 0)], channel)) for channel in (0, 1)]
        getattr(world.transport(0), how)()
        for waiters, expected in ((mine, TransportClosed), (peers, PeerLost)):
            for thread, errors in waiters:
                thread.join(10)
                assert [type(error) for error in errors] == [expected]
        world.transport(0).close()
        with pytest.raises(TransportClosed):
            world.transport(0).post([])


def test_a_wait_ends_at_its_deadline_and_says_what_for() -> None:
    with LocalWorld(2, timeout_s=0.05) as world:
        target = torch.zeros(3)
        handle = world.transport(0).post([Recv(target, 1)], 1)
        for timeout_s in (None, 0.0):
            with pytest.raises(TransportTimeout, match=r"rank 0, channel 1: .*receive from rank 1 \(\(3,\)"):
                handle.wait(timeout_s)
        assert not handle.done()
        # The op stays posted: a peer that was merely slow still completes it.
        world.transport(1).post([Send(torch.ones(3), 0)], 1).wait()
        handle.wait()
        assert target.tolist() == [1.0] * 3


def test_an_empty_post_is_done() -> None:
    with LocalWorld(1) as world:
        handle = world.transport(0).post([])
        assert handle.done()
        handle.wait(0.0)


@pytest.mark.parametrize(
    ("op", "channel", "message"),
    [
        (Send(torch.zeros(0), 1), 0, "must not be empty"),
        (Recv(torch.zeros(4, 4).t(), 1), 0, "contiguous"),
        (Send(torch.zeros(1), 0), 0, r"another rank in \[0, 2\), got 0"),
        (Send(torch.zeros(1), 2), 0, r"another rank in \[0, 2\), got 2"),
        (Send(torch.zeros(1), -1), 0, "got -1"),
        (Send(torch.zeros(1), 1), 2, r"channel must be in \[0, 2\), got 2"),
        (torch.zeros(1), 0, "Send or Recv, got Tensor"),
    ],
)
def test_wrong_ops_are_refused_and_nothing_is_posted(op: Send | Recv, channel: int, message: str) -> None:
    with LocalWorld(2) as world:
        with pytest.raises(ValueError, match=message):
            world.transport(0).post([Send(torch.zeros(1), 1), op], channel)
        assert not world.transport(1).post([Recv(torch.zeros(1), 0)]).done()


def test_wrong_worlds_are_refused() -> None:
    for arguments in ({"size": 0}, {"size": 1, "channels": 0}, {"size": 1, "max_delay_s": -1.0}):
        with pytest.raises(ValueError, match="must"):
            LocalWorld(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        LocalWorld(1).transport(1)


def test_many_threads_on_one_transport() -> None:
    """Posts from several threads on several channels do not disturb each other."""
    with LocalWorld(2, channels=4, seed=2, max_delay_s=0.0005) as world:
        errors: list[str] = []

        def run(rank: int, channel: int) -> None:
            transport, peer = world.transport(rank), 1 - rank
            for number in range(100):
                target = torch.zeros(2)
                sent = torch.full((2,), float(number * 8 + channel * 2 + rank))
                transport.post([Send(sent, peer), Recv(target, peer)], channel).wait()
                if target[0] != number * 8 + channel * 2 + peer:
                    errors.append(f"rank {rank}, channel {channel}, number {number}: {target}")

        threads = [
            threading.Thread(target=run, args=(rank, channel), daemon=True) for rank in range(2) for channel in range(4)
        ]
        deadline_s = time.monotonic() + 60
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads)
        assert not errors
