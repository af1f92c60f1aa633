"""GlooTransport: what is its own. What it has in common with others is in test_process_transports."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from loongserve.comm.gloo import GlooTransport
from loongserve.comm.transport import Recv, Send, Transport, TransportTimeout

GlooWorld = Callable[..., list[Transport]]


@pytest.fixture
def kind() -> str:
    return "gloo"


@pytest.mark.parametrize(
    "received", [torch.zeros(2), torch.zeros(8), torch.zeros(4, dtype=torch.int32)], ids=["short", "long", "dtype"]
)
def test_ends_that_disagree_never_meet(process_world: GlooWorld, received: torch.Tensor) -> None:
    """gloo itself would end the process over a message too long, and take one too short for a whole one."""
    first, second = process_world(2)
    handles = [first.post([Send(torch.ones(4), 1)]), second.post([Recv(received, 0)])]
    for handle in handles:
        with pytest.raises(TransportTimeout):
            handle.wait(0.1)
    assert not received.any()
    # The lane is lost, the others are not.
    target = torch.zeros(4)
    first.post([Send(torch.ones(4), 1)], 1)
    second.post([Recv(target, 0)], 1).wait()
    assert target.all()


def test_handles_that_are_done_are_forgotten(process_world: GlooWorld) -> None:
    first, second = process_world(2)
    assert isinstance(first, GlooTransport)
    for _ in range(10):
        handle = first.post([Send(torch.zeros(1), 1)])
        second.post([Recv(torch.zeros(1), 0)]).wait()
        handle.wait()
    deadline_s = time.monotonic() + 10
    while first._unfinished and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert not first._unfinished


def test_a_world_of_one(tmp_path: Path) -> None:
    transport = GlooTransport(0, 1, tmp_path / "store")
    transport.post([]).wait()
    transport.close()
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_network_meet_at_a_store_and_connect_by_address() -> None:
    """As on two machines: no file, and an address that is not the usual one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: dict[int, GlooTransport] = {}

    def join(rank: int) -> None:
        client = TCPStore("127.0.0.1", store.port)
        ranks[rank] = GlooTransport(rank, 2, PrefixStore("epoch-0", client), host=f"127.0.0.{2 + rank}")

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    addresses = {connection.laddr.ip for connection in psutil.Process().net_connections("tcp")}
    assert {"127.0.0.2", "127.0.0.3"} <= addresses
    received = torch.zeros(3)
    ranks[0].post([Send(torch.ones(3), 1)])
    ranks[1].post([Recv(received, 0)]).wait()
    assert received.all()
    for transport in ranks.values():
        transport.close()


def test_wrong_arguments_are_refused(process_world: GlooWorld, tmp_path: Path) -> None:
    for arguments in ((2, 2, "store"), (0, 0, "store"), (0, 1, "store", 0), (0, 1, "store", 2, 0.0)):
        with pytest.raises(ValueError, match="must"):
            GlooTransport(*arguments)  # type: ignore[arg-type]
    first, _ = process_world(2)
    with pytest.raises(ValueError, match="CPU tensors only, got one on meta"):
        first.post([Send(torch.zeros(1, device="meta"), 1)])
