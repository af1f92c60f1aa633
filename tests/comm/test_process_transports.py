"""GlooTransport and ShmTransport alike: real processes, their deaths, deadlines, and order under load."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from loongserve.comm.transport import PeerLost, Recv, Send, Transport, TransportClosed, TransportError, TransportTimeout

Processes = list["subprocess.Popen[str]"]
Spawn = Callable[..., Processes]
ProcessWorld = Callable[..., list[Transport]]

# A death must be seen within this, from the kill on.
MAX_DETECTION_S = 2.0


def read_until(process: "subprocess.Popen[str]", word: str) -> list[str]:
    """Read lines up to one that begins with `word`; return that line's words."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(word):
            return line.split()
    raise AssertionError(f"no line began with {word!r}; the process wrote:\n{''.join(seen)}")


def test_exchanges_between_processes(spawn: Spawn) -> None:
    """Groups of 1 to 5, all dtypes, empty blocks, random histories and hundreds of outstanding messages."""
    for process in spawn("exchanges", 5):
        read_until(process, "end ok")
        assert process.wait(60) == 0


def test_a_killed_process_is_named_by_everyone_who_waits_on_it(spawn: Spawn) -> None:
    """Pending and later ops, beside an op with a live peer that does not answer; the others go on."""
    processes = spawn("lose_peer", 3)
    for process in processes:
        read_until(process, "ready")
    # All that was posted is under way.
    time.sleep(0.2)
    killed_s = time.monotonic()
    processes[2].kill()
    for process in processes[:2]:
        for phase in ("receive", "send", "later-send", "later-receive"):
            _, kind, rank, when_s = read_until(process, phase)
            assert (kind, rank) == ("PeerLost", "2"), phase
            assert float(when_s) - killed_s < MAX_DETECTION_S, phase
        read_until(process, "alive ok")
        read_until(process, "end ok")
        assert process.wait(60) == 0


def test_a_process_killed_amid_a_ring(spawn: Spawn) -> None:
    """Its neighbours name it; each rank that ends its transport on the loss lets the others know in turn."""
    processes = spawn("lose_peer_in_ring", 4)
    died_s = float(read_until(processes[3], "dying")[1])
    losses = {}
    for rank, process in enumerate(processes[:3]):
        _, kind, lost, when_s = read_until(process, "ring")
        assert kind == "PeerLost"
        assert float(when_s) - died_s < MAX_DETECTION_S
        losses[rank] = int(lost)
        read_until(process, "end ok")
        assert process.wait(60) == 0
    # Whoever was first names the victim; rank 1 has no message with it and hears of it from a neighbour.
    assert 3 in losses.values()
    assert losses[1] in (0, 2)


def test_a_process_that_never_comes(spawn: Spawn) -> None:
    processes = spawn("absent", 3, ranks=[0, 1])
    outcomes = [read_until(process, "refused")[1] for process in processes]
    assert "TransportTimeout" in outcomes
    # The one that gives up first may be missed by the other.
    assert set(outcomes) <= {"TransportTimeout", "PeerLost"}
    assert [process.wait(60) for process in processes] == [0, 0]


def test_a_process_killed_while_all_connect(spawn: Spawn, kind: str) -> None:
    """gloo sees only that not all come."""
    processes = spawn("absent", 3, ranks=[0, 1])
    for process in processes:
        read_until(process, "connecting")
    if kind == "shm":
        # It must have been there, or there is nobody to miss.
        time.sleep(0.5)
    processes[0].kill()
    expected = "TransportTimeout" if kind == "gloo" else "PeerLost"
    assert read_until(processes[1], "refused") == ["refused", expected]


@pytest.mark.parametrize("seed", range(6))
def test_order_with_many_messages_outstanding(
    seed: int, process_world: ProcessWorld, on_threads: Any, exchanges: ModuleType
) -> None:
    size = 2 + seed % 2
    on_threads(process_world(size, channels=1 + seed % 3), lambda transport: exchanges.stress(transport, seed, 600))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_histories_over_threads_of_it(
    process_world: ProcessWorld, on_threads: Any, exchanges: ModuleType
) -> None:
    transports = process_world(4)
    for seed in range(500):
        history = exchanges.make_history(seed, 4)
        on_threads(transports, lambda transport, history=history: exchanges.play(transport, history))


def test_a_wait_that_times_out_does_no_harm(process_world: ProcessWorld) -> None:
    """A native wait of gloo that timed out would close the pair; ours leaves the op posted and the others alone."""
    first, second = process_world(2)
    target, other = torch.zeros(3), torch.zeros(3)
    handle = first.post([Recv(target, 1)])
    with pytest.raises(TransportTimeout, match="receive from rank 1"):
        handle.wait(0.05)
    second.post([Send(torch.ones(3), 0)], 1)
    first.post([Recv(other, 1)], 1).wait()
    second.post([Send(torch.full((3,), 2.0), 0)]).wait()
    handle.wait()
    assert (target.tolist(), other.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_the_transports_own_deadline(process_world: ProcessWorld) -> None:
    first, _ = process_world(2, timeout_s=1.0)
    handle = first.post([Send(torch.zeros(1 << 20), 1)])
    assert not handle.done()
    with pytest.raises(TransportTimeout, match="after 1 s: send to rank 1"):
        handle.wait()


@pytest.mark.parametrize("how", ["close", "abort"])
def test_closing_wakes_every_waiter_on_both_sides(process_world: ProcessWorld, how: str) -> None:
    first, second, third = process_world(3)
    errors: dict[str, TransportError] = {}

    def wait(name: str, transport: Transport, peer: int, channel: int) -> threading.Thread:
        handle = transport.post([Recv(torch.zeros(1), peer)], channel)

        def run() -> None:
            try:
                handle.wait()
            except TransportError as error:
                errors[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    threads = [wait("mine", first, 1, 0), wait("mine too", first, 2, 1)]
    threads += [wait("second", second, 0, 0), wait("third", third, 0, 1)]
    getattr(first, how)()
    for thread in threads:
        thread.join(10)
    assert {name: type(error) for name, error in errors.items()} == {
        "mine": TransportClosed,
        "mine too": TransportClosed,
        "second": PeerLost,
        "third": PeerLost,
    }
    assert {error.rank for error in errors.values() if isinstance(error, PeerLost)} == {0}
    with pytest.raises(TransportClosed):
        first.post([])
    first.close()
    # The others are not disturbed.
    target = torch.zeros(1)
    second.post([Send(torch.ones(1), 2)])
    third.post([Recv(target, 1)]).wait()
    assert target.item() == 1.0


def test_close_ends_all_threads(process_world: ProcessWorld) -> None:
    before = set(os.listdir("/proc/self/task"))
    first, second = process_world(2)
    assert len(os.listdir("/proc/self/task")) > len(before)
    pending = first.post([Send(torch.zeros(1), 1), Recv(torch.zeros(1), 1)])
    second.post([Recv(torch.zeros(1), 0)], 1)
    for transport in (first, second):
        transport.close()
        transport.close()
    # One that was joined is in the list a moment longer, and gloo's own threads end by themselves.
    deadline_s = time.monotonic() + 10
    while set(os.listdir("/proc/self/task")) - before and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert set(os.listdir("/proc/self/task")) <= before
    with pytest.raises(TransportError):
        pending.wait()
