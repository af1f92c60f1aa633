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


# The tables: (arch, largest head_dim, bytes an element) -> tile. Each is found by compiling all forms of the kernel
# (docs/kernels-report.md; sm_86 on request): none may spill or take more shared memory than a program may have. What
# decides:
# - mma.sync (sm_80, sm_86, decode, float32) takes queries and sums from registers, of which a thread has 255: rows
#   times head_dim decide, and each key of a step costs scores and addresses.
# - wgmma (sm_90) and tcgen05 (sm_100) read K and V from shared memory, 227 KiB a program, and want 64 rows or more a
#   warp group of 4 warps; tcgen05 keeps sums in tensor memory. So 128 rows up to 128 columns, 64 above.
# - float32 is multiplied in three products of tf32 (tf32x3) and needs two halves of each operand in registers: 16 rows
#   from 80 columns on. It serves exactness; speed is for 16 bits.
# - gfx942 has 64 KiB for K and V and 512 registers: one stage, with no copies in flight to pay for.

# The ring step: bound by arithmetic, so the most rows that fit, as every K and V tile is read once a tile of rows.
STRIPED_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 96, 2): Tile(128, 64, 8, 3),
    # 64 keys a step spill 24 to 120 bytes, at 2 stages too; 32 leave room for a fourth stage.
    ("sm_80", 128, 2): Tile(128, 32, 8, 4),
    ("sm_80", 192, 2): Tile(64, 16, 8, 2),
    # 32 keys a step spill 16 bytes with a window, 16 warps far more.
    ("sm_80", 256, 2): Tile(64, 16, 8, 2),
    ("sm_80", 64, 4): Tile(64, 16, 4, 2),
    ("sm_80", 96, 4): Tile(16, 16, 4, 2),
    ("sm_80", 128, 4): Tile(16, 32, 4, 1),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    # sm_80's instructions with 99 KiB instead of 163: fewer stages.
    ("sm_86", 64, 2): Tile(128, 64, 8, 2),
    ("sm_86", 128, 2): Tile(128, 32, 8, 2),
    ("sm_86", 192, 2): Tile(64, 16, 8, 2),
    ("sm_86", 256, 2): Tile(64, 16, 8, 2),
    ("sm_86", 64, 4): Tile(64, 16, 4, 2),
    ("sm_86", 96, 4): Tile(16, 16, 4, 2),
    ("sm_86", 128, 4): Tile(16, 32, 4, 1),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    # Half the columns, twice the keys a step.
    ("sm_90", 64, 2): Tile(128, 128, 8, 3),
    ("sm_90", 128, 2): Tile(128, 64, 8, 3),
    ("sm_90", 256, 2): Tile(64, 64, 8, 2),
    ("sm_90", 64, 4): Tile(64, 16, 4, 2),
    ("sm_90", 96, 4): Tile(16, 16, 4, 2),
    ("sm_90", 128, 4): Tile(16, 32, 4, 1),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 128, 2): Tile(128, 64, 8, 3),
    ("sm_100", 256, 2): Tile(64, 64, 8, 2),
    ("sm_100", 96, 4): Tile(16, 16, 4, 2),
    ("sm_100", 128, 4): Tile(16, 32, 4, 1),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    # At 128 columns this takes all 64 KiB.
    ("gfx942", 128, 2): Tile(128, 64, 4, 1),
    ("gfx942", 256, 2): Tile(64, 32, 4, 1),
    ("gfx942", 128, 4): Tile(32, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 32, 4, 1),
}

