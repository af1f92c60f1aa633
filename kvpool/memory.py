"""Flat memory of a pool, as uint8 tensors: private with huge pages, shared by a file descriptor, or on a CUDA device.

All of it is one mapping, given back once, when the last tensor over it goes. On the CPU the system backs a page when it
is first written, so that memory that nobody wrote to costs address space alone.
"""

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
# Every plane of a pool begins on such a boundary: a cache line on CPUs, what vector loads and NCCL want on GPUs.
ALIGNMENT_BYTES = 256


def map_private(num_bytes: int) -> Tensor:
    """Map memory of this process alone, on huge pages where the system has them.

    Rows of a large pool lie anywhere, and with pages of 4 KiB nearly each of them misses the TLB. The price is that
    memory is backed in units of 2 MiB. Less than one such unit stays on small pages.

    Args:
        num_bytes: At least 1.

    Returns:
        [num_bytes] uint8; begins on a huge page's boundary if it is that long.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.frombuffer(
            mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
        )
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without transparent huge pages refuses the advice, which is no more than that.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes]


def map_shared(num_bytes: int) -> tuple[Tensor, int]:
    """Map memory that other processes can map too, by its file descriptor; there is no name in any file system.

    Huge pages are asked for, but most systems give none to shared memory
    (/sys/kernel/mm/transparent_hugepage/shmem_enabled).

    Args:
        num_bytes: At least 1.

    Returns:
        [num_bytes] uint8, and the descriptor of a memfd of that size, which is the caller's to close; the memory stays
        mapped then.
    """
    fd = os.memfd_create("loongserve-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8), fd


class CudaMemory:
    """One allocation on a CUDA device by the driver's virtual memory calls, as NCCL wants it for registration.

    It was tested against a recorded driver, not on a device. Base address and size are multiples of the device's
    recommended granularity, and the memory may be exported as a file descriptor: NCCL registers just such buffers for
    zero-copy (``ncclCommRegister``). ``torch.as_tensor(memory)`` shares it and keeps this object alive; when the last
    reference goes, the device is waited for and the memory is given back.

    Args:
        num_bytes: At least 1; rounded up.
        ordinal: Number of the device.
        driver: ``cuda.bindings.driver``, or what stands for it; None: imported here.

    Attributes:
        address: Of the first byte.
        num_bytes: As mapped.

    Raises:
        ImportError: cuda-python is not installed.
        RuntimeError: A driver call failed, by name; nothing stays allocated.

    Source: CUDA driver API, "Virtual Memory Management"; NCCL user guide, "User Buffer Registration".
    """

    def __init__(self, num_bytes: int, ordinal: int = 0, driver: Any = None) -> None:
        if driver is None:
            from cuda.bindings import driver as cuda_driver

            driver = cuda_driver
        _call(driver, "cuInit", 0)
        device = _call(driver, "cuDeviceGet", ordinal)
        # The context that torch uses on this device.
        context = _call(driver, "cuDevicePrimaryCtxRetain", device)
        undo: list[tuple[str, tuple[Any, ...]]] = [("cuDevicePrimaryCtxRelease", (device,))]
        try:
            _call(driver, "cuCtxPushCurrent", context)
            undo.append(("cuCtxPopCurrent", ()))
            properties = driver.CUmemAllocationProp()
            properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            properties.location.id = ordinal
            handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            properties.requestedHandleTypes = handle_type
            recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            granularity = _call(driver, "cuMemGetAllocationGranularity", properties, recommended)
            size = -(-num_bytes // granularity) * granularity
            address = _call(driver, "cuMemAddressReserve", size, granularity, 0, 0)
            undo.append(("cuMemAddressFree", (address, size)))
            allocation = _call(driver, "cuMemCreate", size, properties, 0)
            try:
                _call(driver, "cuMemMap", address, size, 0, allocation, 0)
                undo.append(("cuMemUnmap", (address, size)))
            finally:
                # The mapping, where there is one, keeps the memory.
                _call(driver, "cuMemRelease", allocation)
            access = driver.CUmemAccessDesc()
            access.location = properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(driver, "cuMemSetAccess", address, size, [access], 1)
            _call(driver, "cuCtxPopCurrent")
        except BaseException:
            for name, arguments in reversed(undo):
                _call(driver, name, *arguments)
            raise
        self.address = int(address)
        self.num_bytes = size
        # At the end of the process the driver gives back all by itself, when nothing runs any more.
        weakref.finalize(self, _release, driver, context, device, address, size).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _release(driver: Any, context: Any, device: Any, address: Any, size: int) -> None:
    """Give back what `CudaMemory` made, when no kernel can use it any more."""
    _call(driver, "cuCtxPushCurrent", context)
    _call(driver, "cuCtxSynchronize")
    _call(driver, "cuMemUnmap", address, size)
    _call(driver, "cuMemAddressFree", address, size)
    _call(driver, "cuCtxPopCurrent")
    _call(driver, "cuDevicePrimaryCtxRelease", device)


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver; return its one result, if it has one."""
    status, *results = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name} failed: {getattr(status, 'name', 'error')} ({int(status)})")
    return results[0] if results else None
