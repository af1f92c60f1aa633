"""One idle connection between each pair of ranks, whose end tells that a peer is gone.

NCCL does not see that a peer of the same machine died, nor that one anywhere gave up: its kernels spin on. These links
do: the kernel closes a dead process's sockets at once, and a rank that leaves says why before it closes. A rank that
leaves because of another names that one, so the loss is known by its cause however far it spreads.
"""

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from secrets import token_bytes
from typing import NamedTuple, Protocol

from loongserve.comm.transport import PeerLost, TransportError, TransportTimeout

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")
# The rank whose loss is the cause, whether all was done, then the words in UTF-8.
_FAREWELL = struct.Struct("!i?")
_MAX_DETAIL_BYTES = 512
_HELLO_TIMEOUT_S = 5.0


class Store(Protocol):
    """Where ranks leave values for each other; torch's `FileStore`, `TCPStore` and `PrefixStore` are such."""

    def set(self, key: str, value: bytes, /) -> None:
        """Put a value under a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that was set."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are set; raise RuntimeError at the time-out."""


def fetch(store: Store, key: str, deadline_s: float, what: str) -> bytes:
    """Return the value of a key as soon as it is set.

    Args:
        store: Where it comes from.
        key: Its key.
        deadline_s: On the clock of `time.monotonic`.
        what: Words for it in the message.

    Raises:
        TransportTimeout: It was not set in time.
    """
    try:
        store.wait([key], timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
        return bytes(store.get(key))
    except RuntimeError as error:
        raise TransportTimeout(f"{what} did not come in time: {error}") from error


class Loss(NamedTuple):
    """How a rank was lost.

    Attributes:
        error: To be raised by what needs it.
        finished: Whether it had done all that it had posted, so that its messages may still be arriving.
    """

    error: PeerLost
    finished: bool


class PeerLinks:
    """This rank's links to all others. Safe to use from several threads.

    Every rank must make it; it returns when all are connected to all. Who does not know the token that a rank left in
    the store is not let in.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: Brings the addresses together; of this world alone.
        deadline_s: When to give up connecting, on the clock of `time.monotonic`.
        host: Address under which the other ranks reach this one.

    Raises:
        TransportTimeout: Some ranks did not come in time.
        TransportError: The address can't be used, or a rank went away again.
    """

    def __init__(self, rank: int, world_size: int, store: Store, deadline_s: float, host: str = "127.0.0.1") -> None:
        self._rank = rank
        self._sockets: dict[int, socket.socket] = {}
        self._words: dict[int, bytes] = {}
        self._poll = select.poll()
        self._polling = threading.Lock()
        self._said_farewell = threading.Lock()
        try:
            self._connect(world_size, store, deadline_s, host)
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                linked = sorted(self._sockets)
                message = f"rank {rank} is not linked to all of {world_size} ranks in time, only to {linked}"
                raise TransportTimeout(message) from error
            raise TransportError(f"rank {rank} can't be linked to the others by {host}: {error}") from error
        except TransportError:
            self.close()
            raise

    def poll(self, timeout_s: float) -> dict[int, Loss]:
        """Wait until a peer is gone, at most `timeout_s`; return the ranks that were lost since the last call."""
        lost: dict[int, Loss] = {}
        with self._polling:
            for number, _ in self._poll.poll(timeout_s * 1000):
                peer = next((rank for rank, link in self._sockets.items() if link.fileno() == number), None)
                if peer is None or self._read(peer):
                    continue
                self._poll.unregister(number)
                loss = _loss_of(peer, self._words.pop(peer, b""))
                lost[peer] = loss
                lost.setdefault(loss.error.rank, loss)
        lost.pop(self._rank, None)
        return lost

    def say_farewell(self, cause: int, detail: str, finished: bool = False) -> None:
        """Tell all peers that this rank goes, because of the loss of rank `cause`, maybe itself; only once."""
        if not self._said_farewell.acquire(blocking=False):
            return
        words = _FAREWELL.pack(cause, finished) + detail.encode()[:_MAX_DETAIL_BYTES]
        for link in list(self._sockets.values()):
            # A peer that is gone need not be told.
            with suppress(OSError):
                link.send(words)
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the sockets; no thread may be in `poll`."""
        for link in self._sockets.values():
            link.close()
        self._sockets = {}

    def _connect(self, world_size: int, store: Store, deadline_s: float, host: str) -> None:
        """Connect to all lower ranks, and be connected to by all higher ones."""
        with socket.create_server((host, 0), backlog=world_size) as server:
            token = token_bytes(_TOKEN_BYTES)
            address = f"{host} {server.getsockname()[1]} ".encode()
            store.set(f"links/{self._rank}", address + token)
            for peer in range(self._rank):
                value = fetch(store, f"links/{peer}", deadline_s, f"the address of rank {peer}")
                peer_host, port, peer_token = value.split(b" ", 2)
                link = socket.create_connection((peer_host.decode(), int(port)), _remaining_s(deadline_s))
                link.sendall(_HELLO.pack(peer_token, self._rank))
                self._add(peer, link)
            while len(self._sockets) < world_size - 1:
                server.settimeout(_remaining_s(deadline_s))
                link, _ = server.accept()
                caller = _peer_of(link, token, min(_HELLO_TIMEOUT_S, _remaining_s(deadline_s)))
                if caller is None or not self._rank < caller < world_size or caller in self._sockets:
                    link.close()
                else:
                    self._add(caller, link)

    def _add(self, peer: int, link: socket.socket) -> None:
        link.setblocking(False)
        # A machine that vanishes says nothing: the kernel asks it now and then.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sockets[peer] = link
        self._words[peer] = b""
        self._poll.register(link, select.POLLIN)

    def _read(self, peer: int) -> bool:
        """Take in what a peer says; return whether it is still there."""
        try:
            words = self._sockets[peer].recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._words[peer] += words
        return bool(words)


def _remaining_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline passed")
    return remaining_s


def _peer_of(link: socket.socket, token: bytes, timeout_s: float) -> int | None:
    """Return the rank that connected, or None for a stranger."""
    link.settimeout(timeout_s)
    hello = b""
    try:
        while len(hello) < _HELLO.size and (part := link.recv(_HELLO.size - len(hello))):
            hello += part
    except OSError:
        return None
    if len(hello) < _HELLO.size:
        return None
    got, peer = _HELLO.unpack(hello)
    return int(peer) if got == token else None


def _loss_of(peer: int, words: bytes) -> Loss:
    if len(words) < _FAREWELL.size:
        return Loss(PeerLost(peer, "its process ended"), False)
    cause, finished = _FAREWELL.unpack_from(words)
    detail = words[_FAREWELL.size :].decode(errors="replace")
    return Loss(PeerLost(cause, detail if cause == peer else f"{detail} (as rank {peer} says)"), finished)
