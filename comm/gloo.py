"""A transport between processes of one machine or of a network, on torch's gloo: needs nothing but a CPU.

gloo moves the data on a thread of its own and closes the pair of a rank that died as soon as the kernel closes its
socket. Two things it does not do well are kept from callers:

- A native wait that times out closes every pair of its process group. So callers never wait natively. One courier
  thread for each (peer, channel, direction) in use waits without limit for its works in order and completes our
  handles; callers wait for those, with any deadline, and a lost peer fails a post even while another op of it cannot
  proceed. The native time-out is kept for `abort`, which needs just that: it wakes every courier, and peers see it.
- A message longer than the tensor it is received into ends the process, a shorter one goes unnoticed. So a message
  bears a tag made of its number within the lane, its size and its dtype: ends that disagree never meet, and both run
  into their deadlines, as does all that follows in that lane.
"""

import queue
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from os import PathLike, fspath
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from loongserve.comm.transport import (
    Handle,
    Op,
    PeerLost,
    PostHandle,
    Send,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
)

# Nothing is ever sent with this tag: `abort` receives on it.
_ABORT_TAG = 0
_FOREVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)

_Lane = tuple[int, int, type[Op]]


class _Group(Protocol):
    """What is used of `ProcessGroupGloo`; torch's stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...


class _Courier(threading.Thread):
    """Waits for the works of one (peer, channel, direction) in order and completes their handles."""

    def __init__(self, transport: "GlooTransport", lane: _Lane) -> None:
        super().__init__(name=f"gloo-courier-{lane[0]}-{lane[1]}-{lane[2].__name__.lower()}", daemon=True)
        self._transport = transport
        self._peer = lane[0]
        self.works: queue.SimpleQueue[tuple[dist.Work, PostHandle, int] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (entry := self.works.get()) is not None:
            work, handle, index = entry
            try:
                work.wait(_FOREVER)
            except RuntimeError as error:
                handle.fail(PeerLost(self._peer, str(error)))
            else:
                handle.complete(index)
            if handle.done():
                self._transport._forget(handle)


class GlooTransport(Transport):
    """One rank of a world of processes, over TCP: on the loopback interface, or on the one that has ``host``.

    Messages are neither encrypted nor authenticated: a network must be trusted. Every rank must make it; it returns
    when all are connected to all. Only CPU tensors. There is one gloo process group a channel, so a large message on
    one does not hold up the others; no global process group is used or made.

    A peer that dies is seen at once, one that hangs only by the deadline of a wait. A wait that times out leaves its
    ops posted, as with any `Transport`: abort then.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: Where the ranks find each other: the path of a file that only the user can write, which must not exist
            before the first rank makes its transport and must be a new one for each world; or, across machines, a store
            of torch (``TCPStore``), behind a ``PrefixStore`` of its own for each world.
        channels: Number of channels.
        timeout_s: Seconds to wait for the other ranks here, and deadline of waits that name none.
        host: Address of this machine at which the other ranks reach it.

    Raises:
        ValueError: An argument is out of range.
        TransportTimeout: Some ranks did not come in time.
        TransportError: The ranks could not be connected.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: str | PathLike[str] | Store,
        channels: int = 2,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(rank, world_size, channels)
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._unfinished: set[PostHandle] = set()
        self._couriers: dict[_Lane, _Courier] = {}
        self._num_posted: dict[_Lane, int] = {}
        try:
            self._groups = self._connect(store, host) if world_size > 1 else []
        except RuntimeError as error:
            message = f"rank {rank} could not connect to all of {world_size} ranks within {timeout_s:g} s: {error}"
            if "time" in str(error).lower():
                raise TransportTimeout(message) from error
            raise TransportError(message) from error

    def close(self) -> None:
        self._end("was closed")
        with self._lock:
            couriers, self._couriers = list(self._couriers.values()), {}
        for courier in couriers:
            courier.works.put(None)
        for courier in couriers:
            courier.join()
        self._groups = []

    def abort(self) -> None:
        self._end("was aborted")

    def _check(self, op: Op) -> None:
        super()._check(op)
        if op.tensor.device.type != "cpu":
            raise ValueError(f"gloo moves CPU tensors only, got one on {op.tensor.device}")

    def _connect(self, store: str | PathLike[str] | Store, host: str) -> list[_Group]:
        timeout = timedelta(seconds=self._timeout_s)
        if not isinstance(store, Store):
            store = FileStore(fspath(store), self.world_size)
            store.set_timeout(timeout)
        groups: list[_Group] = []
        for channel in range(self.num_channels):
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            # Never the machine's own name: it need not resolve, or may be reachable from outside.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            options._timeout = timeout
            options._threads = 1
            prefix = PrefixStore(f"channel-{channel}", store)
            groups.append(cast(_Group, dist.ProcessGroupGloo(prefix, self.rank, self.world_size, options)))
        return groups

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        handle = PostHandle(self.rank, ops, channel, self._timeout_s)
        # The lock makes the order of native posts and that of the couriers' queues the same.
        with self._lock:
            if self._closed is not None:
                raise TransportClosed(self._closed)
            if ops:
                self._unfinished.add(handle)
            for index, op in enumerate(ops):
                # gloo does not know every dtype, and does not convert: bytes are bytes.
                data = op.tensor.detach().view(-1).view(torch.uint8)
                lane = (op.peer, channel, type(op))
                number = self._num_posted[lane] = self._num_posted.get(lane, -1) + 1
                tag = _message_tag(number, op.tensor)
                group = self._groups[channel]
                try:
                    work = (group.send if isinstance(op, Send) else group.recv)([data], op.peer, tag)
                except RuntimeError as error:
                    handle.fail(PeerLost(op.peer, str(error)))
                    self._unfinished.discard(handle)
                else:
                    self._courier(lane).works.put((work, handle, index))
        return handle

    def _courier(self, lane: _Lane) -> _Courier:
        courier = self._couriers.get(lane)
        if courier is None:
            courier = self._couriers[lane] = _Courier(self, lane)
            courier.start()
        return courier

    def _forget(self, handle: PostHandle) -> None:
        with self._lock:
            self._unfinished.discard(handle)

    def _end(self, how: str) -> None:
        with self._lock:
            if self._closed is not None:
                return
            self._closed = f"rank {self.rank}: the transport {how}"
            unfinished, self._unfinished = self._unfinished, set()
        for handle in unfinished:
            handle.fail(TransportClosed(self._closed))
        for group in self._groups:
            self._close_pairs(group)

    def _close_pairs(self, group: _Group) -> None:
        """Let a native wait time out: that closes all pairs of the group, which ends every other native wait."""
        for peer in range(self.world_size):
            if peer != self.rank:
                # Raises in any case: for the time-out, or at once if this very pair was closed before.
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)


def _message_tag(number: int, tensor: torch.Tensor) -> int:
    """Return the tag of a lane's message `number`, from 1 to 2^31 - 1; equal tags meet in the order of their posts."""
    key = f"{number}:{tensor.numel()}:{tensor.dtype}"
    return zlib.crc32(key.encode()) & 0x7FFFFFFF or _ABORT_TAG + 1
