"""Every kernel compiled for GPUs without one: no spills, shared memory that fits, matrix units used."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loongserve.kernels.triton_jobs import ARCHS, KERNELS
from loongserve.kernels.triton_resources import Resources

# The timeout holds for the first test of the module too, which makes the fixture.
pytestmark = pytest.mark.timeout(1600)


def run(folder, *command):
    """Compile in a process of its own: this one runs Triton's interpreter, which can't."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    process = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    rows = map(json.loads, process.stdout.splitlines())
    return [Resources(**{**row, "matrix_instructions": tuple(row["matrix_instructions"])}) for row in rows]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return run(tmp_path_factory.mktemp("triton"), "-m", "loongserve.kernels.triton_resources")


@pytest.fixture(scope="module")
def spilling(tmp_path_factory):
    script = Path(__file__).with_name("compile_spilling.py")
    return {row.arch: row for row in run(tmp_path_factory.mktemp("triton"), str(script))}


def test_every_kernel_is_compiled_for_every_architecture(compiled):
    found = {(row.kernel, row.arch) for row in compiled}
    # One jitted function under two names is compiled everywhere under one of them.
    twins = {"merge_rows", "gelu_and_mul"}
    assert {(kernel, arch) for kernel in KERNELS if kernel not in twins for arch in ARCHS} <= found
    assert {kernel for kernel, _ in found} == set(KERNELS)


def test_every_head_size_dtype_and_feature_of_attention_is_compiled(compiled):
    attention = [row for row in compiled if "attention" in row.kernel]
    assert {row.head_dim for row in attention} == {64, 80, 96, 128, 192, 256}
    assert {row.dtype for row in attention} == {"bf16", "fp16", "fp32"}
    features = {feature for row in attention for feature in row.features.split()}
    assert features == {"diagonal", "band", "positions", "cap", "save", "window"}


def test_nothing_spills(compiled):
    assert [row.name for row in compiled if row.stack_bytes or row.local_instructions] == []


def test_shared_memory_fits(compiled):
    assert [(row.name, row.shared_bytes) for row in compiled if any("shared" in fault for fault in row.faults)] == []


def test_attention_uses_the_matrix_units(compiled):
    """A tile of 64 rows and more uses the newest instruction of its architecture, one of 16 rows mma.sync."""
    wanted = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
    half = [row for row in compiled if row.dtype != "fp32" and "attention" in row.kernel]
    assert {(row.kernel, row.arch) for row in half} >= {("striped_attention", arch) for arch in ARCHS}
    for row in half:
        decode = row.kernel == "paged_attention_decode" and row.arch != "gfx942"
        assert ("mma.sync" if decode else wanted[row.arch]) in row.matrix_instructions, row.name


def test_nothing_else_is_wrong(compiled):
    assert [(row.name, row.faults) for row in compiled if row.faults] == []
    assert all(row.occupancy.programs >= 1 for row in compiled)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_kernel_that_spills_is_caught(arch, spilling):
    """The check can fail: a kernel held to fewer registers than it needs spills, and both marks of it are seen."""
    row = spilling[arch]
    assert row.stack_bytes > 0
    assert row.local_instructions > 0
    assert len(row.faults) == 2, row.faults


SOUND = Resources(
    kernel="striped_attention",
    arch="sm_90",
    head_dim=128,
    heads="32:8",
    dtype="bf16",
    features="diagonal save",
    tile="128x64",
    num_warps=8,
    num_stages=3,
    registers=204,
    stack_bytes=0,
    local_instructions=0,
    shared_bytes=131072,
    tensor_columns=0,
    matrix_instructions=("wgmma",),
)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        pytest.param({}, (), id="sound"),
        pytest.param({"stack_bytes": 8}, ("a stack of 8 bytes",), id="stack"),
        pytest.param({"local_instructions": 3}, ("3 instructions on local memory",), id="local"),
        pytest.param(
            {"shared_bytes": (227 << 10) + 1},
            ("232449 bytes of shared memory, 232448 allowed", "not one program fits a multiprocessor"),
            id="shared",
        ),
        pytest.param({"num_warps": 16}, ("not one program fits a multiprocessor",), id="registers"),
        pytest.param({"matrix_instructions": ("mma.sync",)}, ("no wgmma",), id="an_older_instruction"),
        pytest.param({"arch": "sm_100", "matrix_instructions": ("wgmma",)}, ("no tcgen05.mma",), id="sm_100"),
        pytest.param({"arch": "gfx942", "shared_bytes": 0}, ("no v_mfma",), id="gfx942"),
        pytest.param({"kernel": "paged_attention_decode"}, ("no mma.sync",), id="decode"),
        pytest.param({"dtype": "fp32", "matrix_instructions": ()}, ("no mma.sync or wgmma or tcgen05.mma",), id="fp32"),
        pytest.param({"kernel": "merge_states", "matrix_instructions": ()}, (), id="no_matrix_work"),
    ],
)
def test_faults(changes, faults):
    assert replace(SOUND, **changes).faults == faults
