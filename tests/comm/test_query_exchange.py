"""QueryExchange: right rows to right ranks, layer after layer without allocation, alone or beside a ring."""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.query import QueryExchange
from loongserve.comm.ring import RingExchange
from loongserve.comm.transport import PeerLost, Transport

MakeWorld = Callable[[int], list[Transport]]


def make_exchange(
    transport: Transport, sends: dict[int, list[int]], receives: dict[int, int], channel: int = 0
) -> QueryExchange:
    rows = {peer: torch.tensor(rows, dtype=torch.int64) for peer, rows in sends.items()}
    return QueryExchange(transport, rows, receives, num_heads=2, head_dim=4, dtype=torch.float32, channel=channel)


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_states_come_back_to_their_rows(
    size: int, channel: int, make_world: MakeWorld, on_threads: Any, guard: Any, exchanges: ModuleType
) -> None:
    """Everyone asks everyone, only a few ask, one holder serves all; on the ring's channel and on one of its own."""
    pairs = [(asker, holder) for asker in range(size) for holder in range(size) if asker != holder]
    patterns = [
        dict.fromkeys(pairs, (0, 1, 2)),
        {(asker, holder): (2,) if asker > holder else () for asker, holder in pairs},
        {(asker, holder): tuple(range(asker)) for asker, holder in pairs if holder == 0},
        {},
    ]
    history = [
        exchanges.Iteration(number, tuple(range(size)), (2,) * size, dtype, 3, asks, channel)
        for number, (asks, dtype) in enumerate((asks, dtype) for asks in patterns for dtype in exchanges.FLOAT_DTYPES)
    ]
    on_threads(guard(make_world(size)), lambda transport: exchanges.play(transport, history))


def test_layers_allocate_nothing(on_threads: Any) -> None:
    def body(transport: Transport) -> None:
        peer = 1 - transport.rank
        exchange = make_exchange(transport, {peer: [1, 0]}, {peer: 2})
        seen = set()
        for layer in range(3):
            exchange.start(torch.full((2, 2, 4), float(layer)))
            for asker, q in exchange.queries():
                exchange.reply(asker, q + 1, q[:, :, 0].contiguous())
                seen.add(q.data_ptr())
            for _, _, out, lse in exchange.states():
                assert (out == layer + 1).all()
                assert (lse == layer).all()
                seen.update((out.data_ptr(), lse.data_ptr()))
        assert len(seen) == 3

    with LocalWorld(2) as world:
        on_threads([world.transport(rank) for rank in range(2)], body)


def test_q_may_be_changed_after_start(on_threads: Any) -> None:
    """The queries are gathered by start: the layer may go on with q while they are in flight."""

    def body(transport: Transport) -> None:
        peer = 1 - transport.rank
        exchange = make_exchange(transport, {peer: [0]}, {peer: 1})
        q = torch.full((1, 2, 4), float(transport.rank))
        exchange.start(q)
        q.fill_(float("nan"))
        for asker, received in exchange.queries():
            assert (received == asker).all()
            exchange.reply(asker, received.clone(), received[:, :, 0].contiguous())
        assert [(state[0], float(state[2].mean())) for state in exchange.states()] == [(peer, float(transport.rank))]

    with LocalWorld(2, max_delay_s=0.005) as world:
        on_threads([world.transport(rank) for rank in range(2)], body)


def test_replies_may_be_changed_when_states_ends(on_threads: Any) -> None:
    """A holder that asks nothing itself still waits there until its replies are taken."""

    def body(transport: Transport) -> None:
        asks = transport.rank == 0
        exchange = make_exchange(transport, {1: [0]} if asks else {}, {} if asks else {0: 1})
        for layer in range(3):
            exchange.start(torch.full((1, 2, 4), float(layer)))
            out, lse = torch.empty(1, 2, 4), torch.empty(1, 2)
            for asker, q in exchange.queries():
                out.copy_(q)
                lse.fill_(layer)
                exchange.reply(asker, out, lse)
            for _, _, out_back, lse_back in exchange.states():
                assert (out_back == layer).all()
                assert (lse_back == layer).all()
            out.fill_(float("nan"))
            lse.fill_(float("nan"))

    with LocalWorld(2, max_delay_s=0.02) as world:
        on_threads([world.transport(rank) for rank in range(2)], body)


