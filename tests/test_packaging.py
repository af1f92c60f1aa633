"""The package as others get it: a wheel whose primitives run with torch and triton alone, and no shadowed names."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Imports every module of the four lower folders and runs every kernel once, on the CPU.
RUN_EVERY_KERNEL = """
import importlib, pathlib, torch, loongserve

root = pathlib.Path(loongserve.__file__).parent
for folder in ("kernels", "comm", "kvpool", "policies"):
    for file in sorted((root / folder).glob("*.py")):
        importlib.import_module(f"loongserve.{folder}.{file.stem}")

from loongserve.kernels.activation import gelu_and_mul, silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
q, k, v = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
k_cache, v_cache = torch.zeros(16, 2, 64), torch.zeros(16, 2, 64)
state, other = AttentionState.empty(5, 4, 64), AttentionState.empty(5, 4, 64)
save = KVSave(torch.tensor([7, 3, -1, 0, 9]), k_cache, v_cache)
striped_attention(plan_striped_attention([0, 5], [0, 5], [0], **heads), q, k, v, state, scale=0.125, save=save)
paged = plan_paged_attention([0, 5], [torch.tensor([7, 3, 0, 9])], **heads)
paged_attention(paged, q, k_cache, v_cache, other, scale=0.125)
merge_rows(state, torch.tensor([0, 4]), AttentionState(other.out[:2], other.lse[:2]))
out = finalize(merge_states(state, other), torch.float32)
save_kv(k, v, torch.tensor([1, 2, 4, 5, 6]), k_cache, v_cache)
apply_rope(q, torch.ones(8, 32), torch.zeros(8, 32), torch.arange(5))
merge_many([state, other, state])
gather_kv(k_cache, v_cache, torch.tensor([1, -1]))
gelu_and_mul(torch.randn(5, 8))
for result in (out, rms_norm(torch.randn(5, 8), torch.ones(8), 1e-5), silu_and_mul(torch.randn(5, 8))):
    assert result.isfinite().all()
print("all kernels ran from", root)
"""

# As in an environment with torch and triton alone: what the extras bring cannot be imported.
ONLY_BASE = """
import sys

class Without:
    blocked = {"numpy", "transformers", "grpc", "msgpack", "click", "safetensors", "gguf", "google", "nccl", "cuda"}

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            return None
        return self.finder.find_spec(name, path, target)

# Not found, as it would be, and no error of its own: torch's compiler asks whether numpy is there.
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # The wheel is built from the source distribution: both are complete, and no old build folder takes part.
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, timeout=280, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_six_folders_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[1] for name in names if name.startswith("loongserve/") and name.count("/") > 1}
    assert folders == {"kernels", "comm", "kvpool", "policies", "runtime", "cli"}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"loongserve"}
    assert "loongserve/runtime/proto/loongserve.proto" in names
    assert "loongserve/py.typed" in names


def test_every_kernel_runs_from_the_wheel_with_torch_and_triton_alone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ONLY_BASE + RUN_EVERY_KERNEL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"all kernels ran from {tmp_path}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_runs_from_the_wheel_in_a_fresh_environment(wheel, tmp_path):
    """As above, in an environment that really has nothing else: installs torch, and takes its time."""
    python = tmp_path / "bare/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bare"], check=True)
    pins = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins, wheel], check=True)
    done = subprocess.run(
        [python, "-P", "-c", RUN_EVERY_KERNEL], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_our_folders_shadow_no_installed_package():
    """transformers looks for a package called kernels; ours lies in the current directory under that name."""
    subprocess.run(
        [sys.executable, "-c", "from transformers import LlamaForCausalLM"], cwd=ROOT, check=True, timeout=280
    )


@pytest.mark.parametrize("folder", ["kernels", "comm", "kvpool", "policies", "runtime", "cli"])
def test_the_six_folders_are_no_packages_of_their_own(folder):
    assert not list((ROOT / folder).rglob("__init__.py"))
    assert (ROOT / "src/loongserve" / folder).is_symlink()
