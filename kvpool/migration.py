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
move bytes, and may be called from a thread of their own; `abort` may be called from any thread. On a CUDA device gather
and scatter run on the current stream of the thread that steps: it must be the one that the transport orders its
transfers by, and who reads the slots after `settle` must come after it.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from loongserve.comm.transport import Handle, Op, Send, Transport, TransportError, TransportTimeout
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

# Two halves of it are in use by turns, on each side.
DEFAULT_STAGING_BYTES = 32 << 20

# What the messages of the destination say.
ACCEPTED, REFUSED = 1, 0
GO_ON, STOP = 1, 0
COMMITTED, RETURNED = 1, 0


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

    def step(self) -> bool:
        """Do what can be done without waiting for the peer.

        Returns:
            Whether the migration has ended.

        Raises:
            PeerLost: The peer is lost; it has ended then. This and the following are raised once.
            TransportClosed: This end was closed or aborted; likewise.
            TransportError: Another failure, as `MessageMismatch`; likewise, but what was posted may still be received:
                abort the transport before `settle`, which gives slots back.
            MigrationError: A message is not of this migration; likewise.
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


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    last_end = 0
    for begin, end in sorted(ranges):
        if not last_end <= begin < end:
            raise ValueError(f"ranges must be (begin, end), begin < end, not overlapping, got {list(ranges)}")
        last_end = end
    if not ranges:
        raise ValueError("ranges must name at least one position, got none")
    return sum(end - begin for begin, end in ranges)


def is_run(slots: Tensor) -> bool:
    """Say whether slots [n] are one ascending run."""
    count = slots.numel()
    # The ends tell most cases apart without looking at all.
    return int(slots[-1]) - int(slots[0]) == count - 1 and bool((slots.diff() == 1).all())
