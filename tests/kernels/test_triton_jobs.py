"""What is compiled for the reports is what is launched: the same constants, options and types of arguments."""

import pytest
import torch

from loongserve.kernels import triton_elementwise, triton_jobs, triton_merge, triton_paged, triton_striped
from loongserve.kernels.activation import gelu_and_mul, silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.positional import plan_positional_attention
from loongserve.kernels.provider import ENVIRONMENT_VARIABLE
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention
from loongserve.kernels.triton_jobs import KERNELS, gate_jobs, layer_jobs, merge_jobs, paged_job, striped_job
from loongserve.kernels.triton_resources import argument_types
from loongserve.kernels.triton_striped import BAND, DIAGONAL, POSITIONS
from loongserve.kernels.triton_tuning import device_arch

HEADS, HEAD_DIM = (9, 3), 80
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp32"])
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", int: "i32", float: "fp32"}


class Recorder:
    """Stands in for a jitted kernel and notes its launches."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            found = (TYPES[arg.dtype if isinstance(arg, torch.Tensor) else type(arg)] for arg in args)
            self.launches.append((dict(zip(self.arg_names, found, strict=False)), constants))

        return launch


@pytest.fixture
def launches(monkeypatch):
    """Answer the launches of a kernel of ``KERNELS`` so far: (types of arguments, constants and options)."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    recorders = {}
    for module in (triton_elementwise, triton_merge, triton_paged, triton_striped):
        for name, value in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_kernel"):
                recorders[id(value)] = Recorder(value)
                monkeypatch.setattr(module, name, recorders[id(value)])
    return lambda kernel: recorders[id(KERNELS[kernel])].launches


def check(job, launches):
    """One launch was of this job."""
    types = {name: kind for name, kind in argument_types(job).items() if kind != "constexpr"}
    assert (types, {**job.constants, **job.options}) in launches(job.kernel), job


def rows(tokens, heads, dtype):
    return torch.zeros(tokens, heads, HEAD_DIM, dtype=triton_jobs.DTYPES[dtype])


def state_of(tokens):
    return AttentionState.empty(tokens, HEADS[0], HEAD_DIM)


def shape_of(dtype):
    return {
        "num_q_heads": HEADS[0],
        "num_kv_heads": HEADS[1],
        "head_dim": HEAD_DIM,
        "dtype": triton_jobs.DTYPES[dtype],
        "device": "cpu",
    }


@DTYPES
def test_striped_attention(dtype, launches):
    arch = device_arch(torch.device("cpu"))
    q, k, cache = rows(5, HEADS[0], dtype), rows(5, HEADS[1], dtype), rows(9, HEADS[1], dtype)
    save = KVSave(torch.arange(5), cache, cache.clone())
    positions = torch.tensor([5, 1, 7, 2, 2])
    plans = {
        DIAGONAL.value: plan_striped_attention([0, 5], [0, 5], [0], **shape_of(dtype)),
        BAND.value: plan_striped_attention([0, 5], [0, 5], [0], lower_diagonals=[-2], **shape_of(dtype)),
        POSITIONS.value: plan_positional_attention([0, 5], [0, 5], positions, positions, **shape_of(dtype)),
    }
    for mask, plan in plans.items():
        for soft_cap in (None, 4.0):
            for saving in (None, save):
                striped_attention(plan, q, k, k, state_of(5), scale=0.1, save=saving, soft_cap=soft_cap)
                job = striped_job(
                    arch, HEAD_DIM, HEADS, dtype, mask, soft_cap=soft_cap is not None, save=saving is not None
                )
                check(job, launches)


@DTYPES
def test_paged_attention(dtype, launches):
    arch = device_arch(torch.device("cpu"))
    q, cache = rows(30, HEADS[0], dtype), rows(3000, HEADS[1], dtype)
    slots = [torch.arange(3000), torch.arange(40)]
    for window in (False, True):
        first = torch.ones(30, dtype=torch.int64) if window else None
        plan = plan_paged_attention([0, 1, 30], slots, first_visible=first, **shape_of(dtype))
        for soft_cap in (None, 4.0):
            paged_attention(plan, q, cache, cache, state_of(30), scale=0.1, soft_cap=soft_cap)
            for kernel in ("paged_attention_decode", "paged_attention_prefill"):
                capped = soft_cap is not None
                check(paged_job(kernel, arch, HEAD_DIM, HEADS, dtype, window=window, soft_cap=capped), launches)
    check(next(merge_jobs(arch, HEAD_DIM, HEADS)), launches)


def test_merges(launches):
    a, b = state_of(5), state_of(5)
    merge_states(a, b)
    merge_rows(a, torch.tensor([3, 1]), state_of(2))
    merge_many([a, b, a, b])
    for job in merge_jobs("sm_90", HEAD_DIM, HEADS):
        if job.kernel != "merge_partials":
            check(job, launches)


@DTYPES
def test_layer(dtype, launches):
    k, cache, slots = rows(5, HEADS[1], dtype), rows(9, HEADS[1], dtype), torch.arange(5)
    finalize(state_of(5), k.dtype)
    save_kv(k, k, slots, cache, cache.clone())
    gather_kv(cache, cache, slots)
    hidden = torch.zeros(5, HEADS[0] * HEAD_DIM, dtype=k.dtype)
    rms_norm(hidden, hidden[0], 1e-5, residual=hidden.clone())
    angles = torch.zeros(7, HEAD_DIM // 2)
    for interleaved in (False, True):
        apply_rope(rows(5, HEADS[0], dtype), angles, angles, slots, interleaved=interleaved)
    wide = torch.zeros(3, 4096, dtype=k.dtype)
    silu_and_mul(wide)
    gelu_and_mul(wide)
    gelu_and_mul(wide, approximate="tanh")
    for job in (*layer_jobs("sm_90", HEAD_DIM, HEADS, dtype), *gate_jobs("sm_90", dtype)):
        check(job, launches)
