"""Pass the K and V blocks of a group around a ring, one step ahead of the computation.

At step s each member computes on the block of member (me - s) mod d while that block goes on to member me + 1 and the
next one comes from member me - 1. A block is sent on from the buffer it was received in, and two buffers are enough:
step s receives into the one that was sent from at step s - 1, whose send was waited for at the end of that step.
"""

from collections.abc import Iterator, Sequence

import torch

from loongserve.comm.transport import Op, Recv, Send, Transport

KVBlock = tuple[torch.Tensor, torch.Tensor]


class RingExchange:
    """The ring of one group; made once for an iteration and used for each of its layers in turn.

    All members must make it with the same `group` and `rows`, and go through `blocks` equally often. Forming a group
    creates nothing and sends nothing.

    Args:
        transport: This rank's transport.
        group: World ranks of the members in ring order; any subset of the world that holds this rank.
        rows: Rows of each member's block, in the order of `group`. A member with 0 rows is skipped by messages.
        channel: Channel of all messages.

    Raises:
        ValueError: The group has a rank twice, out of range or not this one, or `rows` does not fit the group.

    Source: LoongServe section 4 (striped attention ring); the overlap is that of Ring Attention.
    """

    def __init__(self, transport: Transport, group: Sequence[int], rows: Sequence[int], channel: int = 0) -> None:
        self.group = tuple(group)
        self.rows = tuple(rows)
        if len(set(self.group)) != len(self.group):
            raise ValueError(f"group must name each rank once, got {self.group}")
        if any(not 0 <= rank < transport.world_size for rank in self.group):
            raise ValueError(f"group must hold ranks in [0, {transport.world_size}), got {self.group}")
        if transport.rank not in self.group:
            raise ValueError(f"group must hold this rank, {transport.rank}, got {self.group}")
        if len(self.rows) != len(self.group):
            raise ValueError(f"rows must have one entry a member, expected {len(self.group)}, got {len(self.rows)}")
        if any(count < 0 for count in self.rows):
            raise ValueError(f"rows must not be negative, got {self.rows}")
        if not 0 <= channel < transport.num_channels:
            raise ValueError(f"channel must be in [0, {transport.num_channels}), got {channel}")
        self.member = self.group.index(transport.rank)
        self._transport = transport
        self._channel = channel
        self._buffers: list[KVBlock] = []
        self._active = False

    @property
    def num_buffers(self) -> int:
        """Receive buffers that a pass needs: 0 for one member, 1 for two, else 2."""
        return min(2, len(self.group) - 1)

    @property
    def buffer_rows(self) -> int:
        """Rows that each receive buffer needs: those of the largest block of the other members."""
        return max((rows for member, rows in enumerate(self.rows) if member != self.member), default=0)

    def blocks(
        self,
        k_local: torch.Tensor,
        v_local: torch.Tensor,
        out_buffers: Sequence[KVBlock] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the K and V block of every member, the local one first, then those of members me - 1, me - 2, ...

        The transfer of the next block is posted before a block is yielded and waited for when the caller asks for the
        next. Blocks without rows are yielded too, as empty tensors. A yielded block must not be written, and holds
        only until the next is asked for.

        The caller must go through to the end. If it stops early its neighbours wait for blocks that never come, until
        the transport's deadline or until this rank's transport is aborted; this exchange then refuses further passes.

        Args:
            k_local: [rows[member], kv_heads, head_dim] contiguous; trailing shape and dtype alike on all members.
            v_local: Likewise; its head_dim may differ from that of K.
            out_buffers: At least `num_buffers` pairs of contiguous K and V buffers of at least `buffer_rows` rows, to
                receive into. By default the exchange makes them in the first pass and keeps them.

        Yields:
            (member, k, v): index into `group`, and that member's block.

        Raises:
            ValueError: A block or buffer has the wrong shape, dtype or layout.
            RuntimeError: An earlier pass was not finished.
            TransportError: As `Handle.wait` raises.
        """
        if self._active:
            raise RuntimeError("an earlier pass of this ring was not finished: abort the transport and make a new one")
        for name, block in (("k_local", k_local), ("v_local", v_local)):
            if block.dim() == 0 or block.shape[0] != self.rows[self.member]:
                raise ValueError(f"{name} must have {self.rows[self.member]} rows, got shape {tuple(block.shape)}")
            if not block.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {block.stride()}")
        buffers = self._own_buffers(k_local, v_local) if out_buffers is None else list(out_buffers)
        self._check_buffers(buffers, k_local, v_local)
        return self._pass_around(k_local, v_local, buffers)

    def _pass_around(
        self, k: torch.Tensor, v: torch.Tensor, buffers: Sequence[KVBlock]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        size = len(self.group)
        to_rank = self.group[(self.member + 1) % size]
        from_rank = self.group[(self.member - 1) % size]
        self._active = True
        for step in range(size - 1):
            member = (self.member - step) % size
            coming_rows = self.rows[(member - 1) % size]
            k_buffer, v_buffer = buffers[step % len(buffers)]
            k_coming, v_coming = k_buffer[:coming_rows], v_buffer[:coming_rows]
            ops: list[Op] = []
            if self.rows[member]:
                ops += [Send(k, to_rank), Send(v, to_rank)]
            if coming_rows:
                ops += [Recv(k_coming, from_rank), Recv(v_coming, from_rank)]
            handle = self._transport.post(ops, self._channel)
            yield member, k, v
            handle.wait()
            k, v = k_coming, v_coming
        # Nothing is in flight any more: a caller that stops at the last block has finished the pass.
        self._active = False
        yield (self.member + 1) % size, k, v

    def _own_buffers(self, k: torch.Tensor, v: torch.Tensor) -> list[KVBlock]:
        if len(self._buffers) != self.num_buffers or any(
            not _alike(buffer, block) for pair in self._buffers for buffer, block in zip(pair, (k, v), strict=True)
        ):
            shape_k, shape_v = (self.buffer_rows, *k.shape[1:]), (self.buffer_rows, *v.shape[1:])
            empty = self._transport.empty
            self._buffers = [
                (empty(shape_k, k.dtype, k.device), empty(shape_v, v.dtype, v.device)) for _ in range(self.num_buffers)
            ]
        return self._buffers

    def _check_buffers(self, buffers: Sequence[KVBlock], k: torch.Tensor, v: torch.Tensor) -> None:
        if len(buffers) < self.num_buffers:
            raise ValueError(f"out_buffers must hold at least {self.num_buffers} pairs, got {len(buffers)}")
        for pair in buffers:
            for buffer, block in zip(pair, (k, v), strict=True):
                if not _alike(buffer, block) or buffer.shape[0] < self.buffer_rows or not buffer.is_contiguous():
                    raise ValueError(
                        f"a buffer must be contiguous {block.dtype} on {block.device} with at least "
                        f"{self.buffer_rows} rows of {tuple(block.shape[1:])}, "
                        f"got {buffer.dtype} on {buffer.device} of {tuple(buffer.shape)}"
                    )


def _alike(buffer: torch.Tensor, block: torch.Tensor) -> bool:
    return buffer.shape[1:] == block.shape[1:] and buffer.dtype == block.dtype and buffer.device == block.device
