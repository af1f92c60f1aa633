"""Which implementation stands behind the public functions of ``kernels/``.

``reference`` is plain torch and the definition, ``cpu`` is C++ for CPUs with torch as its fallback, ``triton`` runs on
NVIDIA and AMD GPUs (and, for tests, in Triton's interpreter), ``flash-attn`` is ``triton`` with that library for a
member's own block. The public functions check their arguments and then call the provider that ``get_provider`` answers:
the one named by the environment variable ``LOONG_KERNELS``, else the one for the device. A plan remembers its provider.
Nothing is imported or queried before a call asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from loongserve.kernels.paged import PagedPlan
    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.striped import KVSave, StripedPlan

ENVIRONMENT_VARIABLE = "LOONG_KERNELS"
_MODULES = {
    "triton": "loongserve.kernels.triton_provider",
    "cpu": "loongserve.kernels.cpu",
    "reference": "loongserve.kernels.reference",
    "flash-attn": "loongserve.kernels.flash_attn_provider",
}
PROVIDERS = tuple(_MODULES)
# torch calls an AMD GPU "cuda" too.
_PROVIDER_OF_DEVICE_TYPE = {"cuda": "triton", "hip": "triton", "cpu": "cpu"}


class KernelProvider(Protocol):
    """The functions a provider module has. Arguments are already checked; the public functions document each.

    Where a public function takes ``out=None``, a provider gets the tensors to write to. An argument may be a view with
    any strides, but the last dimension is contiguous. Counts may be 0.
    """

    def plan_striped_attention(
        self,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        diagonals: Sequence[int],
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        lower_diagonals: tuple[int | None, ...] | None = None,
    ) -> StripedPlan:
        """Prepare ``striped_attention``; may allocate and copy to the device."""
        ...

    def plan_positional_attention(
        self,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_k: Sequence[int],
        query_positions: Tensor,
        key_positions: Tensor,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> StripedPlan:
        """Prepare ``striped_attention`` for positions, given on the host; may allocate and copy to the device."""
        ...

    def striped_attention(
        self,
        plan: StripedPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AttentionState,
        *,
        scale: float,
        save: KVSave | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Merge attention over one block into ``state`` and save K and V; no allocation or sync on a GPU."""
        ...

    def plan_paged_attention(
        self,
        cu_seqlens_q: Sequence[int],
        slots: Sequence[Tensor],
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        first_visible: Tensor | None = None,
    ) -> PagedPlan:
        """Prepare ``paged_attention``; may allocate and copy to the device."""
        ...

    def paged_attention(
        self,
        plan: PagedPlan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: AttentionState,
        *,
        scale: float,
        soft_cap: float | None = None,
    ) -> AttentionState:
        """Overwrite ``out`` and return it; no allocation or sync on a GPU."""
        ...

    def merge_states(self, a: AttentionState, b: AttentionState, out: AttentionState) -> AttentionState:
        """Merge into ``out``, which may be ``a`` or ``b``, and return it."""
        ...

    def merge_many(self, states: Sequence[AttentionState], out: AttentionState) -> AttentionState:
        """Merge one state or more into ``out``, which may be the first, and return it."""
        ...

    def merge_rows(self, state: AttentionState, rows: Tensor, part: AttentionState) -> None:
        """Merge row i of ``part`` into row ``rows[i]`` of ``state``; ``rows`` has no duplicates."""
        ...

    def finalize(self, state: AttentionState, out: Tensor) -> Tensor:
        """Round ``state.out`` into ``out`` and return it."""
        ...

    def save_kv(self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Store row i of K and V in slot ``slots[i]``; -1 skips."""
        ...

    def gather_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write slot ``slots[i]`` to row i of K and V, zeros where it is -1."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, out: Tensor) -> Tensor:
        """Write the normalised rows to ``out``, which may be ``x``, and return it."""
        ...

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> None:
        """Rotate the first ``2 * cos.shape[1]`` elements of each head of ``x`` in place."""
        ...

    def silu_and_mul(self, x: Tensor, out: Tensor) -> Tensor:
        """Write silu(left half) * right half to ``out`` and return it."""
        ...

    def gelu_and_mul(self, x: Tensor, out: Tensor, *, approximate: str) -> Tensor:
        """Write gelu(left half) * right half to ``out`` and return it."""
        ...


def provider_name(device: torch.device) -> str:
    """Name the provider for tensors on ``device``: ``LOONG_KERNELS`` if set, else by the device's type.

    Raises:
        ValueError: the variable holds an unknown name, no provider is for the device, or ``cpu`` is asked for a device
            that is not a CPU.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if name and name not in PROVIDERS:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be one of {', '.join(PROVIDERS)}, got {name!r}")
    if not name:
        if device.type not in _PROVIDER_OF_DEVICE_TYPE:
            raise ValueError(
                f"no kernel provider for device {device}: expected one of {', '.join(_PROVIDER_OF_DEVICE_TYPE)}; "
                f"{ENVIRONMENT_VARIABLE}=reference runs on any device of torch"
            )
        name = _PROVIDER_OF_DEVICE_TYPE[device.type]
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"the cpu provider needs tensors on cpu, got {device}: unset {ENVIRONMENT_VARIABLE}")
    return name


def load_provider(name: str) -> KernelProvider:
    """Import a provider by name.

    Raises:
        ValueError: unknown name.
    """
    if name not in _MODULES:
        raise ValueError(f"provider must be one of {', '.join(PROVIDERS)}, got {name!r}")
    return cast(KernelProvider, import_module(_MODULES[name]))


def get_provider(device: torch.device) -> KernelProvider:
    """Answer the provider for tensors on ``device``. Raises: ValueError as ``provider_name``."""
    return load_provider(provider_name(device))
