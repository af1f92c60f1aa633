"""The ranks of the tests of NCCL: run as a script it is a server that forks a process for each scenario it is told.

So torch is imported once, and each rank is a process of its own that can be killed. The NCCL library is the stand-in,
if its path is given, or the real one on the machine's GPUs.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import standin

LIBRARY = standin.load(sys.argv[2]) if __name__ == "__main__" and sys.argv[2] else None

import pytest  # noqa: E402
import torch  # noqa: E402 - the stand-in comes before any library that torch brings
from conftest import GuardedTransport, on_threads  # noqa: E402
from exchanges import (  # noqa: E402
    Iteration,
    barrier,
    check,
    exchange_all_sizes,
    make_history,
    outcome,
    pattern,
    play,
    report,
    stress,
)
from torch.distributed import FileStore, PrefixStore  # noqa: E402

from loongserve.comm.nccl import NcclAllReduce, NcclTransport  # noqa: E402
from loongserve.comm.nccl_communicator import Communicator, RemoteFailure, new_unique_id  # noqa: E402
from loongserve.comm.ring import RingExchange  # noqa: E402
from loongserve.comm.streams import CudaStreams, StreamDevice  # noqa: E402
from loongserve.comm.transport import (  # noqa: E402
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

SCENARIOS: dict[str, Callable[..., None]] = {}


def scenario(run: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[run.__name__] = run
    return run


def make_streams(rank: int) -> StreamDevice:
    if LIBRARY is not None:
        return standin.HostStreams(LIBRARY)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return CudaStreams(device)


def connect(rank: int, world_size: int, path: str, epoch: str = "world", **options: Any) -> NcclTransport:
    store = PrefixStore(epoch, FileStore(path))
    return NcclTransport(rank, world_size, store, make_streams(rank), **{"timeout_s": 30.0, **options})


def on_ranks(size: int, make: Callable[[int], Any]) -> list[Any]:
    """Make what each rank makes, at the same time, in this process."""
    made: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            made[rank] = make(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [made[rank] for rank in range(size)]


@contextmanager
def world(
    size: int, path: str, streams: Sequence[standin.HostStreams] | None = None, **options: Any
) -> Iterator[list[NcclTransport]]:
    """All ranks of a world in this process; at the end all are closed, and nothing of theirs is left."""
    before = set(threading.enumerate())
    devices = [standin.HostStreams(LIBRARY) for _ in range(size)] if streams is None else streams

    def make(rank: int) -> NcclTransport:
        return NcclTransport(rank, size, FileStore(path), devices[rank], **{"timeout_s": 30.0, **options})

    transports = on_ranks(size, make)
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()
            transport.close()
    assert set(threading.enumerate()) <= before, threading.enumerate()
    assert not any(device.num_events for device in devices)


def expect(
    kinds: type[TransportError] | tuple[type[TransportError], ...], action: Callable[[], object]
) -> TransportError:
    """Run it and return the error that it must raise, of just one of these kinds."""
    try:
        action()
    except TransportError as error:
        if type(error) in (kinds if isinstance(kinds, tuple) else (kinds,)):
            return error
        raise AssertionError(f"expected {kinds}") from error
    raise AssertionError(f"no error; expected {kinds}")


@scenario
def exchanges(rank: int, world_size: int, path: str, num_histories: int) -> None:
    """One rank of a world: all group sizes and dtypes, random histories, hundreds of outstanding messages."""
    transport = connect(rank, world_size, path, channels=3)
    exchange_all_sizes(transport)
    for seed in range(num_histories):
        play(transport, make_history(seed, world_size))
    for seed in range(2):
        stress(transport, seed)
    barrier(transport)
    transport.check()
    transport.close()


@scenario
def contract(path: str) -> None:
    """Worlds of 1 to 5 on threads; nothing that is in flight is written or received into."""
    for size in range(1, 6):
        with world(size, f"{path}-{size}") as transports:
            on_threads([GuardedTransport(transport) for transport in transports], exchange_all_sizes)


@scenario
def die_while_connecting(rank: int, world_size: int, path: str) -> None:
    report("ready")
    report("lost", *outcome(lambda: connect(rank, world_size, path)))


@scenario
def absent(rank: int, world_size: int, path: str) -> None:
    for timeout_s in (0.3, 0.3):
        expect(TransportTimeout, lambda timeout_s=timeout_s: connect(rank, world_size, path, timeout_s=timeout_s))


def wait_for_loss(transport: Transport, phase: str, victim: int, path: str) -> None:
    """Be in a phase of some kind when the victim dies, and raise what comes of it."""
    rank, world_size = transport.rank, transport.world_size
    others = [peer for peer in range(world_size) if peer not in (rank, victim)]
    big = torch.zeros(1 << 20)
    if phase == "idle":
        while not os.path.exists(f"{path}-killed"):
            time.sleep(0.01)
        transport.post([Send(torch.zeros(1), victim)]).wait()
    elif phase == "receive":
        # Only rank 0 waits for the victim; the others wait for rank 0, or for those who do.
        source = victim if rank == 0 else rank - 1
        transport.post([Recv(torch.zeros(4), source)]).wait()
    elif phase == "send":
        transport.post([Send(big, victim)], 1).wait()
    elif phase == "mixed":
        transport.post([Recv(torch.zeros(4), victim), *(Recv(torch.zeros(4), peer) for peer in others)]).wait()
    elif phase == "ring":
        ring = RingExchange(transport, range(world_size), [2048] * world_size)
        block = torch.zeros(2048, 3, 4)
        for _ in range(100_000):
            for _ in ring.blocks(block, block):
                pass
    elif phase == "histories":
        for seed in range(100_000):
            play(transport, make_history(seed, world_size))
    else:
        raise ValueError(f"no such phase: {phase}")


@scenario
def churn(rank: int, world_size: int, path: str, victim: int, phase: str, joins: bool = False) -> None:
    """Live through the death of a rank: then a world of the survivors, then one with the rank started anew."""
    if not joins:
        transport = connect(rank, world_size, path, "world-0")
        report("ready")
        if rank == victim and phase not in ("ring", "histories"):
            time.sleep(60)
        report("lost", *outcome(lambda: wait_for_loss(transport, phase, victim, path)))
        # All that comes later fails with the same loss, at the post or at the wait.
        report("later", *outcome(lambda: transport.post([Recv(torch.zeros(4), victim)], 1).wait()))
        transport.close()
        survivors = [each for each in range(world_size) if each != victim]
        smaller = connect(survivors.index(rank), world_size - 1, path, "world-1")
        for seed in range(3):
            play(smaller, make_history(seed, world_size - 1))
        barrier(smaller)
        smaller.close()
    again = connect(rank, world_size, path, "world-2")
    for seed in range(3):
        play(again, make_history(seed, world_size))
    barrier(again)
    again.close()


@scenario
def others_go_on(path: str) -> None:
    """A rank that closes or aborts with nothing under way fails only what is posted with it later."""
    for how in ("close", "abort"):
        with world(3, f"{path}-{how}") as (first, second, third):
            getattr(first, how)()
            expect(TransportClosed, lambda: first.post([]))
            while not second._world._gone or not third._world._gone:
                time.sleep(0.001)
            for transport in (second, third):
                assert expect(PeerLost, transport.post([Recv(torch.zeros(1), 0)]).wait).rank == 0
                transport.check()
            on_threads((second, third), lambda transport: play(transport, [Iteration(0, (1, 2), (3, 2), num_layers=2)]))


@scenario
def close_wakes_everyone(path: str) -> None:
    for how in ("close", "abort"):
        with world(3, f"{path}-{how}") as (first, second, third):
            handles = {
                "mine": first.post([Recv(torch.zeros(1), 1)]),
                "mine too": first.post([Recv(torch.zeros(1), 2)], 1),
                "second": second.post([Recv(torch.zeros(1), 0)]),
                "third": third.post([Recv(torch.zeros(1), 0)], 1),
            }
            errors: dict[str, TransportError] = {}

            def wait(name: str, handle: Handle, errors: dict[str, TransportError] = errors) -> None:
                errors[name] = expect((TransportClosed, PeerLost), handle.wait)

            threads = [threading.Thread(target=wait, args=each) for each in handles.items()]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            started_s = time.monotonic()
            getattr(first, how)()
            for thread in threads:
                thread.join(10)
            assert time.monotonic() - started_s < 2.5
            kinds = {name: type(error) for name, error in errors.items()}
            assert kinds == {
                "mine": TransportClosed,
                "mine too": TransportClosed,
                "second": PeerLost,
                "third": PeerLost,
            }
            assert {error.rank for error in errors.values() if isinstance(error, PeerLost)} == {0}


@scenario
def abort_while_nccl_is_in_progress(path: str) -> None:
    """A post that waits for NCCL's launch, on a thread of its own, ends at once when another thread aborts."""
    with world(2, path) as (first, _):
        LIBRARY.standin_set(b"launch_us", 600_000)
        LIBRARY.standin_set(b"call_us", 300)
        errors: list[TransportError] = []

        def post() -> None:
            errors.append(expect(TransportClosed, lambda: first.post([Recv(torch.zeros(1), 1)]).wait()))

        thread = threading.Thread(target=post)
        thread.start()
        time.sleep(0.1)
        first.abort()
        thread.join(0.3)
        assert errors, "the post went on until NCCL was through"
        LIBRARY.standin_set(b"launch_us", 0)
        LIBRARY.standin_set(b"call_us", 0)


