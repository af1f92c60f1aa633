"""Send queries to the ranks that hold KV, and bring the attention states back.

Order of posts on the channel within a layer, the same on every rank:

1. `start`: queries, to and from every peer;
2. the steps of a `RingExchange`, if one shares the channel;
3. the first `reply` or `states`: receives of all states; each `reply`: the sends of one.

Where the posts of a channel run one after another (`Transport.serial_posts`) each of these is one post, so that all
ranks have the same order of them: all queries, each ring step, and all states and replies together, in `states`. With
a ring on the same channel, every rank must go through `start`, `blocks` and `states` in this order.

So each directed pair of ranks sees its query message, its ring messages and its state message (out, then lse) in this
one order at both ends. With a ring on the same channel, `reply` and `states` may be called only after the ring's last
block was yielded; on a channel of its own the exchange may interleave with the ring at will.

It cannot deadlock: no post waits. A wait in `queries` needs only that the peer called `start`, which waits for
nothing; a wait in `states` needs only that the peer replied, and before that the peer waits only for queries and ring
steps, which in turn need no states.
"""

from collections.abc import Iterator, Mapping

import torch

from loongserve.comm.transport import Handle, Op, Recv, Send, Transport


class QueryExchange:
    """Queries out and states back between this rank and the holders of its rows' KV.

    Made once for an iteration step and used for each of its layers in turn: `start`, then `queries` with a `reply` to
    each, then `states` to its end. All buffers are made here; no layer allocates. Only ranks that hold rows are talked
    to, and an empty set of rows means no message.

    Args:
        transport: This rank's transport.
        sends: For each holder the rows of q whose KV it has, [num_rows] int64; a row may go to several holders.
        receives: For each peer the number of query rows that come from it. Must agree with the peer's `sends`.
        num_heads: Query heads.
        head_dim: Size of a head.
        dtype: Of the queries. States are float32.
        device: Of the queries and states.
        channel: Channel of all messages; see the module for sharing one with a ring.

    Raises:
        ValueError: A peer is this rank or out of range, row indices are not 1-D int64, a number of rows is negative,
            or there is no such channel.
    """

    def __init__(
        self,
        transport: Transport,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, int],
        *,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        channel: int = 0,
    ) -> None:
        for peer in (*sends, *receives):
            if not 0 <= peer < transport.world_size or peer == transport.rank:
                raise ValueError(f"peer must be another rank in [0, {transport.world_size}), got {peer}")
        if not 0 <= channel < transport.num_channels:
            raise ValueError(f"channel must be in [0, {transport.num_channels}), got {channel}")
        for peer, rows in sends.items():
            if rows.dim() != 1 or rows.dtype != torch.int64:
                raise ValueError(f"rows for rank {peer} must be 1-D int64, got {rows.dim()}-D {rows.dtype}")
        for peer, count in receives.items():
            if count < 0:
                raise ValueError(f"the number of rows from rank {peer} must not be negative, got {count}")

        def distance(peer: int) -> int:
            # Each rank serves its next neighbour first, so that not all of them serve rank 0 first.
            return (peer - transport.rank) % transport.world_size

        holders = sorted((peer for peer, rows in sends.items() if rows.numel()), key=distance)
        askers = sorted((peer for peer, count in receives.items() if count), key=distance)
        device = torch.device(device)
        self._transport = transport
        self._channel = channel
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._rows = {peer: sends[peer].to(device) for peer in holders}

        def empty(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
            return transport.empty((num_rows, num_heads, head_dim), dtype, device)

        self._q_out = {peer: empty(self._rows[peer].numel(), dtype) for peer in holders}
        self._q_in = {peer: empty(receives[peer], dtype) for peer in askers}
        self._out = {peer: empty(self._rows[peer].numel(), torch.float32) for peer in holders}
        self._lse = {
            peer: transport.empty((self._rows[peer].numel(), num_heads), torch.float32, device) for peer in holders
        }
        self._query_sends: dict[int, Handle] = {}
        self._query_recvs: dict[int, Handle] = {}
        self._replies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._state_sends: dict[int, Handle] = {}
        self._state_recvs: dict[int, Handle] | None = None
        self._started = False

    def start(self, q: torch.Tensor) -> None:
        """Gather the rows of each holder and post all queries, out and in; return at once.

        Args:
            q: [tokens, num_heads, head_dim] of the exchange's dtype. It may be changed as soon as this returns.

        Raises:
            RuntimeError: The last layer was not finished: `states` must be gone through to its end.
            ValueError: `q` has the wrong shape or dtype.
            IndexError: A row index is negative or beyond `q`.
        """
        if self._started:
            raise RuntimeError("the last layer was not finished: go through states() to its end before start()")
        if q.shape[1:] != (self._num_heads, self._head_dim) or q.dtype != self._dtype:
            raise ValueError(
                f"q must be [tokens, {self._num_heads}, {self._head_dim}] {self._dtype}, got {tuple(q.shape)} {q.dtype}"
            )
        for peer, rows in self._rows.items():
            torch.index_select(q, 0, rows, out=self._q_out[peer])
        self._started = True
        sends: list[list[Op]] = [[Send(query, peer)] for peer, query in self._q_out.items()]
        receives: list[list[Op]] = [[Recv(query, peer)] for peer, query in self._q_in.items()]
        handles = self._transport.post_all([*sends, *receives], self._channel)
        self._query_sends = dict(zip(self._q_out, handles, strict=False))
        self._query_recvs = dict(zip(self._q_in, handles[len(sends) :], strict=True))
        self._replies = {}
        self._state_sends = {}
        self._state_recvs = None

    def queries(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for each peer's queries in turn; yield (peer, q [num_rows, num_heads, head_dim]).

        The tensors are valid until the next `start`. Peers come in a fixed order, the next higher rank first.

        Raises:
            RuntimeError: `start` was not called.
            TransportError: As `Handle.wait` raises.
        """
        self._check_started()
        for peer, handle in self._query_recvs.items():
            handle.wait()
            yield peer, self._q_in[peer]

    def reply(self, peer: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Post the state of `peer`'s queries, or keep it for `states` where posts are serial; return at once.

        Args:
            peer: A peer that `queries` yielded.
            out: [num_rows, num_heads, head_dim] float32 contiguous; must not be written until `states` has ended.
            lse: [num_rows, num_heads] float32 contiguous, natural log; likewise.

        Raises:
            RuntimeError: `start` was not called, or this peer got its reply.
            ValueError: The peer sent no queries, or a tensor has the wrong shape, dtype or layout.
        """
        self._check_started()
        if peer not in self._q_in:
            raise ValueError(f"rank {peer} sends no queries: expected one of {sorted(self._q_in)}")
        if peer in self._state_sends or peer in self._replies:
            raise RuntimeError(f"rank {peer} was already replied to in this layer")
        shape = self._q_in[peer].shape
        for name, tensor, expected in (("out", out, shape), ("lse", lse, shape[:2])):
            if tensor.shape != expected or tensor.dtype != torch.float32:
                raise ValueError(f"{name} must be {tuple(expected)} float32, got {tuple(tensor.shape)} {tensor.dtype}")
        self._replies[peer] = (out, lse)
        if not self._transport.serial_posts:
            self._post_states()

    def states(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Wait for each holder's states in turn; yield (peer, rows, out, lse).

        Holders come in a fixed order, so that merging them is deterministic. Every rank must go through this to its
        end, also one that asked nothing: it ends when all messages of the layer, replies too, are done.

        Yields:
            peer: The holder.
            rows: [num_rows] int64, the rows of q, as given in `sends`.
            out: [num_rows, num_heads, head_dim] float32; valid until the next `start`.
            lse: [num_rows, num_heads] float32, natural log; likewise.

        Raises:
            RuntimeError: `start` was not called, or a peer was not replied to.
            TransportError: As `Handle.wait` raises.
        """
        self._check_started()
        unanswered = sorted(self._q_in.keys() - self._state_sends.keys() - self._replies.keys())
        if unanswered:
            raise RuntimeError(f"reply to every peer before states(): ranks {unanswered} still wait")
        for peer, handle in self._post_states().items():
            handle.wait()
            yield peer, self._rows[peer], self._out[peer], self._lse[peer]
        for handle in (*self._query_sends.values(), *self._query_recvs.values(), *self._state_sends.values()):
            handle.wait()
        self._started = False

    def _post_states(self) -> dict[int, Handle]:
        """Post the replies not posted yet, and once a layer the receives of all states; return the receives."""
        holders = self._rows if self._state_recvs is None else {}
        posts: list[list[Op]] = [[Recv(self._out[peer], peer), Recv(self._lse[peer], peer)] for peer in holders]
        posts += [[Send(out, peer), Send(lse, peer)] for peer, (out, lse) in self._replies.items()]
        handles = self._transport.post_all(posts, self._channel)
        if self._state_recvs is None:
            self._state_recvs = dict(zip(holders, handles, strict=False))
        self._state_sends.update(zip(self._replies, handles[len(holders) :], strict=True))
        self._replies = {}
        return self._state_recvs

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("start() must come first in each layer")
