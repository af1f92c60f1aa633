"""The arithmetic of occupancy, against cases worked out by hand from the vendors' tables."""

import pytest

from loongserve.kernels.triton_occupancy import ARCH_LIMITS, occupancy

KIB = 1024


@pytest.mark.parametrize(
    ("arch", "num_warps", "registers", "shared_bytes", "tensor_columns", "programs", "limited_by"),
    [
        # 65536 registers / (8 warps x 32 threads x 256): one program.
        pytest.param("sm_80", 8, 255, 98304, 0, 1, "registers", id="255_registers"),
        # 168 a thread, in eights already: 512 // 168 = 3 warps a scheduler, 12 in all.
        pytest.param("sm_90", 4, 168, 0, 0, 3, "registers", id="registers_in_eights"),
        pytest.param("sm_90", 4, 169, 0, 0, 2, "registers", id="one_register_more"),
        pytest.param("sm_80", 1, 32, 0, 0, 32, "programs", id="one_warp_each"),
        pytest.param("sm_80", 4, 32, 0, 0, 16, "warps", id="full"),
        pytest.param("sm_86", 4, 32, 0, 0, 12, "warps", id="full_of_48"),
        # 164 KiB hold two programs of 81 KiB and 1 KiB for the system, not two of a byte more.
        pytest.param("sm_80", 4, 64, 81 * KIB, 0, 2, "shared", id="half_the_shared_memory"),
        pytest.param("sm_80", 4, 64, 81 * KIB + 1, 0, 1, "shared", id="a_byte_more"),
        pytest.param("sm_90", 8, 64, 227 * KIB, 0, 1, "shared", id="all_shared_memory"),
        pytest.param("sm_90", 8, 64, 227 * KIB + 1, 0, 0, "shared", id="too_much_shared_memory"),
        pytest.param("sm_100", 4, 64, 0, 256, 2, "tensor", id="half_the_tensor_memory"),
        # 335 of 512 vector registers: one wave a SIMD, four in all.
        pytest.param("gfx942", 4, 335, 64 * KIB, 0, 1, "registers", id="amd_one_wave"),
        pytest.param("gfx942", 4, 128, 16 * KIB, 0, 4, "registers", id="amd_four_waves"),
        pytest.param("gfx942", 4, 24, 0, 0, 8, "warps", id="amd_full"),
        pytest.param("gfx942", 4, 24, 32 * KIB + 1, 0, 1, "shared", id="amd_lds_in_512_bytes"),
        pytest.param("sm_90", 32, 255, 0, 0, 0, "registers", id="not_even_one"),
    ],
)
def test_programs(arch, num_warps, registers, shared_bytes, tensor_columns, programs, limited_by):
    found = occupancy(arch, num_warps, registers, shared_bytes, tensor_columns)
    assert (found.programs, found.limited_by) == (programs, limited_by)
    assert found.warps == programs * num_warps
    assert found.max_warps == ARCH_LIMITS[arch].max_warps


@pytest.mark.parametrize("arch", ARCH_LIMITS)
def test_more_of_anything_never_helps(arch):
    grid = [
        [occupancy(arch, warps, registers, shared).programs for registers in (16, 64, 128, 255)]
        for warps in (1, 4, 8)
        for shared in (0, 5000, 60000)
    ]
    for row in grid:
        assert row == sorted(row, reverse=True)
    for by_registers in zip(*(grid[i : i + 3] for i in (0, 3, 6)), strict=True):
        for column in zip(*by_registers, strict=True):
            assert list(column) == sorted(column, reverse=True)


def test_refuses_what_is_not_in_the_table():
    with pytest.raises(ValueError, match=r"no limits for arch 'sm_70': expected one of sm_80, "):
        occupancy("sm_70", 4, 64, 0)
    with pytest.raises(ValueError, match="num_warps must be at least 1, got 0"):
        occupancy("sm_80", 0, 64, 0)
