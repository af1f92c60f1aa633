"""StagedTransport: device tensors over a transport of CPU tensors; here CPU tensors are staged as if of a device."""

from collections.abc import Iterator

import pytest
import torch

from loongserve.comm.local import LocalWorld
from loongserve.comm.staged import StagedTransport
from loongserve.comm.transport import PeerLost, Recv, Send, TransportClosed, TransportTimeout

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    with LocalWorld(2, max_delay_s=0.05, timeout_s=5.0) as world:
        yield world


def staged(world: LocalWorld, device: str) -> tuple[StagedTransport, StagedTransport]:
    return StagedTransport(world.transport(0), [device]), StagedTransport(world.transport(1), [device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_sends_are_taken_at_the_post_and_receives_come_at_the_wait(
    world: LocalWorld, device: str, dtype: torch.dtype
) -> None:
    first, second = staged(world, device)
    source = (torch.arange(12).view(3, 4) % 2).to(device, dtype)
    target, expected = torch.zeros_like(source), source.clone()
    sending = first.post([Send(source, 1)])
    source.zero_()
    receiving = second.post([Recv(target, 0)])
    sending.wait()
    # It is in host memory.
    assert receiving.done()
    assert not target.any()
    for _ in range(2):
        receiving.wait()
        assert torch.equal(target, expected)
        assert not source.any()
    # A wait that comes again leaves the tensor alone.
    target.zero_()
    receiving.synchronize()
    assert not target.any()


def test_other_tensors_go_straight_through(world: LocalWorld) -> None:
    first, second = staged(world, "cuda")
    source, target = torch.ones(4), torch.zeros(4)
    handles = [first.post([Send(source, 1)]), second.post([Recv(target, 0)])]
    source.fill_(2.0)
    for handle in handles:
        handle.wait()
    assert target.tolist() == [2.0] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_each_batch_has_its_own_handle(world: LocalWorld, device: str) -> None:
    first, second = staged(world, device)
    targets = [torch.zeros(2, device=device) for _ in range(3)]
    never, *handles = second.post_all([[Recv(targets[0], 0), Recv(targets[1], 0)], [], [Recv(targets[2], 0)]])
    for value in (1.0, 2.0):
        first.post([Send(torch.full((2,), value, device=device), 1)])
    assert handles[0].done()
    never.wait()
    with pytest.raises(TransportTimeout):
        handles[1].wait(0.1)
    assert [tensor.tolist() for tensor in targets] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]


def test_losses_and_ends_are_those_of_the_inner_transport(world: LocalWorld) -> None:
    first, second = staged(world, "cpu")
    target = torch.zeros(2)
    waiting, mine = first.post([Recv(target, 1)]), second.post([Recv(torch.zeros(2), 0)])
    second.abort()
    with pytest.raises(PeerLost, match="rank 1"):
        waiting.wait()
    with pytest.raises(TransportClosed):
        mine.wait()
    first.check()
    first.close()
    with pytest.raises(TransportClosed):
        first.post([])
    assert not target.any()


def test_wrong_ops_are_refused_and_nothing_is_posted(world: LocalWorld) -> None:
    first, second = staged(world, "cpu")
    for tensor in (torch.zeros(0), torch.zeros(3, 3).t()):
        with pytest.raises(ValueError, match="must"):
            first.post([Send(torch.zeros(1), 1), Send(tensor, 1)])
    assert not second.post([Recv(torch.zeros(1), 0)]).done()
