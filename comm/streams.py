"""Streams and events of a device, as far as a transport on device streams needs them.

Streams and events are plain integers, as the native libraries take them. Every method may be called from any thread and
leaves the thread's current device and context as they were.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class StreamDevice(Protocol):
    """A device whose work is ordered by streams and events.

    Attributes:
        device: Where the tensors lie.
    """

    device: torch.device

    def current(self) -> AbstractContextManager[None]:
        """Make the device the current one of this thread, for native calls within."""

    def compute_stream(self) -> int | None:
        """Return torch's current stream of this thread; None if threads themselves compute, as on a CPU."""

    def create_stream(self) -> int:
        """Make a stream that runs beside all others, before them where there is a choice."""

    def destroy_stream(self, stream: int) -> None:
        """Free a stream once its work is done; does not wait."""

    def create_event(self) -> int:
        """Make an event. One that was never recorded is done."""

    def destroy_event(self, event: int) -> None:
        """Free an event, also one that is not done."""

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for all that the stream holds now, instead of what it stood for."""

    def make_wait(self, stream: int, event: int) -> None:
        """Let later work of the stream run after what the event stands for now; returns at once."""

    def is_done(self, event: int) -> bool:
        """Say, without waiting, whether what the event stands for is done."""


class CudaStreams:
    """The streams of a CUDA device, by cuda-python's driver bindings, in the primary context that torch uses too.

    Args:
        device: A CUDA device; the current one if it has no index.

    Raises:
        ValueError: It is no CUDA device.
        ImportError: cuda-python is not installed.
        RuntimeError: There is no CUDA driver or no such device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ImportError(
                "CUDA streams need cuda-python: pip install 'loongserve[cuda13]' (or [cuda12], to match the driver)"
            ) from error
        self._driver = driver
        self._call(driver.cuInit(0))
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._context = self._call(driver.cuDevicePrimaryCtxRetain(self._call(driver.cuDeviceGet(index))))
        with self.current():
            _, self._priority = self._call(driver.cuCtxGetStreamPriorityRange())

    @contextmanager
    def current(self) -> Iterator[None]:
        self._call(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._call(self._driver.cuCtxPopCurrent())

    def compute_stream(self) -> int | None:
        return torch.cuda.current_stream(self.device).cuda_stream

    def create_stream(self) -> int:
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self.current():
            return int(self._call(self._driver.cuStreamCreateWithPriority(flags, self._priority)))

    def destroy_stream(self, stream: int) -> None:
        with self.current():
            self._call(self._driver.cuStreamDestroy(stream))

    def create_event(self) -> int:
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with self.current():
            return int(self._call(self._driver.cuEventCreate(flags)))

    def destroy_event(self, event: int) -> None:
        with self.current():
            self._call(self._driver.cuEventDestroy(event))

    def record(self, event: int, stream: int) -> None:
        with self.current():
            self._call(self._driver.cuEventRecord(event, stream))

    def make_wait(self, stream: int, event: int) -> None:
        with self.current():
            self._call(self._driver.cuStreamWaitEvent(stream, event, 0))

    def is_done(self, event: int) -> bool:
        with self.current():
            (result,) = self._driver.cuEventQuery(event)
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._call((result,))
        return True

    def _call(self, outcome: tuple[Any, ...]) -> Any:
        """Return what a driver call gave beside its result code, or raise for the code."""
        result, *values = outcome
        if result != self._driver.CUresult.CUDA_SUCCESS:
            _, name = self._driver.cuGetErrorName(result)
            raise RuntimeError(
                f"CUDA driver: {name.decode() if name else result} on {getattr(self, 'device', 'no device')}"
            )
        return values[0] if len(values) == 1 else tuple(values)
