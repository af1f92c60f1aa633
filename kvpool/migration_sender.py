"""The source's side of a migration; ``migration.py`` has the protocol."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from loongserve.comm.transport import Handle, Op, Recv, Send, Transport
from loongserve.kernels.kv import gather_kv
from loongserve.kvpool.migration import (
    COMMITTED,
    DEFAULT_STAGING_BYTES,
    GO_ON,
    REFUSED,
    RETURNED,
    STOP,
    Migration,
    Outcome,
    is_run,
)
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

_MAX_IN_FLIGHT = 2


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
        self._verdict = self._header(RETURNED)
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
            self.outcome = Outcome.COMMITTED if int(self._verdict) == COMMITTED else Outcome.CANCELLED

    def _take_offer(self, handle: Handle) -> bool:
        """Read the offer if it is there. Returns: whether there is something to go on with."""
        if not handle.done():
            return False
        handle.wait()
        assert self._offer is not None
        status, max_tokens, num_tokens = self._offer.tolist()
        if status == REFUSED:
            self.reason = f"rank {self.peer} has no room for {self.num_tokens} tokens, or holds some of them"
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
            if int(go_on) == STOP:
                self._abort.set()

    def _send_chunk(self) -> None:
        begin = self._num_sent
        count = min(self._max_tokens, self.num_tokens - begin)
        slots = self._slots[begin : begin + count]
        if is_run(slots):
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
        go_on = self._header(GO_ON)
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
