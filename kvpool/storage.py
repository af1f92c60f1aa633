"""The KV memory of one instance: two tensors a layer, one row a slot."""

import torch
from torch import Tensor


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the bytes that K and V of one token take in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def slots_for_bytes(num_bytes: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the slots that fit in ``num_bytes``.

    Raises:
        ValueError: Not even one slot fits.
    """
    per_token = bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)
    if num_bytes < per_token:
        raise ValueError(f"{num_bytes} bytes hold no KV slot: one token takes {per_token} bytes in {num_layers} layers")
    return num_bytes // per_token


class KVStorage:
    """K and V of ``num_slots`` tokens in every layer.

    ``k[layer]`` and ``v[layer]`` are [num_slots, num_kv_heads, head_dim], contiguous. Their memory is not initialised:
    on the CPU the system backs a page when it is first written, so an unused pool costs address space alone.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the tensors. Raises: ValueError when a size is not positive (``num_slots`` may be 0)."""
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
        shape = (num_slots, num_kv_heads, head_dim)
        self.k: tuple[Tensor, ...] = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers))
        self.v: tuple[Tensor, ...] = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes in all layers."""
        return bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.bytes_per_token
