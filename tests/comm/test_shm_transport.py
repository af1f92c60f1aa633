"""ShmTransport: what is its own. What it has in common with others is in test_process_transports."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from loongserve.comm import shm
from loongserve.comm.shm import ShmTransport, create_shm_world
from loongserve.comm.transport import (
    Handle,
    MessageMismatch,
    PeerLost,
    Recv,
    Send,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
)
from loongserve.native_library import NativeBuildError

EPOCHS = Path(__file__).with_name("epochs.py")
SOURCES = Path(__file__).parents[2] / "src"

ShmWorld = Callable[..., list[ShmTransport]]

# Below, at and above what is copied at once, a staging slot, a piece, and all slots together; larger than the arena.
SIZES = (1, 64, 4097, 128 << 10, (128 << 10) + 1, 256 << 10, (1 << 20) + 3, 3 << 20, 5 << 20)


@pytest.fixture
def kind() -> str:
    return "shm"


@pytest.mark.parametrize("receiver_has_it", [False, True])
@pytest.mark.parametrize("sender_has_it", [False, True])
def test_any_size_from_and_to_any_memory(
    sender_has_it: bool, receiver_has_it: bool, process_world: ShmWorld, exchanges: ModuleType
) -> None:
    first, second = process_world(2)
    for number, size in enumerate(SIZES):
        for sent_first in (True, False):
            source = first.empty((size,), torch.uint8) if sender_has_it else torch.empty(size, dtype=torch.uint8)
            target = second.empty((size,), torch.uint8) if receiver_has_it else torch.empty(size, dtype=torch.uint8)
            source.copy_(exchanges.pattern((size,), torch.uint8, number))
            target.fill_(255)
            posts: list[Callable[[], Handle]] = [
                lambda source=source: first.post([Send(source, 1)]),  # type: ignore[misc]
                lambda target=target: second.post([Recv(target, 0)]),  # type: ignore[misc]
            ]
            for handle in [post() for post in (posts if sent_first else posts[::-1])]:
                handle.wait()
            exchanges.check(f"{size} bytes", target, source)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2, torch.complex64, torch.int16, torch.float64])
def test_any_dtype(dtype: torch.dtype, process_world: ShmWorld) -> None:
    first, second = process_world(2)
    source, target = first.empty((3, 5), dtype), torch.zeros(3, 5, dtype=dtype)
    source.copy_(torch.arange(15).view(3, 5))
    first.post([Send(source, 1)])
    second.post([Recv(target, 0)]).wait()
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


def test_tensors_are_ordinary_and_their_memory_comes_back(process_world: ShmWorld) -> None:
    first, _ = process_world(2)
    assert first.arena_used_bytes == 0
    tensor = first.empty((1000, 3), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((1000, 3), torch.bfloat16, True)
    assert first.arena_used_bytes == 6016
    # Part of it keeps the whole.
    part = tensor[10:20].fill_(2)
    del tensor
    gc.collect()
    assert first.arena_used_bytes == 6016
    # It outlives the transport.
    first.close()
    assert part.sum() == 60
    del part
    gc.collect()
    assert first.arena_used_bytes == 0
    with pytest.raises(TransportClosed):
        first.empty((1,), torch.uint8)


def test_a_full_arena_is_no_error(process_world: ShmWorld) -> None:
    """Tensors come from elsewhere then, and small messages too find another way."""
    first, second = process_world(2)
    # 4 MiB, in pieces that leave holes when every other one goes.
    tensors = [first.empty((1 << 16,), torch.uint8) for _ in range(64)]
    assert first.arena_used_bytes == 1 << 22
    other = first.empty((1 << 20,), torch.uint8).fill_(7)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    handle = second.post([Recv(target, 0)])
    first.post([Send(other, 1)]).wait()
    handle.wait()
    small = torch.zeros(100, dtype=torch.uint8)
    handle = second.post([Recv(small, 0)])
    first.post([Send(other[:100], 1)]).wait()
    handle.wait()
    assert (target == 7).all()
    assert (small == 7).all()
    del tensors[::2]
    gc.collect()
    assert first.arena_used_bytes == 1 << 21
    del tensors
    gc.collect()
    assert first.arena_used_bytes == 0
    assert first.empty((1 << 22,), torch.uint8).data_ptr()


def test_small_messages_on_their_way_give_the_arena_back(process_world: ShmWorld) -> None:
    first, second = process_world(2)
    handles = [first.post([Send(torch.full((1000,), float(i)), 1)]) for i in range(300)]
    assert first.arena_used_bytes > 300 * 4000
    targets = [torch.zeros(1000) for _ in handles]
    handles += [second.post([Recv(target, 0)]) for target in targets]
    for handle in handles:
        handle.wait()
    assert [int(target[0]) for target in targets] == list(range(300))
    assert first.arena_used_bytes == 0


@pytest.mark.parametrize(
    ("received", "named"),
    [
        (torch.zeros(2), "rank 0 sends 4 elements of torch.float32, rank 1 receives 2 of torch.float32"),
        (torch.zeros(8), "rank 0 sends 4 elements of torch.float32, rank 1 receives 8 of torch.float32"),
        (torch.zeros(4, dtype=torch.int32), "rank 1 receives 4 of torch.int32"),
    ],
    ids=["short", "long", "dtype"],
)
def test_ends_that_disagree_both_learn_it_at_once(process_world: ShmWorld, received: torch.Tensor, named: str) -> None:
    first, second = process_world(2)
    for _ in range(2):
        handles = [first.post([Send(torch.ones(4), 1)]), second.post([Recv(received, 0)])]
        for handle in handles:
            with pytest.raises(MessageMismatch, match=named):
                handle.wait()
    assert not received.any()
    # The lane goes on.
    target = torch.zeros(4)
    first.post([Send(torch.ones(4), 1)])
    second.post([Recv(target, 0)]).wait()
    assert target.all()


def test_a_channel_is_not_held_up_by_another(process_world: ShmWorld) -> None:
    """Thousands of messages that nobody receives fill a channel's ring; the other one still works."""
    first, second = process_world(2)
    unreceived = [first.post([Send(torch.full((2,), float(i)), 1)], 1) for i in range(3000)]
    target = torch.zeros(1)
    handle = second.post([Recv(target, 0)])
    first.post([Send(torch.ones(1), 1)]).wait()
    handle.wait()
    assert target.item() == 1
    assert not any(handle.done() for handle in unreceived)
    targets = [torch.zeros(2) for _ in unreceived]
    for handle in [second.post([Recv(target, 0)], 1) for target in targets]:
        handle.wait()
    assert [int(target[0]) for target in targets] == list(range(3000))
    for handle in unreceived:
        handle.wait()