# Requests with at most 16 query rows, the least that a matrix instruction takes: bound by memory, so that a deep
# pipeline of loads counts, not the matrix units.
DECODE_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 96, 2): Tile(16, 32, 4, 4),
    ("sm_80", 128, 2): Tile(16, 64, 4, 3),
    ("sm_80", 256, 2): Tile(16, 32, 4, 3),
    ("sm_80", 64, 4): Tile(16, 32, 4, 3),
    ("sm_80", 128, 4): Tile(16, 16, 4, 3),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    # Two stages: several programs share 100 KiB.
    ("sm_86", 128, 2): Tile(16, 64, 4, 2),
    ("sm_86", 256, 2): Tile(16, 32, 4, 2),
    ("sm_86", 64, 4): Tile(16, 32, 4, 3),
    ("sm_86", 128, 4): Tile(16, 16, 4, 3),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    ("sm_90", 128, 2): Tile(16, 64, 4, 4),
    ("sm_90", 256, 2): Tile(16, 64, 4, 3),
    ("sm_90", 64, 4): Tile(16, 32, 4, 3),
    ("sm_90", 128, 4): Tile(16, 16, 4, 3),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 128, 2): Tile(16, 64, 4, 4),
    ("sm_100", 256, 2): Tile(16, 64, 4, 3),
    ("sm_100", 64, 4): Tile(16, 32, 4, 3),
    ("sm_100", 128, 4): Tile(16, 16, 4, 3),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    ("gfx942", 128, 2): Tile(16, 64, 4, 1),
    ("gfx942", 256, 2): Tile(16, 32, 4, 1),
    ("gfx942", 128, 4): Tile(16, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 16, 4, 1),
}

# Requests with more query rows: chunks that attend to resident KV, and prefixes. Each key has an address of its own, so
# that less fits beside it than in the ring step.
PREFILL_TILES: dict[tuple[str, int, int], Tile] = {
    ("sm_80", 80, 2): Tile(64, 64, 4, 2),
    # 64 keys a step spill 8 bytes, and so do 32 with a third stage.
    ("sm_80", 96, 2): Tile(64, 32, 4, 2),
    ("sm_80", 128, 2): Tile(64, 64, 4, 2),
    ("sm_80", 192, 2): Tile(64, 16, 8, 2),
    ("sm_80", 256, 2): Tile(64, 32, 8, 2),
    ("sm_80", 64, 4): Tile(64, 16, 4, 2),
    ("sm_80", 96, 4): Tile(16, 16, 4, 2),
    ("sm_80", 128, 4): Tile(16, 32, 4, 1),
    ("sm_80", 256, 4): Tile(16, 16, 8, 2),
    ("sm_86", 128, 2): Tile(64, 32, 4, 2),
    ("sm_86", 192, 2): Tile(64, 16, 8, 2),
    ("sm_86", 256, 2): Tile(64, 32, 8, 1),
    ("sm_86", 64, 4): Tile(64, 16, 4, 2),
    ("sm_86", 96, 4): Tile(16, 16, 4, 2),
    ("sm_86", 128, 4): Tile(16, 32, 4, 1),
    ("sm_86", 256, 4): Tile(16, 16, 8, 2),
    ("sm_90", 128, 2): Tile(128, 64, 8, 2),
    # 64 rows of 64 keys spill 8 bytes with a window and a cap; these take 248 registers and read K and V half as often.
    ("sm_90", 192, 2): Tile(128, 32, 8, 2),
    ("sm_90", 256, 2): Tile(64, 64, 8, 2),
    ("sm_90", 64, 4): Tile(64, 16, 4, 2),
    ("sm_90", 96, 4): Tile(16, 16, 4, 2),
    ("sm_90", 128, 4): Tile(16, 32, 4, 1),
    ("sm_90", 256, 4): Tile(16, 16, 8, 2),
    ("sm_100", 128, 2): Tile(128, 64, 8, 2),
    ("sm_100", 256, 2): Tile(64, 64, 8, 2),
    ("sm_100", 96, 4): Tile(16, 16, 4, 2),
    ("sm_100", 128, 4): Tile(16, 32, 4, 1),
    ("sm_100", 256, 4): Tile(16, 16, 8, 2),
    ("gfx942", 128, 2): Tile(64, 64, 4, 1),
    ("gfx942", 256, 2): Tile(64, 32, 4, 1),
    ("gfx942", 128, 4): Tile(32, 32, 4, 1),
    ("gfx942", 256, 4): Tile(16, 32, 4, 1),
}


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


def attention_constants(
    tile: Tile, arch: str, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Name the compile-time constants that all attention kernels have."""
    main, tail = split_head_dim(head_dim)
    return {
        "GROUP": num_q_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "D_MAIN": main,
        "D_TAIL": tail,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": dot_precision(arch, dtype),
    }


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
