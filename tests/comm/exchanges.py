"""What the tests of comm do with exchanges, for threads and processes alike; run as a script it is one rank's process.

Every element that is sent is a function of who sends it, where in the history and at which index, and is an integer
below 251, so that it is exact in every dtype; every rank checks all that it gets.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from loongserve.comm.gloo import GlooTransport
from loongserve.comm.query import QueryExchange
from loongserve.comm.ring import RingExchange
from loongserve.comm.shm import ShmTransport
from loongserve.comm.transport import Handle, Op, PeerLost, Recv, Send, Transport, TransportError

NUM_HEADS = 3
HEAD_DIM = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
FLOAT_DTYPES = DTYPES[:3]


def pattern(shape: Sequence[int], dtype: torch.dtype, *key: int) -> torch.Tensor:
    """Return a tensor that is told from those of other keys: small integers in an order of their own."""
    offset = 0
    for part in key:
        offset = (offset * 31 + part + 7) % 251
    numel = 1
    for size in shape:
        numel *= size
    return ((torch.arange(numel) * 11 + offset) % 251).to(dtype).view(*shape)


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.shape != expected.shape or not torch.equal(got, expected):
        raise AssertionError(f"{what}: wrong data, shape {tuple(got.shape)}, expected {tuple(expected.shape)}")


@dataclass(frozen=True)
class Iteration:
    """One iteration of a group: a ring pass and a query exchange in each layer, as an engine runs them."""

    number: int
    group: tuple[int, ...]
    rows: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    num_layers: int = 1
    # (asking rank, holder) -> rows of q
    asks: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    query_channel: int = 0
    compute_s: float = 0.0


def run_iteration(transport: Transport, iteration: Iteration) -> None:
    """Run one member's part and check all that comes."""
    me, group, rows = transport.rank, iteration.group, iteration.rows
    my_asks = {holder: q_rows for (asker, holder), q_rows in iteration.asks.items() if asker == me and q_rows}
    ring = RingExchange(transport, group, rows)
    query_dtype = iteration.dtype if iteration.dtype.is_floating_point else torch.float32
    exchange = QueryExchange(
        transport,
        {holder: torch.tensor(q_rows, dtype=torch.int64) for holder, q_rows in my_asks.items()},
        {asker: len(q_rows) for (asker, holder), q_rows in iteration.asks.items() if holder == me},
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype=query_dtype,
        device=torch.get_default_device(),
        channel=iteration.query_channel,
    )
    num_q = 1 + max((row for q_rows in iteration.asks.values() for row in q_rows), default=0)
    size = len(group)
    member = group.index(me)
    for layer in range(iteration.num_layers):

        def q_of(rank: int, layer: int = layer) -> torch.Tensor:
            return pattern((num_q, NUM_HEADS, HEAD_DIM), query_dtype, iteration.number, layer, rank)

        def block_of(index: int, which: int, layer: int = layer) -> torch.Tensor:
            shape = (rows[index], NUM_HEADS, HEAD_DIM)
            return pattern(shape, iteration.dtype, iteration.number, layer, group[index], which)

        exchange.start(q_of(me))
        visited = []
        for index, k, v in ring.blocks(block_of(member, 0), block_of(member, 1)):
            visited.append(index)
            if iteration.compute_s:
                time.sleep(iteration.compute_s)
            check(f"rank {me}: K of member {index}", k, block_of(index, 0))
            check(f"rank {me}: V of member {index}", v, block_of(index, 1))
        if visited != [(member - step) % size for step in range(size)]:
            raise AssertionError(f"rank {me}: members came in the order {visited}")
        for asker, q in exchange.queries():
            check(f"rank {me}: q of rank {asker}", q, q_of(asker)[list(iteration.asks[asker, me])])
            out = q.float() + me
            exchange.reply(asker, out, out[:, :, 0] * 2)
        holders = []
        for holder, q_rows, out, lse in exchange.states():
            holders.append(holder)
            expected = q_of(me)[q_rows].float() + holder
            check(f"rank {me}: out of rank {holder}", out, expected)
            check(f"rank {me}: lse of rank {holder}", lse, expected[:, :, 0] * 2)
        if sorted(holders) != sorted(my_asks):
            raise AssertionError(f"rank {me}: states came from {holders}")


