"""Every kernel compiled for GPUs without one: no spills, shared memory that fits, matrix units used."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile the small matrix in a process of its own: this one runs Triton's interpreter, which can't compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    process = subprocess.run(
        [sys.executable, "-m", "loongserve.kernels.triton_resources"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def name_of(kernel):
    return " ".join(str(kernel[field]) for field in ("kernel", "arch", "head_dim", "heads", "dtype"))


# The timeout holds for the first test of the module too, which makes the fixture.
@pytest.mark.timeout(1600)
def test_every_kernel_is_compiled_for_every_vendor(compiled):
    kernels = {(kernel["kernel"], kernel["arch"][:2]) for kernel in compiled}
    names = {name for name, _ in kernels}
    assert {"striped_attention", "paged_attention_decode", "paged_attention_prefill", "merge_partials"} <= names
    assert kernels == {(name, vendor) for name in names for vendor in ("sm", "gf")}


@pytest.mark.timeout(1600)
def test_nothing_spills(compiled):
    assert [name_of(k) for k in compiled if k["stack_bytes"] or k["local_instructions"]] == []


@pytest.mark.timeout(1600)
def test_shared_memory_fits(compiled):
    assert [name_of(k) for k in compiled if k["shared_bytes"] > k["shared_limit_bytes"]] == []


@pytest.mark.timeout(1600)
def test_attention_uses_the_matrix_units(compiled):
    """A tile of 64 rows and more uses the newest instruction of its architecture, one of 16 rows mma.sync."""
    wanted = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
    lacking = []
    for kernel in compiled:
        half = kernel["dtype"] != "fp32"
        if half and kernel["kernel"] in ("striped_attention", "paged_attention_prefill"):
            expected = wanted[kernel["arch"]]
        elif half and kernel["kernel"] == "paged_attention_decode":
            expected = "v_mfma" if kernel["arch"] == "gfx942" else "mma.sync"
        else:
            continue
        if expected not in kernel["matrix_instructions"]:
            lacking.append(f"{name_of(kernel)}: {kernel['matrix_instructions']}")
    assert lacking == []
