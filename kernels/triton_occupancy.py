"""How many programs of a kernel run at once on a multiprocessor (NVIDIA) or compute unit (AMD), by arithmetic alone.

Registers, shared memory, tensor memory and warps each allow a number of programs; the least counts. Both vendors' units
have four schedulers, each with 512 32-bit registers a lane that are handed out in eights, so that one formula serves:
warps of a scheduler = 512 // (registers rounded up to a multiple of 8).

Source: the rule of NVIDIA's cuda_occupancy.h and of LLVM's AMDGPU backend (GCNSubtarget::getOccupancyWithNumVGPRs).
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4
REGISTERS_PER_LANE = 512
REGISTER_GRANULARITY = 8


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """What a multiprocessor or compute unit has.

    Attributes:
        max_warps: warps (AMD: waves) at once.
        max_programs: programs at once.
        shared_bytes: shared memory (AMD: LDS) of all programs together.
        max_shared_bytes: shared memory that one program may take.
        reserved_shared_bytes: shared memory that the system takes for itself, a program.
        shared_granularity_bytes: what a program's shared memory is rounded up to.
        tensor_columns: columns of tensor memory; 0 where there is none.
    """

    max_warps: int
    max_programs: int
    shared_bytes: int
    max_shared_bytes: int
    reserved_shared_bytes: int = 1024
    shared_granularity_bytes: int = 128
    tensor_columns: int = 0


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; PTX ISA, "Tensor Memory".
# gfx942: AMD Instinct MI300 CDNA3 ISA guide, sections on VGPRs and LDS, and LLVM's AMDGPU target description.
ARCH_LIMITS = {
    "sm_80": ArchLimits(64, 32, shared_bytes=164 << 10, max_shared_bytes=163 << 10),
    "sm_86": ArchLimits(48, 16, shared_bytes=100 << 10, max_shared_bytes=99 << 10),
    "sm_90": ArchLimits(64, 32, shared_bytes=228 << 10, max_shared_bytes=227 << 10),
    "sm_100": ArchLimits(64, 32, shared_bytes=228 << 10, max_shared_bytes=227 << 10, tensor_columns=512),
    "gfx942": ArchLimits(
        32,
        32,
        shared_bytes=64 << 10,
        max_shared_bytes=64 << 10,
        reserved_shared_bytes=0,
        shared_granularity_bytes=512,
    ),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What runs at once on one multiprocessor or compute unit.

    Attributes:
        programs: of the kernel; 0 if not even one fits.
        warps: of these programs.
        max_warps: the architecture's.
        limited_by: what allows no more: "warps", "programs", "registers", "shared" or "tensor".
    """

    programs: int
    warps: int
    max_warps: int
    limited_by: str


def occupancy(arch: str, num_warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> Occupancy:
    """Compute how many programs run at once.

    Args:
        arch: a key of ``ARCH_LIMITS``.
        num_warps: warps a program.
        registers: 32-bit registers a thread; on AMD vector and accumulation registers together.
        shared_bytes: shared memory a program.
        tensor_columns: columns of tensor memory a program.

    Raises:
        ValueError: the architecture is not in the table, or num_warps is not positive.
    """
    if arch not in ARCH_LIMITS:
        raise ValueError(f"no limits for arch {arch!r}: expected one of {', '.join(ARCH_LIMITS)}")
    if num_warps < 1:
        raise ValueError(f"num_warps must be at least 1, got {num_warps}")
    limits = ARCH_LIMITS[arch]
    allowed = {"warps": limits.max_warps // num_warps, "programs": limits.max_programs}
    if registers:
        warps = REGISTERS_PER_LANE // _round_up(registers, REGISTER_GRANULARITY) * SCHEDULERS
        allowed["registers"] = warps // num_warps
    shared = _round_up(shared_bytes + limits.reserved_shared_bytes, limits.shared_granularity_bytes)
    if shared:
        # One program may take a little less than the multiprocessor has.
        fits = shared_bytes <= limits.max_shared_bytes
        allowed["shared"] = limits.shared_bytes // shared if fits else 0
    if tensor_columns:
        allowed["tensor"] = limits.tensor_columns // tensor_columns
    limited_by = min(allowed, key=lambda name: allowed[name])
    programs = allowed[limited_by]
    return Occupancy(programs, programs * num_warps, limits.max_warps, limited_by)


def _round_up(value: int, granularity: int) -> int:
    return -(-value // granularity) * granularity
