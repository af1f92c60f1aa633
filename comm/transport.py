"""The interface through which ranks send tensors to each other.

There are no tags. Between two ranks each channel is one FIFO a direction: the n-th `Send` of A to B on a channel
matches the n-th `Recv` of B from A on that channel, as in NCCL. The ops of one post may be matched and done in any
order across peers. All ops are asynchronous: `Transport.post` never waits for a peer, so any history that posts its
ops in the same order per (pair, channel) on both sides, and waits for nothing but what was posted, is free of deadlock.

A transport on device streams asks for more: its posts of a channel run one after another (`Transport.serial_posts`), so
a message whose other end stands behind a later post may never come. There all ranks must follow one common order of
posts, in which the two ends of each message have the same place; `Transport.post_all` makes one place of many posts.

    RuntimeError
      TransportError            anything that went wrong between ranks
        PeerLost                a peer died or closed; `.rank` says which
        TransportTimeout        the deadline of a wait passed
        TransportClosed         this end was closed or aborted
        MessageMismatch         the two ends of a message disagree on size or dtype

A failed transport does not heal: after a timeout or a lost peer the ops still outstanding keep their tensors until the
transport is aborted, and a new one is built beside it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class TransportError(RuntimeError):
    """Something went wrong between ranks."""


class PeerLost(TransportError):
    """A peer died or closed its end.

    Attributes:
        rank: World rank of the peer.
    """

    def __init__(self, rank: int, detail: str = "") -> None:
        super().__init__(f"rank {rank} is lost" + (f": {detail}" if detail else ""))
        self.rank = rank
        self.detail = detail

    def __reduce__(self) -> tuple[type["PeerLost"], tuple[int, str]]:
        return type(self), (self.rank, self.detail)


class TransportTimeout(TransportError):
    """The deadline of a wait passed; its ops stay posted and keep their tensors until the transport is aborted."""


class TransportClosed(TransportError):
    """This end was closed or aborted."""


class MessageMismatch(TransportError):
    """The two ends of a message disagree on its number of elements or on its dtype."""


@dataclass(frozen=True, eq=False)
class Send:
    """Send `tensor` to world rank `peer`. The tensor must not be written until the handle is done."""

    tensor: torch.Tensor
    peer: int


@dataclass(frozen=True, eq=False)
class Recv:
    """Receive into `tensor` from world rank `peer`. The tensor must not be used until the handle is done."""

    tensor: torch.Tensor
    peer: int


Op = Send | Recv


class Handle(ABC):
    """The outcome of one post."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Let what follows in this thread use the tensors; may be called again, and by several threads.

        CPU tensors: returns when all ops of the post are done. CUDA tensors on a transport of device streams: returns
        at once, and work that is issued to torch's current stream from now on runs after the ops; the deadline counts
        from here. What goes wrong later fails the transport: `synchronize` and `Transport.check` raise it, and the
        tensors hold nothing of worth then.

        Args:
            timeout_s: Seconds to wait at most; None means the transport's own deadline.

        Raises:
            PeerLost: A peer of one of the ops died.
            TransportTimeout: The ops were not done in time.
            TransportClosed: The transport was closed or aborted.
            MessageMismatch: The other end posted a different size or dtype.
        """

    @abstractmethod
    def done(self) -> bool:
        """Say, without waiting, whether `synchronize` would return or raise at once."""

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block this thread until all ops are done, wherever the tensors are.

        Args:
            timeout_s: Seconds to wait at most; None means the transport's own deadline.

        Raises:
            TransportError: As `wait` raises.
        """
        self.wait(timeout_s)


