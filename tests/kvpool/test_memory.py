"""CudaMemory: its calls of the driver, in order, against a recorded one; and what it gives back when a call fails."""

import gc
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from loongserve.kvpool.memory import CudaMemory

GRANULARITY = 2 << 20
CREATED = [
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuCtxPopCurrent",
]
RELEASED = [
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
]


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


RESULTS = {
    "cuDeviceGet": "device",
    "cuDevicePrimaryCtxRetain": "context",
    "cuCtxPopCurrent": "context",
    "cuMemGetAllocationGranularity": GRANULARITY,
    "cuMemAddressReserve": 0x7F0000000000,
    "cuMemCreate": "allocation",
}
# What a call takes, and which call gives it back.
HELD = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    "cuCtxPushCurrent": "cuCtxPopCurrent",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemCreate": "cuMemRelease",
    "cuMemMap": "cuMemUnmap",
}


class RecordedDriver:
    """Stands for ``cuda.bindings.driver``: counts what is held, and fails one call if it is told to."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.held: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        if name in ("CUmemAllocationProp", "CUmemAccessDesc"):
            return lambda: SimpleNamespace(location=SimpleNamespace())
        if not name.startswith("cu"):
            # An enumeration: its members are their names.
            return SimpleNamespace(**{member: member for member in MEMBERS[name]})

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name == self._failing:
                return (Status.CUDA_ERROR_OUT_OF_MEMORY, None)
            if name in HELD:
                self.held.append(HELD[name])
            elif name in HELD.values():
                self.held.remove(name)
            return (Status.CUDA_SUCCESS, RESULTS[name]) if name in RESULTS else (Status.CUDA_SUCCESS,)

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


MEMBERS = {
    "CUmemAllocationType": ["CU_MEM_ALLOCATION_TYPE_PINNED"],
    "CUmemLocationType": ["CU_MEM_LOCATION_TYPE_DEVICE"],
    "CUmemAllocationHandleType": ["CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"],
    "CUmemAllocationGranularity_flags": ["CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"],
    "CUmemAccess_flags": ["CU_MEM_ACCESS_FLAGS_PROT_READWRITE"],
}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


def test_one_allocation_is_made_mapped_and_given_back_once() -> None:
    driver = RecordedDriver()
    memory = CudaMemory(GRANULARITY + 1, 3, driver)
    assert driver.names() == CREATED
    assert memory.num_bytes == 2 * GRANULARITY
    arguments = dict(driver.calls)
    assert arguments["cuDeviceGet"] == (3,)
    assert arguments["cuMemAddressReserve"] == (2 * GRANULARITY, GRANULARITY, 0, 0)
    assert arguments["cuMemMap"] == (0x7F0000000000, 2 * GRANULARITY, 0, "allocation", 0)
    properties = arguments["cuMemCreate"][1]
    assert properties.location.id == 3
    assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
    assert memory.__cuda_array_interface__ == {
        "shape": (2 * GRANULARITY,),
        "typestr": "|u1",
        "data": (0x7F0000000000, False),
        "version": 3,
    }
    # The mapping alone is left, and the context.
    assert driver.held == ["cuDevicePrimaryCtxRelease", "cuMemAddressFree", "cuMemUnmap"]
    del memory
    gc.collect()
    assert driver.names() == CREATED + RELEASED
    assert driver.held == []
    assert driver.calls[-3][1] == (0x7F0000000000, 2 * GRANULARITY)


@pytest.mark.parametrize("failing", CREATED[:-1])
def test_a_failed_call_is_named_and_nothing_stays(failing: str) -> None:
    driver = RecordedDriver(failing)
    with pytest.raises(RuntimeError, match=rf"{failing} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaMemory(1, 0, driver)
    # A failed release is the driver's to answer for; all else is given back.
    assert driver.held == (["cuMemRelease"] if failing == "cuMemRelease" else [])
    gc.collect()
    assert driver.names().count("cuMemAddressFree") == driver.names().count("cuMemAddressReserve") - (
        failing == "cuMemAddressReserve"
    )
