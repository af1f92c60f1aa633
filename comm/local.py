"""A world of ranks that are threads of one process, with seeded delays: the transport of tests and in-process clusters.

A message is delivered by one copy from the sender's tensor to the receiver's. The copy is made at delivery, not at the
post, so a sender that overwrites a tensor in flight corrupts the message here just as it would on a real transport.
"""

import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from loongserve.comm.transport import (
    Handle,
    MessageMismatch,
    Op,
    PeerLost,
    PostHandle,
    Send,
    Transport,
    TransportClosed,
    TransportError,
)


@dataclass(eq=False)
class _Pending:
    """One op that was posted and is not done."""

    op: Op
    handle: PostHandle
    index: int


@dataclass(eq=False)
class _Lane:
    """The FIFO of one (source, destination, channel)."""

    source: int
    destination: int
    rng: random.Random | None
    sends: deque[_Pending] = field(default_factory=deque)
    recvs: deque[_Pending] = field(default_factory=deque)
    in_flight: deque[tuple[_Pending, _Pending]] = field(default_factory=deque)


class LocalWorld:
    """The shared state of `size` ranks in one process.

    With `max_delay_s == 0` a message is delivered at once by the thread that posts its second end. Otherwise one
    timer thread for the whole world delivers each message some time after both ends are posted, in order within a
    (source, destination, channel).

    Args:
        size: Number of ranks.
        channels: Number of channels.
        seed: With a seed, each delay is drawn uniformly from [0, max_delay_s] by a generator of its own for each
            (source, destination, channel), so it does not depend on how threads are scheduled. Without, every message
            takes max_delay_s.
        max_delay_s: Longest delay of a message, in seconds.
        timeout_s: Deadline of waits that name none, in seconds.
    """

    def __init__(
        self,
        size: int,
        channels: int = 2,
        seed: int | None = None,
        max_delay_s: float = 0.0,
        timeout_s: float = 60.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if max_delay_s < 0:
            raise ValueError(f"max_delay_s must not be negative, got {max_delay_s}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.size = size
        self.channels = channels
        self.timeout_s = timeout_s
        self._seed = seed
        self._max_delay_s = max_delay_s
        self._changed = threading.Condition()
        self._lanes: dict[tuple[int, int, int], _Lane] = {}
        # (due, number, lane): at that time the lane delivers its oldest message, so delays never break its order. The
        # number is there so that lanes are not compared.
        self._timeline: list[tuple[float, int, _Lane]] = []
        self._num_scheduled = 0
        self._gone: set[int] = set()
        self._timer: threading.Thread | None = None
        self._transports = [LocalTransport(self, rank) for rank in range(size)]

    def transport(self, rank: int) -> "LocalTransport":
        """Return the one transport of `rank`."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {rank}")
        return self._transports[rank]

    def kill(self, rank: int) -> None:
        """Let `rank` die: its pending ops fail; peers get `PeerLost(rank)` for pending and later ops with it."""
        self._retire(rank, "was killed")

    def close(self) -> None:
        """Close every transport and end the timer thread."""
        for transport in self._transports:
            transport.close()
        timer = self._timer
        if timer is not None and timer is not threading.current_thread():
            timer.join()

    def __enter__(self) -> "LocalWorld":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, rank: int, ops: Sequence[Op], channel: int) -> Handle:
        handle = PostHandle(rank, ops, channel, self.timeout_s)
        with self._changed:
            if rank in self._gone:
                raise TransportClosed(f"rank {rank}: the transport is closed")
            for index, op in enumerate(ops):
                if op.peer in self._gone:
                    handle.fail(PeerLost(op.peer))
                    continue
                pending = _Pending(op, handle, index)
                if isinstance(op, Send):
                    lane = self._lane(rank, op.peer, channel)
                    lane.sends.append(pending)
                else:
                    lane = self._lane(op.peer, rank, channel)
                    lane.recvs.append(pending)
                self._match(lane)
        return handle

    def _lane(self, source: int, destination: int, channel: int) -> _Lane:
        key = (source, destination, channel)
        lane = self._lanes.get(key)
        if lane is None:
            rng = None if self._seed is None else random.Random(f"{self._seed}:{source}:{destination}:{channel}")
            lane = self._lanes[key] = _Lane(source, destination, rng)
        return lane

    def _match(self, lane: _Lane) -> None:
        if not lane.sends or not lane.recvs:
            return
        lane.in_flight.append((lane.sends.popleft(), lane.recvs.popleft()))
        if self._max_delay_s == 0:
            self._deliver(lane)
            return
        delay_s = self._max_delay_s * (1.0 if lane.rng is None else lane.rng.random())
        self._num_scheduled += 1
        heapq.heappush(self._timeline, (time.monotonic() + delay_s, self._num_scheduled, lane))
        if self._timer is None:
            self._timer = threading.Thread(target=self._run_timer, name="local-world-timer", daemon=True)
            self._timer.start()
        self._changed.notify_all()

    def _deliver(self, lane: _Lane) -> None:
        send, recv = lane.in_flight.popleft()
        source, target = send.op.tensor, recv.op.tensor
        if source.numel() != target.numel() or source.dtype != target.dtype:
            error = MessageMismatch(
                f"rank {lane.source} sends {source.numel()} elements of {source.dtype}, "
                f"rank {lane.destination} receives {target.numel()} of {target.dtype}"
            )
            send.handle.fail(error)
            recv.handle.fail(error)
            return
        target.detach().view(-1).copy_(source.detach().view(-1))
        send.handle.complete(send.index)
        recv.handle.complete(recv.index)

    def _run_timer(self) -> None:
        with self._changed:
            while len(self._gone) < self.size:
                if not self._timeline:
                    self._changed.wait()
                    continue
                due_s, _, lane = self._timeline[0]
                remaining_s = due_s - time.monotonic()
                if remaining_s > 0:
                    self._changed.wait(remaining_s)
                    continue
                heapq.heappop(self._timeline)
                # A lane is emptied when one of its ends goes; its places in the timeline stay behind.
                if lane.in_flight:
                    self._deliver(lane)

    def _retire(self, rank: int, how: str) -> None:
        with self._changed:
            if rank in self._gone:
                return
            self._gone.add(rank)
            closed: TransportError = TransportClosed(f"rank {rank}: the transport {how}")
            lost: TransportError = PeerLost(rank, f"it {how}")
            for lane in self._lanes.values():
                if rank not in (lane.source, lane.destination):
                    continue
                senders = [*lane.sends, *(send for send, _ in lane.in_flight)]
                receivers = [*lane.recvs, *(recv for _, recv in lane.in_flight)]
                for pending in senders:
                    pending.handle.fail(closed if lane.source == rank else lost)
                for pending in receivers:
                    pending.handle.fail(closed if lane.destination == rank else lost)
                lane.sends.clear()
                lane.recvs.clear()
                lane.in_flight.clear()
            self._changed.notify_all()


class LocalTransport(Transport):
    """One rank of a `LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.size, world.channels)
        self._world = world

    def close(self) -> None:
        self._world._retire(self.rank, "was closed")

    def abort(self) -> None:
        self._world._retire(self.rank, "was aborted")

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        return self._world._post(self.rank, ops, channel)
