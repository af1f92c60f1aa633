"""Transports between two processes beside memcpy, overlap with compute, and what a new group costs.

Run as a script it is the other rank's process. Both ends use one compute thread.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from loongserve.comm.gloo import GlooTransport
from loongserve.comm.local import LocalWorld
from loongserve.comm.query import QueryExchange
from loongserve.comm.ring import RingExchange
from loongserve.comm.shm import ShmTransport, create_shm_world
from loongserve.comm.transport import Recv, Send, Transport

KB, MB = 1 << 10, 1 << 20
# memcpy's time by that of a message one way: what is at least asked for.
LEAST_RATIO = {64 * KB: 0.1, MB: 1 / 2, 16 * MB: 1 / 1.3}
# Longest pass with overlap, by the longer of compute and transfer.
MOST_OVERLAP = 1.1
STEP_S = 0.005
NUM_LAYERS = 20
NEW_GROUP_US = 100
# The other rank of a pair has nothing to do while other benchmarks run.
PATIENCE_S = 900.0
# The first byte of the last message of a series. Another part of each holds the time at which it was sent, in ns.
LAST = 255
STAMP_OFFSET = 8


class Pair:
    """This process is rank 0, a child is rank 1 and sends back what it gets."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.one_way_ns: list[int] = []
        file = create_shm_world(2) if kind == "shm" else -1
        place = str(file) if kind == "shm" else str(folder / "store")
        self.process = start_peer("echo", 1, 2, kind, place, [file] if kind == "shm" else [])
        self.transport = connect(kind, 0, 2, place)
        if kind == "shm":
            os.close(file)

    def series(self, num_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin messages of one size; answer what sends one there and back, and what ends the series."""
        self._to_and_fro(torch.tensor([num_bytes]), torch.zeros(1, dtype=torch.int64))
        out = self.transport.empty((num_bytes,), torch.uint8).fill_(1)
        back = self.transport.empty((num_bytes,), torch.uint8).zero_()
        sent = ctypes.c_int64.from_address(back.data_ptr() + STAMP_OFFSET)
        self.one_way_ns.clear()

        def once() -> None:
            self._to_and_fro(out, back)
            self.one_way_ns.append(time.monotonic_ns() - sent.value)

        def end() -> None:
            out[0] = LAST
            once()
            check()

        def check() -> None:
            back[STAMP_OFFSET : STAMP_OFFSET + 8] = 1
            assert torch.equal(out, back)

        once()
        check()
        return once, end

    def close(self) -> None:
        self._to_and_fro(torch.tensor([0]), torch.zeros(1, dtype=torch.int64))
        self.process.wait(30)
        self.transport.close()

    def _to_and_fro(self, out: torch.Tensor, back: torch.Tensor) -> None:
        self.transport.post([Send(out, 1), Recv(back, 1)]).wait()


def connect(kind: str, rank: int, size: int, place: str) -> Transport:
    if kind == "shm":
        return ShmTransport(rank, int(place), timeout_s=PATIENCE_S)
    return GlooTransport(rank, size, place, timeout_s=PATIENCE_S)


def start_peer(what: str, rank: int, size: int, kind: str, place: str, files: Sequence[int]) -> subprocess.Popen[bytes]:
    sources = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-P", __file__, what, str(rank), str(size), kind, place]
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, pass_fds=files)


def echo(transport: Transport) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    transport.post([Recv(size, 0)]).wait()
    while num_bytes := int(size):
        # Two tensors: one is received into while the other is on its way back.
        tensors = [transport.empty((num_bytes,), torch.uint8) for _ in range(2)]
        first_bytes = [ctypes.c_uint8.from_address(tensor.data_ptr()) for tensor in tensors]
        stamps = [ctypes.c_int64.from_address(tensor.data_ptr() + STAMP_OFFSET) for tensor in tensors]
        transport.post([Send(size, 0), Recv(tensors[0], 0)]).wait()
        turn = 0
        while first_bytes[turn].value != LAST:
            ops = [Send(tensors[turn], 0), Recv(tensors[1 - turn], 0)]
            stamps[turn].value = time.monotonic_ns()
            transport.post(ops).wait()
            turn = 1 - turn
        transport.post([Send(tensors[turn], 0), Recv(size, 0)]).wait()
    transport.post([Send(size, 0)]).wait()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    torch.set_num_threads(1)
    made = {kind: Pair(kind, tmp_path_factory.mktemp(kind)) for kind in ("shm", "gloo")}
    yield made
    for pair in made.values():
        pair.close()


@pytest.mark.parametrize(("num_bytes", "times"), [(64 * KB, 100), (MB, 20), (16 * MB, 3)], ids=["64KB", "1MB", "16MB"])
def test_one_way_beside_memcpy(
    num_bytes: int,
    times: int,
    pairs: dict[str, Pair],
    ratio_to: Callable[..., float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hot: the receiver has not gone to sleep when the next message comes.

    The ratio is that of messages to and fro, with all that Python does at both ends; from post to return takes less.
    """
    once, end = pairs["shm"].series(num_bytes)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    def ours() -> None:
        for _ in range(times):
            once()

    def memcpy() -> None:
        for _ in range(2 * times):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)

    ratio = ratio_to(ours, memcpy, "memcpy", 2 * times * num_bytes / 1e6, "MB")
    report_one_way("hot", pairs["shm"], capsys)
    end()
    assert ratio > LEAST_RATIO[num_bytes]