@scenario
def many_threads(path: str) -> None:
    """Posts, waits and polls from many threads: never two of them in one communicator at once."""
    LIBRARY.standin_set(b"call_us", 100)
    with world(2, path, channels=4) as transports:

        def run(transport: Transport) -> None:
            def use(channel: int) -> None:
                peer = 1 - transport.rank
                for number in range(20):
                    got, sent = torch.zeros(64), torch.full((64,), float(number * 10 + channel))
                    handle = transport.post([Send(sent, peer), Recv(got, peer)], channel)
                    while number % 2 and not handle.done():
                        time.sleep(0)
                    handle.wait()
                    check("a message", got, sent)

            channels = iter(range(4))
            on_threads([transport] * 4, lambda _: use(next(channels)))

        on_threads(transports, run)
    LIBRARY.standin_set(b"call_us", 0)


@scenario
def nccl_errors(path: str) -> None:
    """What NCCL meets on its own is raised on that rank by its kind, and is the loss of that rank to the others."""
    codes = {1: TransportError, 3: TransportError, 5: MessageMismatch}
    for code, kind in codes.items():
        with world(2, f"{path}-{code}") as (first, second):
            LIBRARY.standin_set(b"fail_code", code)
            LIBRARY.standin_set(b"fail_group", 2)
            handle = first.post([Recv(torch.zeros(1), 1)])
            error = expect(kind, handle.wait)
            assert "injected failure of group 2" in str(error), error
            LIBRARY.standin_set(b"fail_group", 0)
            assert expect(kind, lambda: first.post([Recv(torch.zeros(1), 1)]).wait()) is error
            assert expect(kind, first.check) is error
            lost = expect(PeerLost, lambda: second.post([Recv(torch.zeros(1), 0)]).wait())
            assert lost.rank == 0
            assert "injected failure" in str(lost), lost