def make_history(seed: int, world_size: int, num_iterations: int = 6, scale: int = 1) -> list[Iteration]:
    """Draw iterations of random overlapping groups, to be issued in this one order to all their members.

    Blocks have `scale` times the rows, in rings only.
    """
    rng = random.Random(seed)
    history = []
    for number in range(num_iterations):
        group = rng.sample(range(world_size), rng.randint(1, world_size))
        asks = {
            (asker, holder): tuple(sorted(rng.sample(range(4), rng.randint(0, 3))))
            for asker in group
            for holder in group
            if asker != holder and rng.random() < 0.4
        }
        history.append(
            Iteration(
                number=number,
                group=tuple(group),
                rows=tuple(rng.choice((0, 1, 2, 5)) * scale for _ in group),
                dtype=rng.choice(DTYPES),
                num_layers=rng.randint(1, 2),
                asks=asks,
                query_channel=rng.randint(0, 1),
            )
        )
    return history


def play(transport: Transport, history: Sequence[Iteration]) -> None:
    """Run this rank's part of each iteration that it is a member of, in order."""
    for iteration in history:
        if transport.rank in iteration.group:
            run_iteration(transport, iteration)


def exchange_all_sizes(transport: Transport) -> None:
    """Groups of every size from 1 to the world's, of every dtype, with full, unequal and empty contributions."""
    world_size = transport.world_size
    history = []
    for size in range(1, world_size + 1):
        contributions = ((4,) * size, tuple(range(size)), (0,) * (size - 1) + (7,), (0,) * size, (5_000,) * size)
        for start, (dtype, rows) in enumerate(zip(DTYPES, contributions, strict=True)):
            group = tuple((start + step) % world_size for step in range(size))
            asks = {(asker, holder): (0, 3) for asker in group for holder in group[:2] if asker != holder}
            history.append(Iteration(len(history), group, rows, dtype, 2, asks))
    play(transport, history)


def stress(transport: Transport, seed: int, num_messages: int = 400) -> None:
    """Exchange many messages of random sizes with every peer on every channel, hundreds of them outstanding."""
    peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
    lanes = [(peer, channel) for peer in peers for channel in range(transport.num_channels)]

    def size_of(source: int, destination: int, channel: int, number: int) -> int:
        rng = random.Random(f"{seed}:{source}:{destination}:{channel}:{number}")
        sizes = (1, 1, 1, rng.randint(2, 100), rng.randint(1, 60_000))
        return rng.choice(sizes) if rng.random() < 0.97 else rng.randint(100_000, 2_000_000)

    def make(size: int) -> torch.Tensor:
        """In the transport's own memory or not: all combinations of both ends are met."""
        return transport.empty((size,), torch.uint8) if order.random() < 0.5 else torch.empty(size, dtype=torch.uint8)

    order = random.Random(f"{seed}:{transport.rank}")
    per_lane = num_messages // (2 * len(lanes))
    steps = [(lane, kind) for lane in lanes for kind in ("send", "receive") for _ in range(per_lane)]
    order.shuffle(steps)
    counts = dict.fromkeys([(lane, kind) for lane in lanes for kind in ("send", "receive")], 0)
    received = []
    posts: list[tuple[Op, int]] = []
    for (peer, channel), kind in steps:
        number = counts[(peer, channel), kind]
        counts[(peer, channel), kind] += 1
        if kind == "send":
            size = size_of(transport.rank, peer, channel, number)
            tensor = make(size).copy_(pattern((size,), torch.uint8, transport.rank, peer, channel, number))
            posts.append((Send(tensor, peer), channel))
        else:
            tensor = make(size_of(peer, transport.rank, channel, number)).fill_(255)
            posts.append((Recv(tensor, peer), channel))
            received.append((peer, channel, number, tensor))
    handles: list[Handle] = []
    if transport.serial_posts:
        # One place in the order of posts: the ranks post in different orders.
        for channel in range(transport.num_channels):
            handles += transport.post_all([[op] for op, its_channel in posts if its_channel == channel], channel)
    else:
        handles += [transport.post([op], channel) for op, channel in posts]
    for handle in handles:
        handle.wait()
    for peer, channel, number, tensor in received:
        expected = pattern(tuple(tensor.shape), torch.uint8, peer, transport.rank, channel, number)
        check(f"rank {transport.rank}: message {number} of rank {peer} on channel {channel}", tensor, expected)


