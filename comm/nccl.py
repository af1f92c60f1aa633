"""Transports between the GPUs of ranks by NCCL: messages for ring and query exchange, and sums for tensor parallelism.

Importing this needs neither CUDA nor nccl4py; making one needs both (extras `cuda12` and `cuda13`).

A rank that NCCL lost is never taken back. The survivors make a new world beside the old one, with ranks of their own
choice and rendezvous keys of its own, and a rank that was started anew may be one of them:

    store = FileStore(path)
    world = NcclTransport(rank, 4, PrefixStore("world-0", store))
    ...                                   # PeerLost(2)
    world.close()
    world = NcclTransport(new_rank, 3, PrefixStore("world-1", store))
"""

from collections.abc import Sequence

import torch

from loongserve.comm.nccl_communicator import SUM_DTYPES
from loongserve.comm.nccl_world import NcclWorld, Post
from loongserve.comm.peer_links import Store
from loongserve.comm.streams import CudaStreams, StreamDevice
from loongserve.comm.transport import Handle, Op, Recv, Send, Transport, TransportError, describe


class NcclHandle(Handle):
    """The outcome of one of the batches that were posted together; all of them are done at once."""

    def __init__(self, world: NcclWorld, post: Post | None) -> None:
        self._world = world
        self._post = post

    def wait(self, timeout_s: float | None = None) -> None:
        if self._post is not None:
            self._world.wait(self._post, timeout_s)

    def synchronize(self, timeout_s: float | None = None) -> None:
        if self._post is not None:
            self._world.synchronize(self._post, timeout_s)

    def done(self) -> bool:
        return self._post is None or self._world.is_done(self._post)


