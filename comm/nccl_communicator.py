"""One NCCL communicator by nccl4py's low-level bindings: never blocks, one thread at a time, abort from any.

The communicator is non-blocking: a call may return while NCCL still works on it, and until `state` says that it no
longer does nothing but `state` and `abort` may be called. Calls are serialised by a lock that is held only for their
own few microseconds, which is what makes `abort` safe while another thread waits for a state.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from loongserve.comm.streams import StreamDevice
from loongserve.comm.transport import (
    MessageMismatch,
    Op,
    Send,
    TransportClosed,
    TransportError,
)

UNIQUE_ID_BYTES = 128

# What NCCL can sum, by its names.
SUM_DTYPES = {
    torch.float32: "Float32",
    torch.float16: "Float16",
    torch.bfloat16: "Bfloat16",
    torch.float64: "Float64",
    torch.int8: "Int8",
    torch.uint8: "Uint8",
    torch.int32: "Int32",
    torch.int64: "Int64",
}


def load_nccl() -> Any:
    """Return `nccl.bindings.nccl`, with a library behind it.

    Raises:
        ImportError: nccl4py or a libnccl.so.2 is missing.
    """
    install = "pip install 'loongserve[cuda13]' (or [cuda12], to match the driver)"
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise ImportError(f"NCCL transports need nccl4py: {install}") from error
    try:
        nccl.get_version()
    except RuntimeError as error:
        raise ImportError(f"NCCL transports need libnccl.so.2, which was not found: {install}") from error
    return nccl


def new_unique_id() -> bytes:
    """Return the identity of a new communicator, which one rank gets and brings to all others.

    Raises:
        ImportError: As `load_nccl` raises.
        TransportError: NCCL could not make one.
    """
    nccl = load_nccl()
    try:
        return bytes(memoryview(nccl.get_unique_id()).cast("B"))
    except nccl.NCCLError as error:
        raise TransportError(f"NCCL can't make a unique id: {error}") from error


class Communicator:
    """A communicator that is being connected; poll `state` until it is no longer in progress.

    Args:
        unique_id: From `new_unique_id` on one of the ranks.
        rank: This rank.
        size: Number of ranks.
        device: Of all tensors and streams.

    Raises:
        ImportError: As `load_nccl` raises.
        TransportError: NCCL refused at once.
    """

    def __init__(self, unique_id: bytes, rank: int, size: int, device: StreamDevice) -> None:
        self._nccl = load_nccl()
        self._device = device
        self._lock = threading.Lock()
        self.rank = rank
        config = self._nccl.Config()
        config.blocking = 0
        identity = self._nccl.UniqueId.from_buffer(bytearray(unique_id))
        self._comm: Any = None
        with device.current():
            try:
                self._comm = self._nccl.comm_init_rank_config(size, identity, rank, config)
            except self._nccl.NCCLError as error:
                raise self._error(error.status, "can't start to connect") from error

    def state(self) -> TransportError | bool:
        """Return False while NCCL works on the last call, True when it is through, or the error that it met.

        Only what went wrong on the host and on NCCL's own threads is seen. A lost peer may be the cause, and is not
        named.
        """
        with self._lock:
            if self._comm is None:
                return self._aborted()
            status = self._nccl.comm_get_async_error(self._comm)
            if status == self._nccl.Result.InProgress:
                return False
            return True if status == self._nccl.Result.Success else self._error(status, "failed")

    def exchange(self, ops: Sequence[Op], stream: int) -> None:
        """Begin sends and receives as one group, in a stream; poll `state` before anything else is put into it.

        All goes as bytes: NCCL moves any dtype so, and knows few of torch's.

        Raises:
            TransportError: NCCL refused them.
        """
        nccl = self._nccl
        with self._lock, self._device.current():
            comm = self._open()
            try:
                nccl.group_start()
                try:
                    for op in ops:
                        move = nccl.send if isinstance(op, Send) else nccl.recv
                        tensor = op.tensor
                        move(tensor.data_ptr(), tensor.nbytes, nccl.DataType.Uint8, op.peer, comm, stream)
                finally:
                    nccl.group_end()
            except nccl.NCCLError as error:
                raise self._error(error.status, "refused sends and receives") from error

    def all_reduce(self, tensor: torch.Tensor, stream: int) -> None:
        """Begin to sum a tensor over all ranks, in place; poll `state` before anything else is put into the stream.

        Args:
            tensor: Contiguous, of one of `SUM_DTYPES`.
            stream: Of the device.

        Raises:
            TransportError: NCCL refused.
        """
        nccl, address = self._nccl, tensor.data_ptr()
        dtype = getattr(nccl.DataType, SUM_DTYPES[tensor.dtype])
        with self._lock, self._device.current():
            comm = self._open()
            try:
                nccl.all_reduce(address, address, tensor.numel(), dtype, nccl.RedOp.Sum, comm, stream)
            except nccl.NCCLError as error:
                raise self._error(error.status, "refused an all-reduce") from error

    def finalize(self) -> None:
        """Begin to flush what was sent; poll `state`, then `destroy`. Other ranks may have to do the same.

        Raises:
            TransportError: NCCL refused.
        """
        with self._lock, self._device.current():
            try:
                self._nccl.comm_finalize(self._open())
            except self._nccl.NCCLError as error:
                raise self._error(error.status, "can't be finalized") from error

    def destroy(self) -> None:
        """Free a communicator that was finalized; `abort` does so for any other."""
        self._free("comm_destroy")

    def abort(self) -> None:
        """Make NCCL give up all that is under way, and free the communicator. From any thread; idempotent.

        May take as long as NCCL's own threads and kernels take to see it.
        """
        self._free("comm_abort")

    def _open(self) -> Any:
        if self._comm is None:
            raise self._aborted()
        return self._comm

    def _aborted(self) -> TransportError:
        return TransportClosed(f"rank {self.rank}: the communicator was aborted")

    def _free(self, call: str) -> None:
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return
        # Out of the lock, since it may take long: no other call can begin, and none is under way.
        with self._device.current():
            try:
                getattr(self._nccl, call)(comm)
            except self._nccl.NCCLError as error:
                raise self._error(error.status, f"refused {call}") from error

    def _error(self, status: int, what: str) -> TransportError:
        """Make the error for a result of NCCL. Invalid usage that shows later is a message of the wrong size."""
        nccl = self._nccl
        text = nccl.get_last_error(self._comm) if self._comm is not None else ""
        message = f"rank {self.rank}: the NCCL communicator {what}: {nccl.Result(status).name}" + (
            f": {text.strip()}" if text else ""
        )
        if status == nccl.Result.InvalidUsage:
            return MessageMismatch(message)
        if status in (nccl.Result.RemoteError, nccl.Result.SystemError):
            return RemoteFailure(message)
        return TransportError(message)


class RemoteFailure(TransportError):
    """NCCL met what a lost peer causes, and does not know which."""
