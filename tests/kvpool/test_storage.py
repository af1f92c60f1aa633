"""KVStorage: shapes, sizes, and where its memory comes from."""

import gc
import mmap
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from loongserve.kvpool.memory import ALIGNMENT_BYTES, HUGE_PAGE_BYTES
from loongserve.kvpool.storage import KVStorage, bytes_per_token, bytes_to_map, slots_for_bytes


def test_two_tensors_a_layer() -> None:
    storage = KVStorage(3, 10, 2, 8, torch.bfloat16)
    assert len(storage.k) == len(storage.v) == 3
    for tensor in (*storage.k, *storage.v):
        assert tensor.shape == (10, 2, 8)
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_planes_do_not_overlap_and_are_aligned(dtype: torch.dtype) -> None:
    storage = KVStorage(2, 7, 3, 5, dtype)
    planes = [*storage.k, *storage.v]
    begins = sorted(plane.data_ptr() for plane in planes)
    assert all(after - before >= planes[0].nbytes for before, after in pairwise(begins))
    assert all(begin % ALIGNMENT_BYTES == 0 for begin in begins)
    for value, plane in enumerate(planes):
        plane.view(torch.uint8).fill_(value + 1)
    for value, plane in enumerate(planes):
        assert (plane.view(torch.uint8) == value + 1).all()
    assert {plane.untyped_storage().data_ptr() for plane in planes} == {storage.memory.untyped_storage().data_ptr()}


def test_bytes_are_counted() -> None:
    storage = KVStorage(3, 10, 2, 8, torch.float32)
    assert storage.bytes_per_token == 2 * 3 * 2 * 8 * 4 == bytes_per_token(3, 2, 8, torch.float32)
    assert storage.num_bytes == 10 * storage.bytes_per_token
    assert storage.memory.numel() == bytes_to_map(3, 10, 2, 8, torch.float32) >= storage.num_bytes
    assert slots_for_bytes(storage.num_bytes + 1, 3, 2, 8, torch.float32) == 10


@pytest.mark.parametrize("shared", [False, True])
def test_an_empty_pool_is_legal(shared: bool) -> None:
    assert KVStorage(1, 0, 1, 4, torch.float32, shared=shared).k[0].shape == (0, 1, 4)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_nobody_wrote_to_costs_nothing(shared: bool) -> None:
    before = resident_bytes()
    storage = KVStorage(4, 1 << 20, 2, 64, torch.float32, shared=shared)
    assert storage.num_bytes == 4 << 30
    assert resident_bytes() - before < 32 << 20
    for plane in (*storage.k, *storage.v):
        plane[:1000].fill_(1.0)
    # 1000 rows are 512 KB of each of 8 planes: one huge page each at most.
    assert resident_bytes() - before < 32 << 20
    del storage, plane
    gc.collect()
    assert resident_bytes() - before < 16 << 20


def test_a_large_private_pool_is_advised_to_use_huge_pages() -> None:
    storage = KVStorage(1, 1 << 16, 1, 64, torch.float32)
    begin = storage.memory.data_ptr()
    assert begin % HUGE_PAGE_BYTES == 0
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(bound, 16) for bound in first.split("-"))
            inside = low <= begin < high
        elif inside and first == "VmFlags:":
            flags = line
    # "hg": madvise(MADV_HUGEPAGE) was accepted; a kernel without huge pages has no file that says so.
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert " hg" in flags


def test_another_process_sees_shared_memory() -> None:
    storage = KVStorage(2, 8, 1, 4, torch.float32, shared=True)
    assert storage.fd is not None
    code = f"import mmap, sys; m = mmap.mmap({storage.fd}, {storage.memory.numel()}); m[0:4] = m[4:8]"
    storage.k[0][0, 0, 0], storage.k[0][0, 0, 1] = 0.0, 7.5
    subprocess.run([sys.executable, "-c", code], pass_fds=[storage.fd], timeout=60, check=True)
    assert storage.k[0][0, 0, 0] == 7.5


def test_the_descriptor_is_closed_with_the_storage_and_tensors_stay_good() -> None:
    storage = KVStorage(1, 8, 1, 4, torch.float32, shared=True)
    fd, k = storage.fd, storage.k[0].fill_(3.0)
    assert fd is not None
    assert os.fstat(fd).st_size == storage.memory.numel()
    del storage
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert (k == 3.0).all()


def test_memory_of_the_caller_is_used() -> None:
    num_bytes = bytes_to_map(2, 8, 1, 4, torch.float32)
    memory = torch.zeros(num_bytes + 5, dtype=torch.uint8)
    storage = KVStorage(2, 8, 1, 4, torch.float32, memory=memory)
    storage.v[1].fill_(1.0)
    assert storage.fd is None
    assert int(memory.count_nonzero()) == 2 * storage.v[1].numel()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        pytest.param(torch.zeros(1023, dtype=torch.uint8), "must have 1024 bytes for this pool, got 1023", id="short"),
        pytest.param(torch.zeros(2048), r"uint8 \[n\]", id="dtype"),
        pytest.param(torch.zeros(2048, dtype=torch.uint8)[::2], "contiguous", id="strided"),
        pytest.param(torch.zeros(2048, dtype=torch.uint8)[1:], "boundary of 4 bytes", id="odd"),
        pytest.param(torch.zeros(2048, dtype=torch.uint8, device="meta"), "must be on cpu", id="device"),
    ],
)
def test_memory_that_does_not_fit_is_refused(memory: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStorage(2, 8, 1, 4, torch.float32, memory=memory)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads must be at least 1, got 0"):
        KVStorage(1, 1, 0, 4, torch.float32)
    with pytest.raises(ValueError, match="hold no KV slot"):
        slots_for_bytes(7, 1, 1, 4, torch.float32)
    with pytest.raises(ValueError, match="shared is for memory that the storage maps itself"):
        KVStorage(1, 1, 1, 4, torch.float32, shared=True, memory=torch.zeros(9999, dtype=torch.uint8))
