"""The KV memory of one instance: two tensors a layer, one row a slot, all of them in one allocation."""

import os
import weakref
from importlib.util import find_spec

import torch
from torch import Tensor

from loongserve.kvpool.memory import ALIGNMENT_BYTES, CudaMemory, map_private, map_shared


def bytes_per_row(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the bytes of one slot in one of the 2 * num_layers planes: every size of a pool follows from this one.

    A format that stores more than elements of one dtype, such as int8 with a scale a row, changes this and what a plane
    is viewed as in `KVStorage`, and nothing else here. One-byte floats (``torch.float8_e4m3fn``) need no change.
    """
    return num_kv_heads * head_dim * dtype.itemsize


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the bytes that K and V of one token take in all layers."""
    return 2 * num_layers * bytes_per_row(num_kv_heads, head_dim, dtype)


def slots_for_bytes(num_bytes: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the slots that fit in ``num_bytes``.

    Raises:
        ValueError: Not even one slot fits.
    """
    per_token = bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)
    if num_bytes < per_token:
        raise ValueError(f"{num_bytes} bytes hold no KV slot: one token takes {per_token} bytes in {num_layers} layers")
    return num_bytes // per_token


def bytes_to_map(num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the bytes of the one allocation of a pool: its planes, each on a boundary of ALIGNMENT_BYTES; at least 1.

    It is what ``memory`` of `KVStorage` must have.
    """
    return max(1, 2 * num_layers * _plane_bytes(num_slots, num_kv_heads, head_dim, dtype))


class KVStorage:
    """K and V of ``num_slots`` tokens in every layer.

    ``k[layer]`` and ``v[layer]`` are [num_slots, num_kv_heads, head_dim], contiguous, in one allocation: on the CPU
    private memory on huge pages, or shared memory that has a descriptor, or memory of the caller; on CUDA devices
    `CudaMemory`, or torch's own where cuda-python or CUDA itself (ROCm) is not there. Nothing is initialised: on the
    CPU the system backs a page (2 MiB where it has huge ones) when it is first written, so an unused pool costs address
    space alone.

    Args:
        num_layers: At least 1.
        num_slots: May be 0.
        num_kv_heads: At least 1.
        head_dim: At least 1.
        dtype: Of the elements; anything that torch has, of one byte too.
        device: "cpu" or a CUDA device.
        shared: Map the pool so that other processes can map it by ``fd``, on the CPU.
        memory: [at least `bytes_to_map`] uint8 on ``device``, contiguous, to use instead of own memory: for example
            ``torch.frombuffer`` of what a transport has mapped.

    Attributes:
        memory: [bytes_to_map] uint8: the one allocation.
        fd: Descriptor of the shared memory, closed with the storage; None: not shared by it.

    Raises:
        ValueError: A size is out of range, ``memory`` does not fit, or ``shared`` is asked of other memory than that
            of the CPU.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        shared: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        for name, size, least in (
            ("num_layers", num_layers, 1),
            ("num_slots", num_slots, 0),
            ("num_kv_heads", num_kv_heads, 1),
            ("head_dim", head_dim, 1),
        ):
            if size < least:
                raise ValueError(f"{name} must be at least {least}, got {size}")
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.fd: int | None = None
        num_bytes = bytes_to_map(num_layers, num_slots, num_kv_heads, head_dim, dtype)
        if shared and (self.device.type != "cpu" or memory is not None):
            raise ValueError("shared is for memory that the storage maps itself on the CPU: leave it out")
        if memory is not None:
            self.memory = self._check_memory(memory, num_bytes)
        elif shared:
            self.memory, self.fd = map_shared(num_bytes)
            weakref.finalize(self, os.close, self.fd)
        elif self.device.type == "cpu":
            self.memory = map_private(num_bytes)
        elif self.device.type == "cuda" and _has_driver():
            ordinal = torch.cuda.current_device() if self.device.index is None else self.device.index
            self.memory = torch.as_tensor(CudaMemory(num_bytes, ordinal), device=self.device)[:num_bytes]
        else:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        planes = [self._plane(index) for index in range(2 * num_layers)]
        self.k: tuple[Tensor, ...] = tuple(planes[::2])
        self.v: tuple[Tensor, ...] = tuple(planes[1::2])

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes in all layers."""
        return bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.bytes_per_token

    def _plane(self, index: int) -> Tensor:
        begin = index * _plane_bytes(self.num_slots, self.num_kv_heads, self.head_dim, self.dtype)
        num_bytes = self.num_slots * bytes_per_row(self.num_kv_heads, self.head_dim, self.dtype)
        rows = self.memory[begin : begin + num_bytes].view(self.dtype)
        return rows.view(self.num_slots, self.num_kv_heads, self.head_dim)

    def _check_memory(self, memory: Tensor, num_bytes: int) -> Tensor:
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(f"memory must be uint8 [n], contiguous, got {memory.dtype} {list(memory.shape)}")
        if memory.device.type != self.device.type or self.device.index not in (None, memory.device.index):
            raise ValueError(f"memory must be on {self.device}, got {memory.device}")
        if memory.numel() < num_bytes:
            raise ValueError(f"memory must have {num_bytes} bytes for this pool, got {memory.numel()}")
        if memory.data_ptr() % self.dtype.itemsize:
            raise ValueError(f"memory must begin on a boundary of {self.dtype.itemsize} bytes for {self.dtype}")
        return memory[:num_bytes]


def _has_driver() -> bool:
    """Whether this torch runs on CUDA and cuda-python is there."""
    return torch.version.cuda is not None and find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _plane_bytes(num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    rows = num_slots * bytes_per_row(num_kv_heads, head_dim, dtype)
    return -(-rows // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