def barrier(transport: Transport) -> None:
    """Wait for all ranks: one that closes earlier is a lost peer to those that still exchange."""
    peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
    tokens = [torch.zeros(1) for _ in peers]
    sends = [Send(torch.ones(1), peer) for peer in peers]
    transport.post([*sends, *(Recv(token, peer) for token, peer in zip(tokens, peers, strict=True))]).wait()


def report(*words: object) -> None:
    print(*words, flush=True)


def lose_peer(transport: Transport, victim: int) -> None:
    """Meet the death of the last rank in every state that an op can be in, and report when it was seen."""
    peer = torch.zeros(4)
    alive = [rank for rank in range(transport.world_size) if rank != victim]
    if transport.rank == victim:
        report("ready")
        time.sleep(60)
        return
    # A live peer that does not answer must not hide the dead one.
    other = next(rank for rank in alive if rank != transport.rank)
    pending = {
        "receive": transport.post([Recv(torch.zeros(4), other), Recv(peer, victim)]),
        "send": transport.post([Send(torch.zeros(1 << 22), victim)], 1),
    }
    report("ready")
    for name, handle in pending.items():
        report(name, *outcome(handle.wait))
    report("later-send", *outcome(lambda: transport.post([Send(peer, victim)]).wait()))
    report("later-receive", *outcome(lambda: transport.post([Recv(peer, victim)], 1).wait()))
    # The others go on; the receive from `other` that failed above with the dead rank is still the first in its lane.
    handle = transport.post([Send(torch.full((4,), 5.0), other)])
    handle.wait()
    play(transport, [Iteration(0, tuple(alive), (3,) * len(alive), num_layers=3, query_channel=1)])
    report("alive", "ok")


def lose_peer_in_ring(transport: Transport, victim: int) -> None:
    """Pass a ring around until the victim kills itself in the middle of one; end the transport on any failure."""
    group = tuple(range(transport.world_size))
    ring = RingExchange(transport, group, [4096] * len(group))
    k = torch.zeros(4096, NUM_HEADS, HEAD_DIM)

    def passes() -> None:
        for layer in range(1000):
            for step, _ in enumerate(ring.blocks(k, k)):
                if transport.rank == victim and (layer, step) == (3, 1):
                    report("dying", time.monotonic())
                    os.kill(os.getpid(), signal.SIGKILL)

    report("ready")
    report("ring", *outcome(passes))
    transport.abort()


def outcome(action: Callable[[], object]) -> tuple[object, ...]:
    """Run it; return what it raised, of which rank, and when."""
    try:
        action()
    except PeerLost as error:
        return "PeerLost", error.rank, time.monotonic()
    except TransportError as error:
        return type(error).__name__, -1, time.monotonic()
    return "ok", -1, time.monotonic()


def connect(kind: str, rank: int, world_size: int, place: str, timeout_s: float) -> Transport:
    """Make a transport of a world that is reached by a path (gloo) or an inherited file (shm)."""
    if kind == "gloo":
        return GlooTransport(rank, world_size, place, channels=3, timeout_s=timeout_s)
    return ShmTransport(rank, int(place), timeout_s=timeout_s)


def main(scenario: str, rank: int, world_size: int, kind: str, place: str) -> None:
    torch.set_num_threads(1)
    report("connecting")
    try:
        transport = connect(kind, rank, world_size, place, timeout_s=2 if scenario == "absent" else 60)
    except TransportError as error:
        report("refused", type(error).__name__)
        return
    if scenario == "exchanges":
        exchange_all_sizes(transport)
        for seed in range(6):
            play(transport, make_history(seed, world_size))
        stress(transport, seed=0)
        barrier(transport)
    elif scenario == "lose_peer":
        lose_peer(transport, world_size - 1)
    elif scenario == "lose_peer_in_ring":
        lose_peer_in_ring(transport, world_size - 1)
    else:
        raise ValueError(f"no such scenario: {scenario}")
    transport.close()
    report("end", "ok")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
