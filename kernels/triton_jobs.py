"""What is compiled to see what the Triton kernels take: each in the forms in which a model launches it.

A job is one kernel for one architecture with its compile-time constants, as its launcher would choose them.
``small_matrix`` is what the tests compile, ``full_matrix`` what the kept report shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from loongserve.kernels import triton_elementwise, triton_merge, triton_paged, triton_striped
from loongserve.kernels.triton_paged_plan import paged_constants
from loongserve.kernels.triton_striped import BAND, DIAGONAL, POSITIONS
from loongserve.kernels.triton_striped_plan import striped_constants
from loongserve.kernels.triton_tuning import DECODE_TILES, PREFILL_TILES

# The architectures that are compiled for: data-centre GPUs of the last three generations, and AMD's. sm_86 can be asked
# for too; its instructions are sm_80's.
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)

# The kernels by their names in reports: the stem of the public function, and which form of it where there are several.
KERNELS = {
    "striped_attention": triton_striped._striped_attention_kernel,
    "paged_attention_decode": triton_paged._paged_attention_kernel,
    "paged_attention_prefill": triton_paged._paged_attention_kernel,
    "merge_partials": triton_paged._merge_partials_kernel,
    "merge_states": triton_merge._merge_states_kernel,
    "merge_rows": triton_merge._merge_states_kernel,
    "merge_many": triton_merge._merge_many_kernel,
    "finalize": triton_merge._finalize_kernel,
    "save_kv": triton_elementwise._save_kv_kernel,
    "gather_kv": triton_elementwise._gather_kv_kernel,
    "rms_norm": triton_elementwise._rms_norm_kernel,
    "apply_rope": triton_elementwise._apply_rope_kernel,
    "silu_and_mul": triton_elementwise._gate_and_mul_kernel,
    "gelu_and_mul": triton_elementwise._gate_and_mul_kernel,
}
# Second names of a kernel: with rows to gather, with another gate.
_TWINS = ("merge_rows", "gelu_and_mul")
_MASK_NAMES = {DIAGONAL.value: "diagonal", BAND.value: "band", POSITIONS.value: "positions"}


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one architecture in one form.

    Attributes:
        kernel: a key of ``KERNELS``.
        arch: an architecture of ``triton_resources.TARGETS``.
        head_dim: of attention; of a decoder layer's other kernels, that of the model.
        heads: query and KV heads, e.g. "32:8".
        dtype: of the model's tensors, a key of ``DTYPES``.
        features: what else makes the code another, e.g. "band cap save".
        constants: the kernel's compile-time constants.
        options: its launch options.
    """

    kernel: str
    arch: str
    head_dim: int
    heads: str
    dtype: str
    features: str
    constants: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)


def striped_job(
    arch: str,
    head_dim: int,
    heads: tuple[int, int],
    dtype: str,
    mask: int = DIAGONAL.value,
    *,
    soft_cap: bool = False,
    save: bool = True,
) -> CompileJob:
    """Name a form of striped attention; ``mask`` is the value of DIAGONAL, BAND or POSITIONS."""
    tile, constants = striped_constants(arch, *heads, head_dim, DTYPES[dtype], mask)
    features = " ".join([_MASK_NAMES[mask], *["cap"] * soft_cap, *["save"] * save])
    constants = {**constants, "SOFT_CAP": soft_cap, "SAVE": save}
    return CompileJob(
        "striped_attention",
        arch,
        head_dim,
        f"{heads[0]}:{heads[1]}",
        dtype,
        features,
        constants,
        tile.launch_options(),
    )