def report_one_way(name: str, pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{name}: {statistics.median(pair.one_way_ns) / 1e3:.1f} us from post to the end of the wait (median)")


def test_small_cold_beside_gloo(
    pairs: dict[str, Pair], ratio_to: Callable[..., float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cold: the other transport's message lies between two of one, and all threads sleep."""
    (shm, end_shm), (gloo, end_gloo) = (pairs[kind].series(64 * KB) for kind in ("shm", "gloo"))

    ratio = ratio_to(shm, gloo, "gloo", 2, "messages")
    for kind in ("shm", "gloo"):
        report_one_way(f"cold {kind}", pairs[kind], capsys)
    end_shm()
    end_gloo()
    assert ratio > 3


def ring_pass(transport: Transport, ring: RingExchange, k: torch.Tensor, compute: Callable[[], object]) -> None:
    for _ in ring.blocks(k, k):
        compute()


def query_pass(transport: Transport, exchange: QueryExchange, q: torch.Tensor, compute: Callable[[], object]) -> None:
    """Everybody asks everybody: the own shard, then each peer's queries."""
    exchange.start(q)
    compute()
    for peer, queries in exchange.queries():
        compute()
        exchange.reply(peer, queries, queries[:, :, 0].contiguous())
    for _ in exchange.states():
        pass


def run_layers(transport: Transport, what: str, rows: int, compute: Callable[[], object]) -> float:
    """Run passes of one exchange among all ranks; answer the seconds of the median one."""
    size, me = transport.world_size, transport.rank
    seconds = []
    block = transport.empty((rows, 8, 64), torch.float32).fill_(1)
    if what == "ring":
        ring = RingExchange(transport, range(size), [rows] * size)
    else:
        peers = [rank for rank in range(size) if rank != me]
        asked = {peer: torch.arange(rows) for peer in peers}
        exchange = QueryExchange(
            transport, asked, dict.fromkeys(peers, rows), num_heads=8, head_dim=64, dtype=torch.float32
        )
    for _ in range(NUM_LAYERS):
        begin_s = time.perf_counter()
        if what == "ring":
            ring_pass(transport, ring, block, compute)
        else:
            query_pass(transport, exchange, block, compute)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


@pytest.mark.parametrize("what", ["ring", "query"])
@pytest.mark.parametrize("size", [2, 4])
def test_overlap_with_delays_alone(size: int, what: str, ratio_to: Callable[..., float]) -> None:
    """Transfer and compute are 5 ms each and use no processor; a pass takes little more than the one of them.

    A ring pass has a step a member. In a query exchange the queries travel while the own shard is computed and states
    while the next peer's queries are; the last states have nothing to travel beside: two steps more than peers.
    """
    steps = size if what == "ring" else size + 1

    def ours() -> None:
        with LocalWorld(size, max_delay_s=STEP_S) as world:
            on_threads(size, lambda rank: run_layers(world.transport(rank), what, 2, lambda: time.sleep(STEP_S)))

    def baseline() -> None:
        for _ in range(NUM_LAYERS * steps):
            time.sleep(STEP_S)

    assert ratio_to(ours, baseline, "no transfer", NUM_LAYERS * steps, "steps") > 1 / MOST_OVERLAP


@pytest.mark.parametrize("what", ["ring", "query"])
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_overlap_of_processes(kind: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of it where transfer and compute share the cores: reported, not asserted.

    Two processes, each with a compute thread that keeps its core busy for 5 ms a step, and blocks of 4 MB.
    """
    file = create_shm_world(2) if kind == "shm" else -1
    place = str(file) if kind == "shm" else str(tmp_path / "store")
    process = start_peer(f"overlap-{what}", 1, 2, kind, place, [file] if kind == "shm" else [])
    torch.set_num_threads(1)
    results = overlap(connect(kind, 0, 2, place), what)
    assert process.wait(60) == 0
    with capsys.disabled():
        transfer_ms, compute_ms, both_ms = (1e3 * seconds for seconds in results)
        print(
            f"\n{kind}, {what}: transfer {transfer_ms:.1f} ms, compute {compute_ms:.1f} ms, both {both_ms:.1f} ms "
            f"= {both_ms / max(transfer_ms, compute_ms):.2f} x the longer"
        )


def overlap(transport: Transport, what: str) -> tuple[float, float, float]:
    """Answer the seconds of a pass with transfer alone, compute alone, and both; every rank must call it."""
    work = torch.ones(256, 256)

    def compute() -> None:
        end_s = time.perf_counter() + STEP_S
        while time.perf_counter() < end_s:
            work @ work

    rows = 4 * MB // (8 * 64 * 4)
    transfer_s = run_layers(transport, what, rows, lambda: None)
    steps = 2
    compute_s = timed(lambda: [compute() for _ in range(steps)])
    both_s = run_layers(transport, what, rows, compute)
    token = torch.zeros(1)
    transport.post([Send(torch.ones(1), 1 - transport.rank), Recv(token, 1 - transport.rank)]).wait()
    transport.close()
    return transfer_s, compute_s, both_s


def timed(action: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    action()
    return time.perf_counter() - begin_s


def on_threads(size: int, body: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_new_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """A group is a tuple of ranks: one that never was costs no more than one used before."""
    file = create_shm_world(4)
    processes = [start_peer("groups", rank, 4, "shm", str(file), [file]) for rank in (1, 2, 3)]
    torch.set_num_threads(1)
    transport = ShmTransport(0, file)
    os.close(file)
    first_s, second_s = form_groups(transport)
    for process in processes:
        assert process.wait(60) == 0
    first_us, second_us = 1e6 * statistics.median(first_s), 1e6 * statistics.median(second_s)
    with capsys.disabled():
        print(f"\nfirst use of a group {first_us:.0f} us, second {second_us:.0f} us (median of {len(first_s)} groups)")
    assert first_us - second_us < NEW_GROUP_US


def form_groups(transport: Transport) -> tuple[list[float], list[float]]:
    """Form each group of rank 0 with others, in any order, and pass blocks around it, twice. All ranks call it."""
    k = torch.ones(16, 2, 64)
    first_s: list[float] = []
    second_s: list[float] = []
    for size in (2, 3, 4):
        for others in itertools.permutations((1, 2, 3), size - 1):
            group = (0, *others)
            for seconds in (first_s, second_s):
                meet(transport)
                if transport.rank in group:
                    seconds.append(
                        timed(lambda group=group: list(RingExchange(transport, group, [16] * len(group)).blocks(k, k)))
                    )
    meet(transport)
    transport.close()
    return first_s, second_s


def meet(transport: Transport) -> None:
    """Wait for all ranks."""
    peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
    tokens = [torch.zeros(1) for _ in peers]
    sends = [Send(torch.ones(1), peer) for peer in peers]
    transport.post([*sends, *(Recv(token, peer) for token, peer in zip(tokens, peers, strict=True))]).wait()


def main(what: str, rank: int, size: int, kind: str, place: str) -> None:
    torch.set_num_threads(1)
    transport = connect(kind, rank, size, place)
    if what == "echo":
        echo(transport)
    elif what == "groups":
        form_groups(transport)
    else:
        overlap(transport, what.removeprefix("overlap-"))
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