def test_on_its_own_channel_replies_may_come_amid_the_ring(on_threads: Any) -> None:
    """Rank 0 replies before its ring ends, rank 1 after: on separate channels the order does not matter."""

    def body(transport: Transport) -> None:
        peer = 1 - transport.rank
        exchange = make_exchange(transport, {peer: [0]}, {peer: 1}, channel=1)
        ring = RingExchange(transport, (0, 1), (3, 3))
        k = torch.full((3, 2, 4), float(transport.rank))
        exchange.start(torch.full((1, 2, 4), float(transport.rank)))

        def serve() -> None:
            for asker, q in exchange.queries():
                exchange.reply(asker, q + 10, q[:, :, 0].contiguous())

        for member, block, _ in ring.blocks(k, k):
            if transport.rank == 0 and member == 0:
                serve()
            assert (block == member).all()
        if transport.rank == 1:
            serve()
        for _, _, out, _ in exchange.states():
            assert (out == transport.rank + 10).all()

    with LocalWorld(2, seed=5, max_delay_s=0.002) as world:
        on_threads([world.transport(rank) for rank in range(2)], body)


def test_peers_are_served_next_neighbour_first() -> None:
    with LocalWorld(4) as world:
        exchanges = [
            make_exchange(
                world.transport(rank),
                {peer: [0] for peer in range(4) if peer != rank},
                {peer: 1 for peer in range(4) if peer != rank},
            )
            for rank in range(4)
        ]
        for exchange in exchanges:
            exchange.start(torch.zeros(1, 2, 4))
        assert [peer for peer, _ in exchanges[2].queries()] == [3, 0, 1]


def test_a_lost_holder_is_named() -> None:
    with LocalWorld(2) as world:
        exchange = make_exchange(world.transport(0), {1: [0]}, {})
        exchange.start(torch.zeros(1, 2, 4))
        error: list[BaseException] = []

        def wait() -> None:
            try:
                list(exchange.states())
            except PeerLost as lost:
                error.append(lost)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        world.kill(1)
        thread.join(10)
        assert [lost.rank for lost in error if isinstance(lost, PeerLost)] == [1]


def test_steps_out_of_order_are_refused() -> None:
    with LocalWorld(2) as world:
        exchanges = [
            make_exchange(world.transport(0), {1: [0]}, {1: 2}),
            make_exchange(world.transport(1), {0: [0, 1]}, {0: 1}),
        ]
        out, lse = torch.zeros(2, 2, 4), torch.zeros(2, 2)
        first = exchanges[0]
        for action in (lambda: list(first.queries()), lambda: list(first.states()), lambda: first.reply(1, out, lse)):
            with pytest.raises(RuntimeError, match="start"):
                action()
        with pytest.raises(ValueError, match="q must be"):
            first.start(torch.zeros(2, 2, 5))
        with pytest.raises(ValueError, match="q must be"):
            first.start(torch.zeros(2, 2, 4, dtype=torch.bfloat16))
        first.start(torch.zeros(2, 2, 4))
        exchanges[1].start(torch.zeros(2, 2, 4))
        with pytest.raises(RuntimeError, match="not finished"):
            first.start(torch.zeros(2, 2, 4))
        list(first.queries())
        with pytest.raises(RuntimeError, match=r"ranks \[1\] still wait"):
            list(first.states())
        with pytest.raises(ValueError, match="sends no queries"):
            first.reply(0, out, lse)
        with pytest.raises(ValueError, match="out must be"):
            first.reply(1, out.double(), lse)
        with pytest.raises(ValueError, match="lse must be"):
            first.reply(1, out, lse[:1])
        first.reply(1, out, lse)
        with pytest.raises(RuntimeError, match="already replied"):
            first.reply(1, out, lse)


def test_wrong_peers_and_rows_are_refused() -> None:
    with LocalWorld(2) as world:
        transport = world.transport(0)
        for sends, receives in (({0: [0]}, {}), ({2: [0]}, {}), ({}, {0: 1}), ({}, {-1: 1})):
            with pytest.raises(ValueError, match="peer must be another rank"):
                make_exchange(transport, sends, receives)
        with pytest.raises(ValueError, match="must not be negative"):
            make_exchange(transport, {}, {1: -1})
        with pytest.raises(ValueError, match="channel"):
            make_exchange(transport, {1: [0]}, {}, channel=2)
        for rows in (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)):
            with pytest.raises(ValueError, match="1-D int64"):
                QueryExchange(transport, {1: rows}, {}, num_heads=1, head_dim=1, dtype=torch.float32)
        exchange = make_exchange(transport, {1: [5]}, {})
        with pytest.raises(IndexError):
            exchange.start(torch.zeros(2, 2, 4))
