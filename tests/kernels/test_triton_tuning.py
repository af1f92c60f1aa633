"""The tuning tables and how a head and a device find their row."""

import pytest
import torch

from loongserve.kernels.triton_tuning import (
    ARCHS,
    DECODE_TILES,
    PREFILL_TILES,
    STRIPED_TILES,
    Tile,
    device_arch,
    dot_precision,
    split_head_dim,
    table_row,
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("table", [STRIPED_TILES, DECODE_TILES, PREFILL_TILES], ids=["striped", "decode", "prefill"])
def test_every_table_has_every_device(table, arch):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for head_dim in (16, 64, 80, 96, 128, 192, 256):
            tile = table_row(table, arch, head_dim, dtype)
            for size in (tile.block_m, tile.block_n):
                assert size >= 16
                assert size & (size - 1) == 0


def test_the_smallest_row_that_is_large_enough():
    table = {("sm_90", 64, 2): Tile(64, 64, 4, 2), ("sm_90", 128, 2): Tile(16, 16, 4, 2)}
    assert table_row(table, "sm_90", 64, torch.float16).block_m == 64
    assert table_row(table, "sm_90", 80, torch.float16).block_m == 16
    with pytest.raises(ValueError, match="no tuning for arch 'sm_90', head_dim 160"):
        table_row(table, "sm_90", 160, torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (16, (16, 0)),
        (24, (16, 16)),
        (64, (64, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (64, 64)),
        (128, (128, 0)),
        (192, (128, 64)),
        (256, (128, 128)),
    ],
)
def test_a_head_is_split_into_powers_of_two(head_dim, parts):
    assert split_head_dim(head_dim) == parts


def test_a_cpu_stands_for_the_interpreter():
    assert device_arch(torch.device("cpu")) == "interpreter"
    assert dot_precision("interpreter", torch.float32) == "ieee"
