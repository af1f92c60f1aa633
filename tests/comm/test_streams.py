"""CudaStreams: which driver calls it makes, in which context, on a machine where they can only be recorded."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from loongserve.comm.streams import CudaStreams

SUCCESS, NOT_READY = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
CONTEXT, DEVICE = driver.CUcontext(77), driver.CUdevice(2)


class RecordedDriver:
    """Takes the calls for `cuda.bindings.driver`, with as many arguments as the real functions take."""

    CUresult = driver.CUresult
    CUstream_flags = driver.CUstream_flags
    CUevent_flags = driver.CUevent_flags

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (SUCCESS, DEVICE),
            "cuDevicePrimaryCtxRetain": (SUCCESS, CONTEXT),
            "cuCtxPopCurrent": (SUCCESS, CONTEXT),
            "cuCtxGetStreamPriorityRange": (SUCCESS, 0, -5),
            "cuStreamCreateWithPriority": (SUCCESS, driver.CUstream(11)),
            "cuEventCreate": (SUCCESS, driver.CUevent(22)),
            "cuGetErrorName": (SUCCESS, b"CUDA_ERROR_ILLEGAL_ADDRESS"),
        }

    def __getattr__(self, name: str) -> Any:
        signature = re.match(rf"{name}\((.*)\)", getattr(driver, name).__doc__)
        assert signature is not None
        num_arguments = len([part for part in signature[1].split(",") if part])

        def call(*arguments: Any) -> tuple[Any, ...]:
            assert len(arguments) == num_arguments, (name, arguments, signature[1])
            self.calls.append((name, *arguments))
            return self.results.get(name, (SUCCESS,))

        return call

    def take(self) -> list[tuple[Any, ...]]:
        """Return the calls since the last time but those of the context, which must embrace each other one."""
        calls, self.calls = self.calls, []
        assert calls[::3] == [("cuCtxPushCurrent", CONTEXT)] * len(calls[::3])
        assert calls[2::3] == [("cuCtxPopCurrent",)] * len(calls[1::3])
        return calls[1::3]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedDriver:
    recorded = RecordedDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=recorded))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return recorded


@pytest.fixture
def streams(recorded: RecordedDriver) -> CudaStreams:
    streams = CudaStreams()
    assert recorded.calls[:3] == [("cuInit", 0), ("cuDeviceGet", 2), ("cuDevicePrimaryCtxRetain", DEVICE)]
    recorded.calls = recorded.calls[3:]
    assert recorded.take() == [("cuCtxGetStreamPriorityRange",)]
    return streams


def test_streams_and_events(streams: CudaStreams, recorded: RecordedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=33 + device.index))
    assert streams.device == torch.device("cuda", 2)
    assert streams.compute_stream() == 35
    assert streams.create_stream() == 11
    assert streams.create_event() == 22
    streams.record(22, 11)
    streams.make_wait(35, 22)
    assert streams.is_done(22)
    recorded.results["cuEventQuery"] = (NOT_READY,)
    assert not streams.is_done(22)
    streams.destroy_event(22)
    streams.destroy_stream(11)
    assert recorded.take() == [
        # Not ordered by the legacy default stream, and the highest of the priorities.
        ("cuStreamCreateWithPriority", driver.CUstream_flags.CU_STREAM_NON_BLOCKING, -5),
        ("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING),
        ("cuEventRecord", 22, 11),
        ("cuStreamWaitEvent", 35, 22, 0),
        ("cuEventQuery", 22),
        ("cuEventQuery", 22),
        ("cuEventDestroy", 22),
        ("cuStreamDestroy", 11),
    ]


def test_an_error_is_named_and_leaves_the_context_alone(streams: CudaStreams, recorded: RecordedDriver) -> None:
    recorded.results["cuEventQuery"] = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS on cuda:2"):
        streams.is_done(22)
    assert ("cuEventQuery", 22) in recorded.calls
    pushed = [name for name, *_ in recorded.calls if name.startswith("cuCtx")]
    assert pushed == ["cuCtxPushCurrent", "cuCtxPopCurrent"]


def test_only_cuda_devices_are_taken() -> None:
    with pytest.raises(ValueError, match="must be a CUDA device, got cpu"):
        CudaStreams("cpu")
