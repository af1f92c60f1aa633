"""Move KV of a request from one instance to another while iterations go on: gather, send, scatter.

Both sides are told the same request and position ranges. What passes between them, on a channel of their own:

    source                          destination
                     <-- offer      [3] int64: accepted or refused, most tokens a chunk, tokens in all
    chunk header     -->            [2] int64: tokens, and how many tensors follow (1, or one a plane)
    chunk            -->            K and V of these tokens in all layers
                     <-- go on      [1] int64: or stop; one for each chunk
    ...                             at most two chunks are on their way
    end              -->            header of 0 tokens, only if a side gave up before the last chunk
                     <-- verdict    [1] int64: committed or returned

The destination decides. It has its slots from the start, all of them or none, and gives them back unless it committed;
the source keeps its own until it reads "committed". So each token is whole on one side at every moment, on both for a
while, whoever gives up or dies. Either side may give up at any step; a source that does so after the last chunk may
still read "committed", and then that holds. A lost peer ends a side with its error: the source keeps its slots then,
and the destination returns its own unless it had committed.

Order. A transport has no tags: a channel is one FIFO for each pair of ranks and direction, and a migration uses both
directions of its pair. So between two ranks and on one channel migrations run one after the other, in the same order on
both sides (`MigrationQueue` sees to that), and iterations use another channel. Migrations of different pairs are
independent. Any transport does: nothing is posted here that waits for a post of ours that comes later.

Threads. Making a side, and `settle`, change the slot table and belong to the thread that owns it; `step` and `run` only
move bytes, and may be called from a thread of their own; `abort` may be called from any thread.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from loongserve.comm.transport import Handle, Op, Recv, Send, Transport, TransportError, TransportTimeout
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kvpool.slots import OutOfSlots
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

# Two halves of it are in use by turns, on each side.
DEFAULT_STAGING_BYTES = 32 << 20

_ACCEPTED, _REFUSED = 1, 0
_COMMITTED, _RETURNED = 1, 0
_GO_ON, _STOP = 1, 0
_MAX_IN_FLIGHT = 2


class Outcome(Enum):
    """How a migration ended on one side; both sides have the same one unless it is LOST."""

    # The tokens lie at the destination alone.
    COMMITTED = "committed"
    # The tokens lie at the source alone: the destination had no room, or held some of the positions.
    REFUSED = "refused"
    # The tokens lie at the source alone: a side gave up.
    CANCELLED = "cancelled"
    # The transport failed. A source still has the tokens, a destination has not.
    LOST = "lost"


class MigrationError(RuntimeError):
    """Something else than a migration was sent on its channel, which is of no use any more: abort the transport."""


class Migration(ABC):
    """What both sides share. Drive it with `step` until it says True, or with `run`; then `settle`.

    Attributes:
        request: Whose KV moves.
        ranges: Positions that move: disjoint (begin, end), in the order given.
        peer: Rank of the other side.
        num_tokens: Of all ranges.
        outcome: None until the migration has ended.
        reason: Why it was refused, or cancelled for what this side was told; "" if there is nothing to say.
        error: What `step` raised.
    """

    def __init__(
        self,
        request: int,
        ranges: Sequence[tuple[int, int]],
        peer: int,
        *,
        table: SlotTable,
        storage: KVStorage,
        transport: Transport,
        channel: int,
        staging_bytes: int,
    ) -> None:
        self.request = request
        self.ranges = tuple(ranges)
        self.peer = peer
        self.num_tokens = _count(self.ranges)
        self.outcome: Outcome | None = None
        self.reason = ""
        self.error: TransportError | MigrationError | None = None
        self._table = table
        self._storage = storage
        self._transport = transport
        self._channel = channel
        self._max_tokens = min(staging_bytes // 2 // storage.bytes_per_token, self.num_tokens)
        if self._max_tokens < 1:
            raise ValueError(
                f"staging must have room for two tokens of {storage.bytes_per_token} bytes, got {staging_bytes} bytes"
            )
        # Free halves of the staging memory; made when first needed.
        self._halves: list[Tensor | None] = [None, None]
        self._planes = [plane for pair in zip(storage.k, storage.v, strict=True) for plane in pair]
        self._slots = torch.empty(0, dtype=torch.int64)
        self._device_slots = self._slots
        self._abort = threading.Event()
        self._settled = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended and `settle` can be called."""
        return self.outcome is not None

    def step(self) -> bool:
        """Do what can be done without waiting for the peer.

        Returns:
            Whether the migration has ended.

        Raises:
            TransportError: As `Handle.wait` raises, once: it has ended then.
            MigrationError: A message is not of this migration; it has ended then.
        """
        if self.outcome is None:
            try:
                self._advance()
            except (TransportError, MigrationError) as error:
                self.error = error
                if self.outcome is None:
                    self.outcome = Outcome.LOST
                raise
        return self.outcome is not None

    def run(self, timeout_s: float | None = None) -> Outcome:
        """Step to the end, waiting for the peer in between.

        Args:
            timeout_s: Seconds in all; None: as long as the transport's own deadline for each wait.

        Raises:
            TransportTimeout: The peer did not come. Nothing has ended: it may be run on, or the transport aborted and
                run once more, which ends it. Its tensors are in use until then.
            TransportError: As `step` raises.
            MigrationError: As `step` raises.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.step():
            handle = self._awaited()
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                handle.wait(left_s)
            except TransportTimeout:
                raise
            except TransportError:
                # The next step meets it and ends the migration.
                continue
        assert self.outcome is not None
        return self.outcome

    def abort(self) -> None:
        """Ask to give up; it still has to be stepped to its end, which may be COMMITTED if the end was near."""
        self._abort.set()

    def settle(self) -> Outcome:
        """Put the outcome into the slot table, on the thread that owns it; again does nothing.

        Raises:
            RuntimeError: The migration has not ended.
        """
        if self.outcome is None:
            raise RuntimeError("the migration has not ended: step it until it says True, or abort() and step it")
        if not self._settled:
            self._settled = True
            self._settle(self.outcome)
        return self.outcome

    @abstractmethod
    def _advance(self) -> None:
        """Go on as far as possible; set ``outcome`` at the end."""

    @abstractmethod
    def _awaited(self) -> Handle:
        """Return what the next `_advance` needs."""

    @abstractmethod
    def _settle(self, outcome: Outcome) -> None:
        """Change the slot table."""

    def _post(self, ops: Sequence[Op]) -> Handle:
        return self._transport.post(ops, self._channel)

    def _send(self, tensors: Sequence[Tensor]) -> Handle:
        return self._post([Send(tensor, self.peer) for tensor in tensors])

    def _take_half(self) -> Tensor:
        half = self._halves.pop()
        if half is None:
            num_bytes = self._max_tokens * self._storage.bytes_per_token
            half = torch.empty(num_bytes, dtype=torch.uint8, device=self._storage.device).view(self._storage.dtype)
        return half

    def _staged(self, half: Tensor, num_tokens: int) -> Tensor:
        """See the begin of a half as planes [2 * num_layers, num_tokens, num_kv_heads, head_dim], contiguous."""
        shape = (len(self._planes), num_tokens, self._storage.num_kv_heads, self._storage.head_dim)
        return half[: len(self._planes) * num_tokens * shape[2] * shape[3]].view(shape)

    def _header(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._storage.device)

    def _hold(self, slots: Tensor) -> None:
        self._slots = slots
        self._device_slots = slots.to(self._storage.device)


class MigrationSender(Migration):
    """The source: sends the KV of some positions, and gives up their slots when the destination has them.

    Args:
        request: Whose KV moves.
        ranges: Disjoint position ranges (begin, end), all held here; the receiver is given the same.
        peer: Rank of the destination.
        table: Of this instance. The slots are retained: freeing the request meanwhile is legal, but their memory comes
            back at `settle`.
        storage: Of this instance.
        transport: To the peer.
        channel: Not that of iterations.
        staging_bytes: Memory to gather into, in all. Chunks that lie in one run of slots are sent from where they are.

    Raises:
        MissingSlots: Some of the positions are not held here.
        ValueError: The ranges are empty or overlap, or ``staging_bytes`` holds less than two tokens.
    """

    def __init__(
        self,
        request: int,
        ranges: Sequence[tuple[int, int]],
        peer: int,
        *,
        table: SlotTable,
        storage: KVStorage,
        transport: Transport,
        channel: int = 1,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        super().__init__(
            request,
            ranges,
            peer,
            table=table,
            storage=storage,
            transport=transport,
            channel=channel,
            staging_bytes=staging_bytes,
        )
        self._hold(torch.cat([table.slots(request, begin, end) for begin, end in self.ranges]))
        table.allocator.retain(self._slots)
        self._offer: Tensor | None = None
        self._offer_handle: Handle | None = None
        self._is_accepted = False
        self._verdict = self._header(_RETURNED)
        self._verdict_handle: Handle | None = None
        # Tokens that were posted.
        self._num_sent = 0
        # Chunks on their way, oldest first, with their staging and the peer's word to go on.
        self._in_flight: deque[tuple[Handle, Tensor | None, Tensor]] = deque()

    def _advance(self) -> None:
        if self._offer_handle is None:
            self._offer = self._header(0, 0, 0)
            self._offer_handle = self._post([Recv(self._offer, self.peer)])
        if not self._is_accepted and not self._take_offer(self._offer_handle):
            return
        self._reap()
        while self._verdict_handle is None and len(self._in_flight) < _MAX_IN_FLIGHT:
            if self._num_sent < self.num_tokens and not self._abort.is_set():
                self._send_chunk()
            else:
                end: list[Op] = [Send(self._header(0, 0), self.peer)] if self._num_sent < self.num_tokens else []
                self._verdict_handle = self._post([*end, Recv(self._verdict, self.peer)])
        if self._verdict_handle is not None and not self._in_flight and self._verdict_handle.done():
            self._verdict_handle.wait()
            self.outcome = Outcome.COMMITTED if int(self._verdict) == _COMMITTED else Outcome.CANCELLED

    def _take_offer(self, handle: Handle) -> bool:
        """Read the offer if it is there. Returns: whether there is something to go on with."""
        if not handle.done():
            return False
        handle.wait()
        assert self._offer is not None
        status, max_tokens, num_tokens = self._offer.tolist()
        if status == _REFUSED:
            self.reason = (
                f"rank {self.peer} refused: it has no room for {self.num_tokens} tokens, or holds some of them"
            )
            self.outcome = Outcome.REFUSED
            return False
        if num_tokens != self.num_tokens:
            self.reason = f"rank {self.peer} was told of {num_tokens} tokens, this side of {self.num_tokens}"
            self._abort.set()
        self._max_tokens = min(self._max_tokens, max_tokens)
        self._is_accepted = True
        return True

    def _reap(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            handle, half, go_on = self._in_flight.popleft()
            handle.wait()
            if half is not None:
                self._halves.append(half)
            if int(go_on) == _STOP:
                self._abort.set()

    def _send_chunk(self) -> None:
        begin = self._num_sent
        count = min(self._max_tokens, self.num_tokens - begin)
        slots = self._slots[begin : begin + count]
        if _is_run(slots):
            first = int(slots[0])
            tensors = [plane[first : first + count] for plane in self._planes]
            half = None
        else:
            half = self._take_half()
            staged = self._staged(half, count)
            for layer, (k, v) in enumerate(zip(self._storage.k, self._storage.v, strict=True)):
                out = (staged[2 * layer], staged[2 * layer + 1])
                gather_kv(k, v, self._device_slots[begin : begin + count], out=out)
            tensors = [staged]
        go_on = self._header(_GO_ON)
        sends = [Send(tensor, self.peer) for tensor in (self._header(count, len(tensors)), *tensors)]
        self._in_flight.append((self._post([*sends, Recv(go_on, self.peer)]), half, go_on))
        self._num_sent += count

    def _awaited(self) -> Handle:
        handle = self._in_flight[0][0] if self._in_flight else self._verdict_handle or self._offer_handle
        assert handle is not None
        return handle

    def _settle(self, outcome: Outcome) -> None:
        if outcome is Outcome.COMMITTED:
            done = 0
            for begin, end in self.ranges:
                self._drop(begin, end, self._slots[done : done + end - begin])
                done += end - begin
        self._table.allocator.free(self._slots)

    def _drop(self, begin: int, end: int, sent: Tensor) -> None:
        """Give up positions [begin, end), but for those that were freed here meanwhile."""
        for low, high in self._table.ranges(self.request):
            low, high = max(low, begin), min(high, end)
            if low < high and torch.equal(self._table.slots(self.request, low, high), sent[low - begin : high - begin]):
                self._table.drop(self.request, low, high)


class _Chunk:
    """What is received at once."""

    __slots__ = ("begin", "count", "half", "tensors")

    def __init__(self, tensors: list[Tensor], half: Tensor | None, begin: int, count: int) -> None:
        self.tensors = tensors
        # None: the tensors are the slots themselves.
        self.half = half
        self.begin = begin
        self.count = count


class MigrationReceiver(Migration):
    """The destination: has slots for all positions from the start; they are the request's at `settle`.

    A request that is freed here meanwhile must be aborted here too, else it gets its slots after that.

    Args:
        request: Whose KV moves.
        ranges: Disjoint position ranges (begin, end), as the sender is given them. If there is no room for all of
            them, or some are held here, the migration is refused: `step` tells the sender, and ``reason`` says why.
        peer: Rank of the source.
        table: Of this instance.
        storage: Of this instance; layers, heads, head_dim and dtype as the sender's, num_slots as it likes.
        transport: To the peer.
        channel: As the sender's.
        staging_bytes: Memory to receive into, in all. Chunks whose slots are one run are received where they belong.

    Raises:
        ValueError: The ranges are empty or overlap, or ``staging_bytes`` holds less than two tokens.
    """

    def __init__(
        self,
        request: int,
        ranges: Sequence[tuple[int, int]],
        peer: int,
        *,
        table: SlotTable,
        storage: KVStorage,
        transport: Transport,
        channel: int = 1,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        super().__init__(
            request,
            ranges,
            peer,
            table=table,
            storage=storage,
            transport=transport,
            channel=channel,
            staging_bytes=staging_bytes,
        )
        held = [piece for piece in self.ranges if table.holds_any(request, *piece)]
        if held:
            self.reason = f"request {request} already holds positions of {held} here"
        else:
            try:
                self._hold(table.allocator.allocate(self.num_tokens))
            except OutOfSlots as error:
                self.reason = str(error)
        self._offer_handle: Handle | None = None
        self._verdict_handle: Handle | None = None
        self._commits = False
        # Tokens whose chunk was posted, and what is being received: a header, behind a chunk if one is on its way.
        self._num_posted = 0
        self._next_header: Tensor | None = None
        self._handle: Handle | None = None
        self._chunk: _Chunk | None = None

    def _advance(self) -> None:
        if self._offer_handle is None:
            if self._abort.is_set() and not self.reason:
                self.reason = "it was aborted before it began"
            status = _REFUSED if self.reason else _ACCEPTED
            self._offer_handle = self._send([self._header(status, self._max_tokens, self.num_tokens)])
            if not self.reason:
                self._receive(None)
        if self.reason:
            if self._offer_handle.done():
                self._offer_handle.wait()
                self.outcome = Outcome.REFUSED
            return
        while self._handle is not None and self._handle.done():
            self._handle.wait()
            self._take_header()
        if self._handle is None:
            if self._verdict_handle is None:
                self._commits = self._num_posted == self.num_tokens and not self._abort.is_set()
                self._verdict_handle = self._send([self._header(_COMMITTED if self._commits else _RETURNED)])
            if self._verdict_handle.done():
                # All tokens are here, whether or not the source heard of it.
                self.outcome = Outcome.COMMITTED if self._commits else Outcome.CANCELLED
                self._verdict_handle.wait()

    def _take_header(self) -> None:
        """Post the next chunk, whose header came, and store the one that came before it."""
        arrived, self._chunk = self._chunk, None
        header, self._next_header = self._next_header, None
        self._handle = None
        count, num_tensors = (0, 0) if header is None else header.tolist()
        if not 0 <= count <= min(self._max_tokens, self.num_tokens - self._num_posted):
            raise MigrationError(
                f"request {self.request}: rank {self.peer} announces {count} tokens, at most {self._max_tokens} of "
                f"{self.num_tokens - self._num_posted} were expected"
            )
        if count:
            self._receive(self._prepare(count, num_tensors))
        if arrived is not None:
            self._store(arrived)

    def _prepare(self, count: int, num_tensors: int) -> _Chunk:
        begin = self._num_posted
        self._num_posted += count
        slots = self._slots[begin : begin + count]
        if num_tensors == len(self._planes) and _is_run(slots):
            first = int(slots[0])
            return _Chunk([plane[first : first + count] for plane in self._planes], None, begin, count)
        half = self._take_half()
        staged = self._staged(half, count)
        return _Chunk([staged] if num_tensors == 1 else list(staged), half, begin, count)

    def _receive(self, chunk: _Chunk | None) -> None:
        """Post a chunk, and the header of the one after it if there must be one."""
        ops: list[Op] = [Recv(tensor, self.peer) for tensor in (chunk.tensors if chunk else ())]
        if self._num_posted < self.num_tokens:
            self._next_header = self._header(0, 0)
            ops.append(Recv(self._next_header, self.peer))
        if chunk:
            ops.append(Send(self._header(_STOP if self._abort.is_set() else _GO_ON), self.peer))
        self._chunk = chunk
        self._handle = self._post(ops)

    def _store(self, chunk: _Chunk) -> None:
        if chunk.half is None:
            return
        if not self._abort.is_set():
            slots = self._device_slots[chunk.begin : chunk.begin + chunk.count]
            staged = self._staged(chunk.half, chunk.count)
            for layer, (k, v) in enumerate(zip(self._storage.k, self._storage.v, strict=True)):
                save_kv(staged[2 * layer], staged[2 * layer + 1], slots, k, v)
        self._halves.append(chunk.half)

    def _awaited(self) -> Handle:
        handle = self._handle or self._verdict_handle or self._offer_handle
        assert handle is not None
        return handle

    def _settle(self, outcome: Outcome) -> None:
        if outcome is not Outcome.COMMITTED:
            self._table.allocator.free(self._slots)
            return
        done = 0
        try:
            for begin, end in self.ranges:
                self._table.adopt(self.request, begin, self._slots[done : done + end - begin])
                done += end - begin
        except ValueError:
            # The owner of the table placed some of the positions meanwhile: what it has is kept, and nothing leaks.
            self._table.allocator.free(self._slots[done:])
            raise


class MigrationQueue:
    """Migrations of one rank, in the order in which they are added: one at a time a peer, all peers at once.

    Add them in the same order on both ranks of a pair, and step the queue from one thread, the one that owns the slot
    table, as often as there is time: between the steps of an iteration for example.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Migration]] = {}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def add(self, migration: Migration) -> None:
        """Put a migration behind those with the same peer."""
        self._waiting.setdefault(migration.peer, deque()).append(migration)

    def find(self, request: int) -> list[Migration]:
        """List the migrations of a request that have not ended, for example to abort them."""
        return [m for waiting in self._waiting.values() for m in waiting if m.request == request]

    def step(self) -> list[Migration]:
        """Step the first migration of each peer, and settle those that end.

        Returns:
            Those that have ended, settled; an error that one met is not raised, but its ``error``.
        """
        ended: list[Migration] = []
        for peer, waiting in list(self._waiting.items()):
            while waiting:
                first = waiting[0]
                try:
                    done = first.step()
                except (TransportError, MigrationError):
                    done = True
                if not done:
                    break
                first.settle()
                ended.append(waiting.popleft())
            if not waiting:
                del self._waiting[peer]
        return ended


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    last_end = 0
    for begin, end in sorted(ranges):
        if not last_end <= begin < end:
            raise ValueError(f"ranges must be (begin, end), begin < end, not overlapping, got {list(ranges)}")
        last_end = end
    if not ranges:
        raise ValueError("ranges must name at least one position, got none")
    return sum(end - begin for begin, end in ranges)


def _is_run(slots: Tensor) -> bool:
    count = slots.numel()
    # The ends tell most cases apart without looking at all.
    return int(slots[-1]) - int(slots[0]) == count - 1 and bool((slots.diff() == 1).all())
