"""The migrations of one rank in order: what a runtime steps between the steps of its iterations."""

from collections import deque

from loongserve.comm.transport import PeerLost, TransportClosed
from loongserve.kvpool.migration import Migration


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
            Those that have ended, settled. A lost peer or a closed transport is not raised, but is their ``error``.

        Raises:
            TransportError: The two sides do not fit together. Nothing is given back yet, because messages may still
                come in: abort the transport, and step once more.
            MigrationError: Likewise.
        """
        ended: list[Migration] = []
        for peer, waiting in list(self._waiting.items()):
            while waiting:
                first = waiting[0]
                try:
                    done = first.step()
                except (PeerLost, TransportClosed):
                    done = True
                if not done:
                    break
                first.settle()
                ended.append(waiting.popleft())
            if not waiting:
                del self._waiting[peer]
        return ended