def test_handles_are_dropped_and_their_tensors_freed(process_world: ShmWorld) -> None:
    """Also those that nobody waits for; the number that is kept does not grow with what was sent."""
    first, second = process_world(2)
    for _ in range(1000):
        first.post([Send(torch.zeros(1), 1)])
        second.post([Recv(torch.zeros(1), 0)]).wait()
    assert len(first._held) <= 65
    assert not second._held


def test_tensors_live_as_long_as_they_are_in_flight(process_world: ShmWorld) -> None:
    first, second = process_world(2)
    for number in range(5):
        first.post([Send(first.empty((300_000,), torch.uint8).fill_(number), 1)])
        gc.collect()
    for number in range(5):
        target = torch.zeros(300_000, dtype=torch.uint8)
        second.post([Recv(target, 0)]).wait()
        assert (target == number).all()


def test_several_threads_wait_and_each_is_woken(process_world: ShmWorld) -> None:
    first, second = process_world(2, 4)
    errors: list[str] = []

    def run(transport: Transport, channel: int) -> None:
        peer = 1 - transport.rank
        for number in range(100):
            size = (10, 50_000, 400_000)[(number + channel) % 3]
            target = torch.zeros(size, dtype=torch.uint8)
            sent = torch.full((size,), (number * 8 + channel * 2 + transport.rank) % 251, dtype=torch.uint8)
            transport.post([Send(sent, peer), Recv(target, peer)], channel).wait()
            if not (target == (number * 8 + channel * 2 + peer) % 251).all():
                errors.append(f"rank {transport.rank}, channel {channel}, number {number}")

    threads = [
        threading.Thread(target=run, args=(transport, channel), daemon=True)
        for transport in (first, second)
        for channel in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


def test_one_handle_for_several_threads(process_world: ShmWorld) -> None:
    first, second = process_world(2)
    handle = second.post([Recv(torch.zeros(1), 0)])
    threads = [threading.Thread(target=handle.wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    first.post([Send(torch.ones(1), 1)]).wait()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_signal_reaches_a_thread_that_waits(process_world: ShmWorld) -> None:
    """Ctrl-C must end a wait, however long its deadline is."""
    first, _ = process_world(2)
    handle = first.post([Recv(torch.zeros(1), 1)])

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("the handler ran")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError, match="the handler ran"):
            handle.wait(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not handle.done()


def test_nothing_runs_while_nothing_comes(process_world: ShmWorld) -> None:
    """A wait sleeps: four ranks that wait a while use next to no processor time."""
    transports = process_world(4)
    handles = [transport.post([Recv(torch.zeros(1), (transport.rank + 1) % 4)]) for transport in transports]
    threads = [threading.Thread(target=wait_out, args=(handle,), daemon=True) for handle in handles]
    begin_s = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert time.process_time() - begin_s < 0.2


def wait_out(handle: Handle) -> None:
    with pytest.raises(TransportTimeout):
        handle.wait(1.0)


def test_aborting_amid_copies(process_world: ShmWorld) -> None:
    """In every phase of large messages; tensors are kept until the copies have ended, and threads end."""
    for delay_s in (0.0, 0.0005, 0.001, 0.002):
        first, second = process_world(2)
        for has_it in (False, True):
            size = (4 << 20,)
            source = torch.ones(size)
            target = second.empty((1 << 18,), torch.float32) if has_it else torch.zeros(size)
            first.post([Send(source[: target.numel()], 1)], 1 if has_it else 0)
            second.post([Recv(target, 0)], 1 if has_it else 0)
            del source, target
        time.sleep(delay_s)
        first.abort()
        with pytest.raises(PeerLost):
            second.post([Recv(torch.zeros(1), 0)]).wait()
        first.close()
        second.close()


def test_a_rank_is_taken_once(process_world: ShmWorld) -> None:
    file = create_shm_world(1)
    transport = ShmTransport(0, file)
    with pytest.raises(TransportError, match="make a new world"):
        ShmTransport(0, file)
    transport.post([]).wait()
    transport.close()
    with pytest.raises(TransportError, match="make a new world"):
        ShmTransport(0, file)
    os.close(file)


def test_a_fork_has_no_part_in_it(process_world: ShmWorld) -> None:
    """A child that ended its copy of the transport told all peers that its parent had."""
    first, second = process_world(2)
    child = os.fork()
    if child == 0:
        first.__del__()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.post([Send(torch.ones(1), 1)])
    second.post([Recv(torch.zeros(1), 0)]).wait()


def test_a_transport_that_is_dropped_closes(process_world: ShmWorld) -> None:
    file = create_shm_world(2)
    made: list[ShmTransport] = []
    thread = threading.Thread(target=lambda: made.append(ShmTransport(1, file)))
    thread.start()
    first = ShmTransport(0, file)
    thread.join()
    os.close(file)
    handle = first.post([Recv(torch.zeros(1), 1)])
    made[0].post([Recv(torch.zeros(1), 0)])
    made.clear()
    gc.collect()
    with pytest.raises(PeerLost, match="closed its transport"):
        handle.wait()
    first.close()


def test_wrong_arguments_are_refused(process_world: ShmWorld) -> None:
    for arguments in ((0,), (1, 0), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            create_shm_world(*arguments)
    file = create_shm_world(2)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        ShmTransport(2, file)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        ShmTransport(0, file, 0.0)
    os.close(file)
    for size in (0, 1 << 16):
        file = os.memfd_create("other")
        os.ftruncate(file, size)
        with pytest.raises(ValueError, match="memory file of create_shm_world"):
            ShmTransport(0, file)
        os.close(file)
    first, _ = process_world(2)
    with pytest.raises(ValueError, match="CPU tensors only, got one on meta"):
        first.post([Send(torch.zeros(1, device="meta"), 1)])
    with pytest.raises(ValueError, match="resolve_conj"):
        first.post([Send(torch.zeros(1, dtype=torch.complex64).conj(), 1)])
    assert first.empty((0, 3), torch.float32).shape == (0, 3)


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    shm._library.cache_clear()
    try:
        with pytest.raises(NativeBuildError, match="no-such-compiler"):
            create_shm_world(2)
    finally:
        shm._library.cache_clear()


def test_nothing_lies_in_dev_shm(process_world: ShmWorld) -> None:
    before = set(os.listdir("/dev/shm"))
    process_world(3)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("channels", [1, 5])
def test_stress_between_threads(channels: int, process_world: ShmWorld, on_threads: Any, exchanges: ModuleType) -> None:
    on_threads(process_world(4, channels), lambda transport: exchanges.stress(transport, channels, 800))


def test_histories_of_processes_with_deaths() -> None:
    play_with_deaths(0, 16)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(16, 216, 50))
def test_many_histories_of_processes_with_deaths(first: int) -> None:
    play_with_deaths(first, first + 50)


def play_with_deaths(first: int, last: int) -> None:
    """Random groups and delays; a rank is killed at a random moment, is named in time, and a new world forms."""
    command = [sys.executable, str(EPOCHS), str(first), str(last)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("end ok\n"), done.stdout[-2000:] + done.stderr[-4000:]
    # Proves that the kills do not come too late: half of the histories have one, and most of those are cut by it.
    assert (
        sum("lost a peer" in line and " 0 lost" not in line for line in done.stdout.splitlines()) > (last - first) / 4
    )