class NcclTransport(Transport):
    """One rank of a world of GPUs, over one NCCL communicator and one stream of its own a channel.

    Every rank must make it; it returns when all pairs are connected on all channels and a byte went each way. Each
    post (`post_all`: all its batches) is one NCCL group in the channel's stream, after what torch's current stream
    holds at that time. `Handle.wait` makes torch's current stream wait and returns at once; `Handle.synchronize`
    blocks. Posts of a channel run one after another (`serial_posts`): see `comm.transport`.

    A peer that dies, closes or aborts is seen at once by a TCP connection of its own, one that hangs only by the
    deadline of a wait. NCCL can't give up one message: a loss fails all that is under way on this rank and aborts the
    communicators, and so does a deadline that passes in a stream; the world is over then, and all that is posted
    later fails with the same error. `synchronize` that times out leaves the ops posted. A peer that goes while
    nothing with it is under way fails only later posts with it. The dtypes of two ends are not compared: all goes as
    bytes; a wrong size is found where NCCL finds it, and is a deadline where not.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: For the rendezvous, such as torch's `FileStore` or `TCPStore` behind a `PrefixStore` of this world's.
        device: A CUDA device, the current one by default; or streams of another kind.
        channels: Number of channels.
        timeout_s: Seconds to wait for the other ranks here, and deadline of waits that name none.
        host: Address under which the other ranks reach this one.

    Raises:
        ValueError: An argument is out of range.
        ImportError: nccl4py, cuda-python or libnccl.so.2 is missing; the message says what to install.
        PeerLost: A rank went away meanwhile.
        TransportTimeout: Some ranks did not come in time.
        TransportError: The ranks could not be connected.
        RuntimeError: CUDA does not work.
    """

    serial_posts = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        device: torch.device | str | StreamDevice = "cuda",
        channels: int = 2,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(rank, world_size, channels)
        self._streams = _streams_of(device)
        self._world = NcclWorld(rank, world_size, store, self._streams, channels, timeout_s, host)
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        self._world.check()

    def close(self) -> None:
        self._world.close()

    def abort(self) -> None:
        self._world.abort()

    def _check(self, op: Op) -> None:
        super()._check(op)
        _check_tensor(op.tensor, self._streams.device)

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        return self._post_all([ops], channel)[0]

    def _post_all(self, posts: Sequence[Sequence[Op]], channel: int) -> list[Handle]:
        ops = [op for batch in posts for op in batch]
        if not ops:
            self._world.check_open()
            return [NcclHandle(self._world, None) for _ in posts]
        post = self._world.submit(
            channel,
            lambda comm, stream: comm.exchange(ops, stream),
            peers={op.peer for op in ops},
            tensors=[op.tensor for op in ops],
            what=lambda: f"channel {channel}: {', '.join(describe(op) for op in ops)}",
        )
        return [NcclHandle(self._world, post if batch else None) for batch in posts]

    def _warm_up(self) -> None:
        """Let a byte go each way between all pairs: NCCL connects a pair at its first message, and waits for it."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        device = self._streams.device
        for channel in range(self.num_channels if peers else 0):
            sent = torch.tensor([self.rank % 256], dtype=torch.uint8, device=device)
            got = {peer: torch.full_like(sent, (peer + 1) % 256) for peer in peers}
            ops: list[Op] = [Send(sent, peer) for peer in peers]
            self.post([*ops, *(Recv(tensor, peer) for peer, tensor in got.items())], channel).synchronize()
            wrong = {peer: int(tensor) for peer, tensor in got.items() if int(tensor) != peer % 256}
            if wrong:
                raise TransportError(f"rank {self.rank}, channel {channel}: wrong bytes came from ranks {wrong}")


class NcclAllReduce:
    """Sums tensors over the ranks of a group, on a communicator of its own: what tensor parallelism needs.

    Every rank of the group must make it, and call `all_reduce` with tensors of the same sizes and dtypes in the same
    order. Losses and deadlines end it as they end an `NcclTransport`.

    Args:
        rank: This rank in the group.
        world_size: Number of ranks in the group.
        store: For the rendezvous; keys of this group alone.
        device: A CUDA device, the current one by default; or streams of another kind.
        timeout_s: Seconds to wait for the other ranks here, and deadline of a sum.
        host: Address under which the other ranks reach this one.

    Raises:
        Exception: As `NcclTransport` raises.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        device: torch.device | str | StreamDevice = "cuda",
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.rank = rank
        self.world_size = world_size
        self._streams = _streams_of(device)
        self._world = NcclWorld(rank, world_size, store, self._streams, 1, timeout_s, host)
        try:
            # Connects all ranks.
            self.all_reduce(torch.zeros(1, device=self._streams.device))
            self.check()
        except BaseException:
            self.close()
            raise

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place, in torch's current stream; blocks only where threads compute.

        Args:
            tensor: Any shape, contiguous, of a dtype that NCCL can sum; the same shape and dtype on all ranks.

        Returns:
            The tensor.

        Raises:
            ValueError: The tensor is not contiguous, of another dtype or on another device.
            TransportError: As `Handle.wait` raises; what goes wrong in the stream is raised by `check` and later calls.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"tensor must be contiguous, got strides {tensor.stride()}")
        if tensor.dtype not in SUM_DTYPES:
            raise ValueError(f"NCCL sums {', '.join(map(str, SUM_DTYPES))}, got {tensor.dtype}")
        _check_tensor(tensor, self._streams.device)
        if self.world_size == 1 or tensor.numel() == 0:
            self._world.check_open()
            return tensor
        post = self._world.submit(
            0,
            lambda comm, stream: comm.all_reduce(tensor, stream),
            peers=set(range(self.world_size)) - {self.rank},
            tensors=[tensor],
            what=lambda: f"sum of {tuple(tensor.shape)} {tensor.dtype}",
            in_compute_stream=True,
        )
        self._world.wait(post, None)
        return tensor

    def check(self) -> None:
        """Raise what has failed the group, if something has: see `Transport.check`."""
        self._world.check()

    def abort(self) -> None:
        """Fail what is under way, from any thread, without waiting: see `Transport.abort`."""
        self._world.abort()

    def close(self) -> None:
        """Close this end and free what it holds. Idempotent."""
        self._world.close()


def _streams_of(device: torch.device | str | StreamDevice) -> StreamDevice:
    return CudaStreams(device) if isinstance(device, str | torch.device) else device


def _check_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"tensor must be on {device}, got one on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "tensor must hold its own values, got a lazy conjugate or negative: resolve_conj(), resolve_neg()"
        )