class Transport(ABC):
    """One rank's end of a world of ranks. Safe to use from several threads; see the module for the order of ops.

    Attributes:
        rank: This rank, 0 <= rank < world_size.
        world_size: Number of ranks.
        num_channels: Number of channels, each with its own FIFOs.
        serial_posts: Whether the posts of a channel run one after another; see the module for what that asks for.
    """

    serial_posts: bool = False

    def __init__(self, rank: int, world_size: int, num_channels: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        if num_channels < 1:
            raise ValueError(f"the number of channels must be at least 1, got {num_channels}")
        self.rank = rank
        self.world_size = world_size
        self.num_channels = num_channels

    def post(self, ops: Sequence[Op], channel: int = 0) -> Handle:
        """Start a batch of sends and receives; return at once.

        Args:
            ops: Sends and receives, taken in order. None at all gives a handle that is done.
            channel: The channel of all of them.

        Returns:
            A handle that is done when all ops are. If one op fails, the handle fails at once with its error while
            the others stay posted.

        Raises:
            ValueError: A tensor is empty or not contiguous, a peer is this rank or out of range, or there is no such
                channel. Nothing was posted then.
            TransportClosed: The transport was closed or aborted.
        """
        return self.post_all([ops], channel)[0]

    def post_all(self, posts: Sequence[Sequence[Op]], channel: int = 0) -> list[Handle]:
        """Start several batches as one place in the order of posts, each with a handle of its own.

        Args:
            posts: As many batches as handles are wanted. No message may depend on another of them: that its sender
                waits for another to arrive.
            channel: The channel of all of them.

        Returns:
            A handle for each batch.

        Raises:
            ValueError: As `post` raises. Nothing was posted then.
            TransportClosed: The transport was closed or aborted.
        """
        if not 0 <= channel < self.num_channels:
            raise ValueError(f"channel must be in [0, {self.num_channels}), got {channel}")
        for ops in posts:
            for op in ops:
                self._check(op)
        return self._post_all(posts, channel)

    def check(self) -> None:
        """Raise what has failed this transport as a whole, if something has.

        Call it when results that rest on stream-ordered waits have come to the host, and before they are believed.
        Where `Handle.wait` blocks it raises all there is, and this does nothing.

        Raises:
            TransportError: As `Handle.wait` raises.
        """
        return

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make a tensor, not filled, in the memory that this transport sends from and receives into fastest.

        It is a tensor like any other and may outlive the transport. Any other tensor can be sent and received too.

        Args:
            shape: Of the tensor.
            dtype: Likewise.
            device: Likewise.

        Raises:
            TransportClosed: The transport was closed or aborted, and has memory of its own.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    @abstractmethod
    def close(self) -> None:
        """Close this end and free what it holds; pending ops fail with `TransportClosed`. Idempotent.

        Peers that still wait for ops with this rank get `PeerLost`: finish all exchanges before.
        """

    @abstractmethod
    def abort(self) -> None:
        """Fail every pending op with `TransportClosed` and wake its waiters, without waiting for anything.

        May be called by any thread, also after a failure; later posts raise `TransportClosed`. Peers get `PeerLost`.
        `close` is still to be called.
        """

    @abstractmethod
    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        """Start ops that have been checked."""

    def _post_all(self, posts: Sequence[Sequence[Op]], channel: int) -> list[Handle]:
        """Start batches that have been checked; a transport with serial posts makes one post of them."""
        return [self._post(ops, channel) for ops in posts]

    def _check(self, op: Op) -> None:
        if not isinstance(op, (Send, Recv)):
            raise ValueError(f"ops must be Send or Recv, got {type(op).__name__}")
        if not 0 <= op.peer < self.world_size or op.peer == self.rank:
            raise ValueError(f"peer must be another rank in [0, {self.world_size}), got {op.peer} on rank {self.rank}")
        if op.tensor.numel() == 0:
            raise ValueError(f"tensor must not be empty, got shape {tuple(op.tensor.shape)}: leave the op out")
        if not op.tensor.is_contiguous():
            raise ValueError(
                f"tensor must be contiguous, got shape {tuple(op.tensor.shape)} with strides {op.tensor.stride()}"
            )


class PostHandle(Handle):
    """A handle that the transport completes op by op, from whichever thread moved the data."""

    def __init__(self, rank: int, ops: Sequence[Op], channel: int, timeout_s: float) -> None:
        self._rank = rank
        self._channel = channel
        self._timeout_s = timeout_s
        self._pending = dict(enumerate(ops))
        self._error: TransportError | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if not ops:
            self._finished.set()

    def complete(self, index: int) -> None:
        """Mark op `index` as done."""
        with self._lock:
            self._pending.pop(index, None)
            if not self._pending:
                self._finished.set()

    def fail(self, error: TransportError) -> None:
        """Fail the post, unless it is done or has failed before."""
        with self._lock:
            if not self._finished.is_set():
                self._error = error
                self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._finished.wait(limit_s):
            with self._lock:
                waits = ", ".join(describe(op) for op in self._pending.values())
            raise TransportTimeout(f"rank {self._rank}, channel {self._channel}: not done after {limit_s:g} s: {waits}")
        if self._error is not None:
            # Several waiters may raise it: the traceback is each one's own.
            raise self._error.with_traceback(None)


def describe(op: Op) -> str:
    """Return the words for an op in an error message."""
    direction = "send to" if isinstance(op, Send) else "receive from"
    return f"{direction} rank {op.peer} ({tuple(op.tensor.shape)} {op.tensor.dtype})"