@scenario
def remote_error(path: str) -> None:
    """NCCL says that a peer is gone and does not know which: nobody is, so none is named."""
    with world(2, path) as (first, _):
        LIBRARY.standin_set(b"fail_code", 6)
        LIBRARY.standin_set(b"fail_group", 2)
        error = expect(RemoteFailure, first.post([Recv(torch.zeros(1), 1)]).wait)
        assert "RemoteError" in str(error), error
        LIBRARY.standin_set(b"fail_group", 0)


@scenario
def wrong_sizes(path: str) -> None:
    for size in (2, 8, 1 << 20):
        with world(2, f"{path}-{size}") as (first, second):
            handles = [first.post([Send(torch.ones(4), 1)]), second.post([Recv(torch.zeros(size), 0)])]
            errors = [expect((MessageMismatch, PeerLost), handle.wait) for handle in handles]
            assert any(isinstance(error, MessageMismatch) for error in errors), errors


@scenario
def deadlines(path: str) -> None:
    """A blocking wait that times out does no harm; nor does one that was never made."""
    with world(2, path, timeout_s=5.0) as (first, second):
        target = torch.zeros(3)
        handle = first.post([Recv(target, 1)])
        error = expect(TransportTimeout, lambda: handle.wait(0.05))
        assert "rank 0, channel 0: receive from rank 1 ((3,) torch.float32): not done after 0.05 s" in str(error), error
        assert not handle.done()
        second.post([Send(torch.ones(3), 0)]).wait()
        handle.wait()
        assert handle.done()
        assert target.tolist() == [1.0] * 3


@scenario
def serial_posts(path: str) -> None:
    """Posts in an order that no two ranks share never end; as one place in the order they do."""
    for together in (True, False):
        with world(2, f"{path}-{together}", timeout_s=0.5) as transports:

            def body(transport: Transport, together: bool = together) -> None:
                peer = 1 - transport.rank
                got = torch.zeros(4)
                posts = [[Send(torch.ones(4), peer)], [Recv(got, peer)]]
                handles = transport.post_all(posts) if together else [transport.post(ops) for ops in posts]
                for handle in handles:
                    handle.wait()
                assert got.all()

            if together:
                on_threads(transports, body)
            else:
                handles = [transport.post([Send(torch.ones(4), 1 - transport.rank)]) for transport in transports]
                for transport in transports:
                    transport.post([Recv(torch.ones(4), 1 - transport.rank)])
                expect(TransportTimeout, handles[0].synchronize)


