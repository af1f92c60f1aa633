"""What the attention kernels' tuning tables are keyed by, and the rows they hold.

Nothing here asks for a GPU when it is imported; ``device_arch`` asks when a plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The rows of every table. A device without a row of its own uses the one that it can run: see ``device_arch``.
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter")

# Shared memory that one program may take, in bytes.
MAX_SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program of an attention kernel is shaped.

    Attributes:
        block_m: query rows (one row a token and query head of the group), a power of two from 16.
        block_n: keys a step, a power of two from 16.
        num_warps: warps a program.
        num_stages: depth of the software pipeline over the keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def launch_options(self) -> dict[str, Any]:
        """Name the launch options; fused multiply-add is on explicitly, as Triton's default for it is changing."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Split a head into a power of two up to 128 and a padded rest: 64 = 64 + 0, 80 = 64 + 16, 256 = 128 + 128.

    A tile's width must be a power of two: padding 80 to 128 would waste a third of the arithmetic and of the memory.
    Tiles of 256 columns in one piece need more registers than there are.

    Raises:
        ValueError: head_dim is not in 16..256.
    """
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"the triton provider takes head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {head_dim}: "
            "LOONG_KERNELS=reference takes any"
        )
    main = min(128, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(16, 1 << (rest - 1).bit_length()) if rest else 0


def score_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Answer the kernels' (scale_log2, cap_factor) for ``triton_tile.softmax_step`` and ``cap_scores``.

    Raises:
        ValueError: ``scale`` is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive for the triton provider, got {scale}")
    log2_e = math.log2(math.e)
    return (scale * log2_e, 0.0) if soft_cap is None else (soft_cap * log2_e, scale / soft_cap)


def dot_precision(arch: str, dtype: torch.dtype) -> str:
    """Choose the arithmetic of matrix products: float32 keeps its accuracy, on tensor cores where they can (tf32x3)."""
    return "tf32x3" if dtype == torch.float32 and arch.startswith("sm_") else "ieee"


def table_row(table: Mapping[tuple[str, int, int], Tile], arch: str, head_dim: int, dtype: torch.dtype) -> Tile:
    """Find the row of a table keyed by (arch, largest head_dim, bytes an element): the smallest that is large enough.

    Raises:
        ValueError: the table has no row for this arch.
    """
    if arch == "interpreter":
        return Tile(block_m=16, block_n=32, num_warps=1, num_stages=1)
    bounds = sorted(bound for a, bound, size in table if a == arch and size == dtype.itemsize and bound >= head_dim)
    if not bounds:
        raise ValueError(f"no tuning for arch {arch!r}, head_dim {head_dim} and {dtype}: expected one of {ARCHS}")
    return table[arch, bounds[0], dtype.itemsize]


@cache
def device_arch(device: torch.device) -> str:
    """Name the row of the tuning tables for a device. A CPU has one too: Triton's interpreter.

    Raises:
        ValueError: an NVIDIA GPU older than Ampere.
    """
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(f"the triton provider needs compute capability 8.0 or newer, got {capability} of {device}")
    if capability == (8, 0):
        return "sm_80"
    # 8.6, 8.9 and 12.x have 99 KiB of shared memory and neither wgmma nor tcgen05.
    if capability[0] == 9:
        return "sm_90"
    return "sm_100" if capability[0] == 10 else "sm_86"


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one during a launch: Triton launches on the current device, wherever tensors lie."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def num_processors(device: torch.device) -> int:
    """Count the multiprocessors that the work of a launch is spread over; a few for the interpreter."""
    if device.type == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