def paged_job(
    kernel: str,
    arch: str,
    head_dim: int,
    heads: tuple[int, int],
    dtype: str,
    *,
    window: bool = False,
    soft_cap: bool = False,
) -> CompileJob:
    """Name a form of ``kernel``: paged_attention_decode or paged_attention_prefill."""
    table = DECODE_TILES if kernel == "paged_attention_decode" else PREFILL_TILES
    tile, constants = paged_constants(table, arch, *heads, head_dim, DTYPES[dtype])
    features = " ".join([*["window"] * window, *["cap"] * soft_cap])
    constants = {**constants, "WINDOW": window, "SOFT_CAP": soft_cap}
    return CompileJob(
        kernel, arch, head_dim, f"{heads[0]}:{heads[1]}", dtype, features, constants, tile.launch_options()
    )


def attention_jobs(arch: str, head_dim: int, heads: tuple[int, int], dtype: str) -> Iterator[CompileJob]:
    """List the attention kernels of a model in their plain forms."""
    yield striped_job(arch, head_dim, heads, dtype)
    yield paged_job("paged_attention_decode", arch, head_dim, heads, dtype)
    yield paged_job("paged_attention_prefill", arch, head_dim, heads, dtype)


def merge_jobs(arch: str, head_dim: int, heads: tuple[int, int]) -> Iterator[CompileJob]:
    """List the kernels that see only states, which are float32 whatever the model is."""
    shape = (arch, head_dim, f"{heads[0]}:{heads[1]}", "fp32")
    yield CompileJob("merge_partials", *shape, "", triton_paged.merge_constants(heads[0], head_dim), _warps(1))
    state = _state_constants(head_dim, heads)
    warps = _warps(triton_merge.NUM_WARPS)
    yield CompileJob("merge_states", *shape, "", {**state, "HAS_ROWS": False}, warps)
    yield CompileJob("merge_rows", *shape, "", {**state, "HAS_ROWS": True}, warps)
    yield CompileJob("merge_many", *shape, "", {**state, "COUNT": triton_merge.MERGED_AT_ONCE}, warps)


def layer_jobs(arch: str, head_dim: int, heads: tuple[int, int], dtype: str) -> Iterator[CompileJob]:
    """List the memory-bound kernels on a model's tensors."""
    shape = (arch, head_dim, f"{heads[0]}:{heads[1]}", dtype)
    yield CompileJob("finalize", *shape, "", _state_constants(head_dim, heads), _warps(triton_merge.NUM_WARPS))
    rows = {
        "NUM_KV_HEADS": heads[1],
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_N": triton_elementwise.SAVE_BLOCK,
    }
    yield CompileJob("save_kv", *shape, "", rows, _warps(4))
    yield CompileJob("gather_kv", *shape, "", rows, _warps(4))
    norm = triton_elementwise.rms_norm_constants(heads[0] * head_dim)
    warps = _warps(triton_elementwise.rms_norm_warps(norm["BLOCK"]))
    yield CompileJob("rms_norm", *shape, "residual", {**norm, "HAS_RESIDUAL": True}, warps)
    for interleaved in (False, True):
        rope = {
            "NUM_HEADS": heads[0],
            "HALF": head_dim // 2,
            "INTERLEAVED": interleaved,
            "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
            "BLOCK_H": min(triton_elementwise.ROPE_HEADS, triton.next_power_of_2(heads[0])),
        }
        yield CompileJob("apply_rope", *shape, "interleaved" if interleaved else "halves", rope, _warps(2))


def gate_jobs(arch: str, dtype: str) -> Iterator[CompileJob]:
    """List the gated activations, whose code knows nothing of heads."""
    for kernel, gate in (("silu_and_mul", "silu"), ("gelu_and_mul", "gelu_erf"), ("gelu_and_mul", "gelu_tanh")):
        constants = {"GATE": gate, "BLOCK": triton_elementwise.SILU_BLOCK}
        yield CompileJob(kernel, arch, 0, "", dtype, gate, constants, _warps(4))