@scenario
def stream_order(path: str) -> None:
    """On a device that computes in a stream, waits return at once and the stream's order keeps the data right."""
    streams = [standin.HostStreams(LIBRARY, with_compute_stream=True) for _ in range(2)]
    with world(2, path, streams) as (first, second):
        LIBRARY.standin_set(b"delay_us", 20_000)
        sent, made = torch.zeros(1000), torch.full((1000,), 7.0)
        got, copied = torch.zeros(1000), torch.zeros(1000)
        started_s = time.monotonic()
        # What is sent is computed only later, when the post is long made.
        streams[0].sleep(0.3)
        streams[0].copy(sent, made)
        sending = first.post([Send(sent, 1)])
        receiving = second.post([Recv(got, 0)])
        for handle in (sending, receiving):
            handle.wait()
        # Overwritten by the sender, and read by the receiver, as soon as their streams allow.
        streams[0].copy(sent, torch.zeros(1000))
        streams[1].copy(copied, got)
        then = second.post([Send(copied, 0)], 1)
        back = torch.zeros(1000)
        returned = first.post([Recv(back, 1)], 1)
        assert time.monotonic() - started_s < 0.25, "a wait blocked"
        assert not receiving.done()
        returned.synchronize()
        then.synchronize()
        check("what came back", back, made)
        assert sending.done()
        assert receiving.done()
        first.check()
        LIBRARY.standin_set(b"delay_us", 0)


@scenario
def stream_deadline(path: str) -> None:
    """A deadline that passes in a stream ends the world, and the stream runs on."""
    streams = [standin.HostStreams(LIBRARY, with_compute_stream=True) for _ in range(2)]
    with world(2, path, streams) as (first, second):
        handle = first.post([Recv(torch.zeros(1), 1)])
        source, target = torch.ones(8), torch.zeros(8)
        handle.wait(0.3)
        streams[0].copy(target, source)
        time.sleep(0.05)
        assert not target.any()
        deadline_s = time.monotonic() + 5
        while not target.all() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert target.all()
        error = expect(TransportTimeout, first.check)
        assert "not done by its deadline" in str(error)
        assert expect(TransportTimeout, handle.synchronize) is error
        assert expect(PeerLost, lambda: second.post([Recv(torch.zeros(1), 0)]).synchronize()).rank == 0


@scenario
def stream_loss(path: str) -> None:
    """A peer that goes frees the streams that wait for it, and is named afterwards."""
    streams = [standin.HostStreams(LIBRARY, with_compute_stream=True) for _ in range(2)]
    with world(2, path, streams) as (first, second):
        handle = first.post([Recv(torch.zeros(1), 1)])
        source, target = torch.ones(8), torch.zeros(8)
        handle.wait()
        streams[0].copy(target, source)
        second.abort()
        deadline_s = time.monotonic() + 2
        while not target.all() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert target.all()
        assert expect(PeerLost, first.check).rank == 1
        assert expect(PeerLost, handle.wait).rank == 1


@scenario
def close_flushes(path: str) -> None:
    """A close with all done finalizes the communicators; one that does not end is aborted after a second."""
    with world(2, f"{path}-0") as transports:
        on_threads(transports, barrier)
    LIBRARY.standin_set(b"finalize_hangs", 1)
    with world(2, f"{path}-1") as (first, second):
        started_s = time.monotonic()
        first.close()
        assert time.monotonic() - started_s < 5
        while not second._world._gone:
            time.sleep(0.001)
    LIBRARY.standin_set(b"finalize_hangs", 0)


@scenario
def all_dtypes(path: str) -> None:
    """What NCCL has no name for goes as bytes."""
    with world(2, path) as transports:

        def body(transport: Transport) -> None:
            for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16, torch.float64):
                sent = (torch.arange(9) % 2).to(dtype)
                got = torch.zeros(9).to(dtype)
                transport.post([Send(sent, 1 - transport.rank), Recv(got, 1 - transport.rank)]).wait()
                assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8)), dtype

        on_threads(transports, body)


