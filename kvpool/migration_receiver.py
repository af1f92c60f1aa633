"""The destination's side of a migration; ``migration.py`` has the protocol."""

from collections.abc import Sequence

from torch import Tensor

from loongserve.comm.transport import Handle, Op, Recv, Send, Transport
from loongserve.kernels.kv import save_kv
from loongserve.kvpool.migration import (
    ACCEPTED,
    COMMITTED,
    DEFAULT_STAGING_BYTES,
    GO_ON,
    REFUSED,
    RETURNED,
    STOP,
    Migration,
    MigrationError,
    Outcome,
    is_run,
)
from loongserve.kvpool.slots import OutOfSlots
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable


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
            status = REFUSED if self.reason else ACCEPTED
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
                self._verdict_handle = self._send([self._header(COMMITTED if self._commits else RETURNED)])
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
        if num_tensors == len(self._planes) and is_run(slots):
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
            ops.append(Send(self._header(STOP if self._abort.is_set() else GO_ON), self.peer))
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