def small_matrix() -> list[CompileJob]:
    """List each kernel for each architecture, and every head size, dtype and feature somewhere: where it is hardest."""
    jobs: list[CompileJob] = []
    for arch in ARCHS:
        jobs.extend(attention_jobs(arch, 128, (32, 8), "bf16"))
    jobs.extend(
        [
            striped_job("sm_80", 96, (9, 3), "fp32", BAND.value, soft_cap=True),
            striped_job("sm_80", 192, (28, 7), "bf16", POSITIONS.value, soft_cap=True),
            paged_job("paged_attention_prefill", "sm_80", 256, (8, 2), "fp16", window=True, soft_cap=True),
            striped_job("sm_90", 80, (28, 7), "bf16", BAND.value, soft_cap=True, save=False),
            paged_job("paged_attention_decode", "sm_90", 256, (8, 2), "fp32", window=True, soft_cap=True),
            striped_job("sm_100", 192, (16, 16), "fp16", BAND.value),
            paged_job("paged_attention_prefill", "sm_100", 80, (9, 3), "fp32"),
            striped_job("gfx942", 256, (9, 3), "bf16", POSITIONS.value, soft_cap=True),
            paged_job("paged_attention_prefill", "gfx942", 64, (9, 3), "fp32", window=True, soft_cap=True),
        ]
    )
    for arch, head_dim, heads, dtype in (
        ("sm_80", 80, (9, 3), "fp32"),
        ("sm_90", 128, (32, 8), "bf16"),
        ("sm_100", 256, (8, 2), "fp16"),
        ("gfx942", 96, (28, 7), "bf16"),
    ):
        rest = [*merge_jobs(arch, head_dim, heads), *layer_jobs(arch, head_dim, heads, dtype), *gate_jobs(arch, dtype)]
        # Second forms of a kernel, no harder than the first: once a vendor will do.
        twins = arch in ("sm_90", "sm_100")
        jobs.extend(job for job in rest if not (twins and (job.kernel in _TWINS or job.features == "interleaved")))
    return jobs


def full_matrix(archs: tuple[str, ...]) -> list[CompileJob]:
    """List every kernel at every head size and dtype in every form: some 390 an architecture."""
    jobs: list[CompileJob] = []
    for arch in archs:
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                jobs.extend(attention_forms(arch, head_dim, dtype))
                jobs.extend(layer_jobs(arch, head_dim, (32, 8), dtype))
            jobs.extend(gate_jobs(arch, dtype))
        for head_dim in HEAD_DIMS:
            jobs.extend(merge_jobs(arch, head_dim, (32, 8)))
    return jobs


def attention_forms(arch: str, head_dim: int, dtype: str) -> Iterator[CompileJob]:
    """List the forms of the attention kernels.

    The ratio 9:3 has no power of two in it and so the dearest arithmetic; 32:8 and 32:32 come in plain forms alone.
    float16 has bfloat16's tiles and differs in the type of its instructions alone: its least and its most will do.
    """
    decode, prefill = "paged_attention_decode", "paged_attention_prefill"
    odd = (arch, head_dim, (9, 3), dtype)
    for soft_cap in (False, True):
        for mask in (DIAGONAL, BAND, POSITIONS):
            if dtype != "fp16" or soft_cap == (mask != DIAGONAL):
                yield striped_job(*odd, mask.value, soft_cap=soft_cap)
        for window in (False, True):
            if dtype != "fp16" or soft_cap == window:
                yield paged_job(decode, *odd, window=window, soft_cap=soft_cap)
                yield paged_job(prefill, *odd, window=window, soft_cap=soft_cap)
    if dtype != "fp16":
        yield striped_job(arch, head_dim, (32, 8), dtype, save=False)
        yield striped_job(arch, head_dim, (32, 32), dtype)
        yield paged_job(prefill, arch, head_dim, (32, 32), dtype)
        yield paged_job(decode, arch, head_dim, (32, 8), dtype)


def _state_constants(head_dim: int, heads: tuple[int, int]) -> dict[str, int]:
    return {
        "NUM_HEADS": heads[0],
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_R": triton_merge.BLOCK_R,
    }


def _warps(num_warps: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "enable_fp_fusion": True}