@scenario
def refusals(path: str) -> None:
    with world(2, path) as (first, second):
        wrong = {
            "contiguous": Send(torch.zeros(4, 4).t(), 1),
            "must not be empty": Send(torch.zeros(0), 1),
            "must be on cpu, got one on meta": Recv(torch.zeros(1, device="meta"), 1),
            "resolve_conj": Send(torch.zeros(2, dtype=torch.complex64).conj(), 1),
            "another rank": Send(torch.zeros(1), 0),
        }
        for words, op in wrong.items():
            with pytest.raises(ValueError, match=words):
                first.post([Send(torch.zeros(1), 1), op])
        # Nothing was posted.
        assert not second.post([Recv(torch.zeros(1), 0)]).done()
    for arguments in ({"timeout_s": 0.0}, {"channels": 0}):
        with pytest.raises(ValueError, match="must be"):
            connect(0, 1, path, **arguments)


def make_sum(rank: int, size: int, path: str, streams: StreamDevice, **options: Any) -> NcclAllReduce:
    return NcclAllReduce(rank, size, FileStore(path), streams, **options)


@scenario
def sums(rank: int, world_size: int, path: str) -> None:
    """Sums of all dtypes and sizes on the ranks of a world."""
    group = make_sum(rank, world_size, path, make_streams(rank))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8):
        for size in (1, 3, 100_000):
            parts = [pattern((size,), torch.int64, peer) % 8 for peer in range(world_size)]
            got = group.all_reduce(parts[rank].to(dtype, copy=True))
            check(f"a sum of {dtype}", got, sum(parts).to(dtype))
    group.all_reduce(torch.zeros(0))
    group.check()
    group.all_reduce(torch.zeros(1))
    group.close()


@scenario
def sums_in_streams(path: str) -> None:
    """A sum is in the compute stream's own order, without a wait; a lost rank ends it and is named."""
    streams = [standin.HostStreams(LIBRARY, with_compute_stream=True) for _ in range(3)]
    groups = on_ranks(3, lambda rank: make_sum(rank, 3, path, streams[rank]))
    values = [torch.full((5,), float(rank)) for rank in range(3)]
    copies = [torch.zeros(5) for _ in range(3)]
    for rank, group in enumerate(groups):
        streams[rank].sleep(0.05)
        group.all_reduce(values[rank])
        streams[rank].copy(copies[rank], values[rank])
    deadline_s = time.monotonic() + 5
    while not all((copy == 3.0).all() for copy in copies) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert all((copy == 3.0).all() for copy in copies), copies
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(1, dtype=torch.bool), torch.zeros(1, device="meta")):
        with pytest.raises(ValueError, match=r"must be|NCCL sums"):
            groups[0].all_reduce(tensor)
    groups[0].all_reduce(values[0])
    groups[2].abort()
    deadline_s = time.monotonic() + 2
    while groups[0]._world._error is None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert expect(PeerLost, groups[0].check).rank == 2
    for group in groups:
        group.close()


@scenario
def one_rank_alone(path: str) -> None:
    """The one thing that a single GPU can do: a message to oneself inside a group."""
    device = make_streams(0)
    comm, stream = Communicator(new_unique_id(), 0, 1, device), device.create_stream()

    def settle() -> None:
        while (state := comm.state()) is False:
            time.sleep(0.001)
        assert state is True, state

    settle()
    sent, got, event = torch.arange(1000.0), torch.zeros(1000), device.create_event()
    if not sent.is_cpu:
        torch.cuda.synchronize()
    comm.exchange([Send(sent, 0), Recv(got, 0)], stream)
    settle()
    device.record(event, stream)
    while not device.is_done(event):
        time.sleep(0.001)
    check("what was sent to oneself", got, sent)
    if LIBRARY is not None:
        expect(MessageMismatch, lambda: comm.exchange([Send(sent, 0)], stream))
    comm.finalize()
    settle()
    comm.destroy()
    comm.abort()
    expect(TransportClosed, lambda: comm.exchange([Send(sent, 0)], stream))


def run(command: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for name, value in command["knobs"].items():
        assert LIBRARY is not None
        assert LIBRARY.standin_set(name.encode(), value) == 0, name
    SCENARIOS[command["scenario"]](**command["arguments"])
    if LIBRARY is not None:
        assert LIBRARY.standin_violations() == 0, "NCCL's rules for calls were broken"
    report("end", "ok")


def serve(control: socket.socket) -> None:
    """Fork a process for each command, with the pipe that came along as its output."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, outputs, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            return
        (output,) = outputs
        child = os.fork()
        if child == 0:
            # It ends with the server.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 1
            try:
                run(json.loads(message))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(output)
        control.send(str(child).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
