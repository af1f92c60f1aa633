"""Tensors of a device over a transport of CPU tensors, by way of pinned host memory.

For machines where several ranks share one GPU, which NCCL refuses before 2.30, and for devices that NCCL does not know.
"""

import threading
from collections.abc import Sequence

import torch

from loongserve.comm.transport import Handle, Op, Recv, Send, Transport


class StagedHandle(Handle):
    """The outcome of a staged post: what came is copied to its tensors by whoever waits first."""

    def __init__(self, inner: Handle, arrivals: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._inner = inner
        # (tensor, its staging memory)
        self._arrivals = list(arrivals)
        self._unstaging = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        self._inner.wait(timeout_s)
        with self._unstaging:
            for tensor, staging in self._arrivals:
                tensor.detach().copy_(staging)
            self._arrivals = []

    def done(self) -> bool:
        return self._inner.done()


class StagedTransport(Transport):
    """One rank of a CPU transport, for tensors of any device.

    A send is copied to host memory at the post, which waits for the work on torch's current stream that makes it; from
    then on its tensor may be written. A receive comes to its tensor only when its handle is waited for, in torch's
    current stream of the thread that waits. CPU tensors go straight through.

    Args:
        inner: This rank's transport of CPU tensors; closed and aborted with this one.
        device_types: Kinds of device that are staged; others are given to `inner` as they are.
        pin_memory: Whether to stage in pinned memory, which copies faster; by default if CUDA works.
    """

    def __init__(
        self, inner: Transport, device_types: Sequence[str] = ("cuda",), pin_memory: bool | None = None
    ) -> None:
        super().__init__(inner.rank, inner.world_size, inner.num_channels)
        self.serial_posts = inner.serial_posts
        self._inner = inner
        self._device_types = frozenset(device_types)
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def _check(self, op: Op) -> None:
        super()._check(op)
        if op.tensor.device.type not in self._device_types:
            self._inner._check(op)

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        return self._post_all([ops], channel)[0]

    def _post_all(self, posts: Sequence[Sequence[Op]], channel: int) -> list[Handle]:
        staged: list[list[Op]] = []
        arrivals: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for ops in posts:
            staged.append([])
            arrivals.append([])
            for op in ops:
                if op.tensor.device.type not in self._device_types:
                    staged[-1].append(op)
                elif isinstance(op, Send):
                    staged[-1].append(Send(self._host_copy(op.tensor), op.peer))
                else:
                    host = self._host_memory(op.tensor)
                    staged[-1].append(Recv(host, op.peer))
                    arrivals[-1].append((op.tensor, host))
        handles = self._inner.post_all(staged, channel)
        return [StagedHandle(handle, come) for handle, come in zip(handles, arrivals, strict=True)]

    def _host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pin_memory)

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # Blocks until the data is there.
        return self._host_memory(tensor).copy_(tensor.detach())
