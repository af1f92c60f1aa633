"""What each Triton kernel takes from a GPU, found by compiling it without one.

    python -m loongserve.kernels.triton_resources [--matrix small|full]

compiles kernels for NVIDIA and AMD targets and prints one JSON object a line: registers, stack, spills, shared memory
and the matrix instructions used. The process must not have ``TRITON_INTERPRET`` set. The tests assert on the small
matrix; ``perf/kernels/compile_report.py`` prints either as a table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loongserve.kernels import triton_elementwise, triton_merge, triton_paged, triton_striped
from loongserve.kernels.triton_striped import BAND, DIAGONAL, POSITIONS
from loongserve.kernels.triton_tuning import MAX_SHARED_BYTES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma")
_TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Arguments that do not have the type of the model's tensors.
_POINTERS = {
    "out": "*fp32",
    "lse": "*fp32",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "state_out": "*fp32",
    "a_out": "*fp32",
    "a_lse": "*fp32",
    "b_out": "*fp32",
    "b_lse": "*fp32",
    **{f"{name}{index}": "*fp32" for name in ("out", "lse") for index in range(triton_merge.MERGED_AT_ONCE)},
    "cos": "*fp32",
    "sin": "*fp32",
    "items": "*i64",
    "merges": "*i64",
    "slots": "*i64",
    "rows": "*i64",
    "positions": "*i64",
    "query_positions": "*i64",
    "key_positions": "*i64",
    "first_visible": "*i64",
}
_SCALARS = {"scale_log2": "fp32", "cap_factor": "fp32", "eps": "fp32"}


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one target in one configuration.

    Attributes:
        kernel: its name in reports: the stem of the public function, with ``_decode`` or ``_prefill``.
        arch: a key of ``TARGETS``.
        head_dim: of attention; 0 where it does not apply.
        heads: query and KV heads, e.g. "32:8"; empty where they do not apply.
        dtype: of the model's tensors.
        function: the jitted kernel.
        constants: its compile-time constants.
        options: launch options.
        typed: names of pointers that have the model's type although ``_POINTERS`` says otherwise.
    """

    kernel: str
    arch: str
    head_dim: int
    heads: str
    dtype: torch.dtype
    function: Any = field(repr=False)
    constants: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    typed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: registers, stack bytes a thread, instructions on local memory, shared memory."""

    kernel: str
    arch: str
    head_dim: int
    heads: str
    dtype: str
    num_warps: int
    registers: int
    stack_bytes: int
    local_instructions: int
    shared_bytes: int
    shared_limit_bytes: int
    matrix_instructions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing spills and the shared memory is within the limit."""
        return not self.stack_bytes and not self.local_instructions and self.shared_bytes <= self.shared_limit_bytes


def attention_jobs(
    arch: str, head_dim: int, heads: tuple[int, int], dtype: torch.dtype, mask: Any = DIAGONAL, soft_cap: bool = False
) -> Iterator[CompileJob]:
    """List the attention kernels of a model's shape; ``mask`` is DIAGONAL, or has a window."""
    tile, constants = triton_striped.striped_constants(arch, *heads, head_dim, dtype, mask)
    features = {"SOFT_CAP": soft_cap}
    options = tile.launch_options()
    shape = (arch, head_dim, f"{heads[0]}:{heads[1]}", dtype)
    kernel = triton_striped._striped_attention_kernel
    yield CompileJob("striped_attention", *shape, kernel, {**constants, **features, "SAVE": True}, options)
    if mask == POSITIONS:
        # Paged attention has a window or none.
        return
    for name, table in (("decode", triton_paged.DECODE_TILES), ("prefill", triton_paged.PREFILL_TILES)):
        tile, constants = triton_paged.paged_constants(table, arch, *heads, head_dim, dtype)
        kernel = triton_paged._paged_attention_kernel
        features = {"WINDOW": mask != DIAGONAL, "SOFT_CAP": soft_cap}
        yield CompileJob(f"paged_attention_{name}", *shape, kernel, {**constants, **features}, tile.launch_options())


def other_jobs(arch: str, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> Iterator[CompileJob]:
    """List the kernels bound by memory, for a model's shape."""
    block_d = triton.next_power_of_2(head_dim)
    shape = (arch, head_dim, f"{heads[0]}:{heads[1]}", dtype)
    partials = triton_paged._merge_partials_kernel
    yield CompileJob("merge_partials", *shape, partials, triton_paged.merge_constants(heads[0], head_dim), _warps(1))
    state = {
        "NUM_HEADS": heads[0],
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_R": triton_merge.BLOCK_R,
    }
    for name, has_rows in (("merge_states", False), ("merge_rows", True)):
        merge = triton_merge._merge_states_kernel
        yield CompileJob(name, *shape, merge, {**state, "HAS_ROWS": has_rows}, _warps(triton_merge.NUM_WARPS))
    many = {"COUNT": triton_merge.MERGED_AT_ONCE, **state}
    many_kernel = triton_merge._merge_many_kernel
    yield CompileJob("merge_many", *shape, many_kernel, many, _warps(triton_merge.NUM_WARPS))
    final = triton_merge._finalize_kernel
    yield CompileJob("finalize", *shape, final, state, _warps(triton_merge.NUM_WARPS), typed=("out",))
    save = {
        "NUM_KV_HEADS": heads[1],
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_N": triton_elementwise.SAVE_BLOCK,
    }
    yield CompileJob("save_kv", *shape, triton_elementwise._save_kv_kernel, save, _warps(4))
    yield CompileJob("gather_kv", *shape, triton_elementwise._gather_kv_kernel, save, _warps(4))
    rope = {
        "NUM_HEADS": heads[0],
        "HALF": head_dim // 2,
        "INTERLEAVED": False,
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
        "BLOCK_H": triton_elementwise.ROPE_HEADS,
    }
    yield CompileJob("apply_rope", *shape, triton_elementwise._apply_rope_kernel, rope, _warps(2))
    norm = triton_elementwise.rms_norm_constants(heads[0] * head_dim)
    norm_options = _warps(triton_elementwise.rms_norm_warps(norm["BLOCK"]))
    norm_kernel = triton_elementwise._rms_norm_kernel
    yield CompileJob(
        "rms_norm", *shape, norm_kernel, {**norm, "HAS_RESIDUAL": True}, norm_options, typed=("out", "residual")
    )
    gate_kernel = triton_elementwise._gate_and_mul_kernel
    for name, gate in (("silu_and_mul", "silu"), ("gelu_and_mul", "gelu_erf"), ("gelu_and_mul", "gelu_tanh")):
        gate_constants = {"GATE": gate, "BLOCK": triton_elementwise.SILU_BLOCK}
        yield CompileJob(name, *shape, gate_kernel, gate_constants, _warps(4), typed=("out",))


def small_matrix() -> Iterator[CompileJob]:
    """List about forty jobs: each kernel on each of four targets, each special head size and dtype somewhere."""
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942"):
        yield from attention_jobs(arch, 128, (32, 8), torch.bfloat16)
    for arch, head_dim, heads, dtype in (
        ("sm_80", 64, (9, 3), torch.float32),
        ("sm_80", 256, (8, 2), torch.bfloat16),
        ("sm_90", 80, (28, 7), torch.bfloat16),
        ("sm_100", 192, (16, 16), torch.float16),
        ("sm_90", 256, (8, 2), torch.float32),
        ("gfx942", 96, (32, 32), torch.float16),
    ):
        yield from attention_jobs(arch, head_dim, heads, dtype)
    for arch, head_dim, heads, dtype, mask in (
        ("sm_80", 128, (32, 8), torch.bfloat16, BAND),
        ("sm_90", 128, (32, 8), torch.bfloat16, POSITIONS),
        ("gfx942", 64, (9, 3), torch.float32, BAND),
    ):
        yield from attention_jobs(arch, head_dim, heads, dtype, mask, soft_cap=True)
    for arch in ("sm_80", "sm_90", "gfx942"):
        yield from other_jobs(arch, 128, (32, 8), torch.bfloat16)


def full_matrix() -> Iterator[CompileJob]:
    """List every row of the tuning tables at every head size that uses it: some hundreds."""
    for arch in TARGETS:
        for dtype in (torch.bfloat16, torch.float32):
            for head_dim, heads in (
                (64, (9, 3)),
                (80, (32, 32)),
                (96, (32, 32)),
                (128, (28, 7)),
                (192, (16, 4)),
                (256, (8, 2)),
            ):
                for mask in (DIAGONAL, BAND, POSITIONS):
                    for soft_cap in (False, True):
                        yield from attention_jobs(arch, head_dim, heads, dtype, mask, soft_cap)
        for head_dim, heads in ((80, (32, 32)), (128, (32, 8))):
            yield from other_jobs(arch, head_dim, heads, torch.bfloat16)


def compile_job(job: CompileJob) -> Resources:
    """Compile one job and read its resources from the binary.

    Raises:
        RuntimeError: Triton is in interpreter mode, in which nothing is compiled.
    """
    if not isinstance(job.function, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled in interpreter mode: unset TRITON_INTERPRET before the start")
    model_type = _TYPE_NAMES[job.dtype]
    signature = {}
    attributes = {}
    for index, name in enumerate(job.function.arg_names):
        if name in job.constants:
            signature[name] = "constexpr"
            continue
        if name in _SCALARS:
            signature[name] = _SCALARS[name]
        elif name.startswith(("stride_", "num_", "total_")):
            signature[name] = "i32"
        else:
            signature[name] = f"*{model_type}" if name in job.typed else _POINTERS.get(name, f"*{model_type}")
        if name.startswith("stride_") or signature[name].startswith("*"):
            # As a launch finds it for tensors of torch, whose rows are whole 16 bytes.
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(job.function, signature=signature, constexprs=job.constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[job.arch], options=job.options)
    if TARGETS[job.arch].backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)
        stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
        local = len(re.findall(r"\b(?:scratch|buffer)_(?:load|store)_\w+[^\n]*offen[^\n]*scratch", assembly))
        text = assembly
    else:
        registers, stack, local = _inspect_cubin(compiled.asm["cubin"])
        text = compiled.asm["ptx"]
    return Resources(
        kernel=job.kernel,
        arch=job.arch,
        head_dim=job.head_dim,
        heads=job.heads,
        dtype=model_type,
        num_warps=job.options["num_warps"],
        registers=registers,
        stack_bytes=stack,
        local_instructions=local,
        shared_bytes=int(compiled.metadata.shared),
        shared_limit_bytes=MAX_SHARED_BYTES[job.arch],
        matrix_instructions=tuple(name for name in MATRIX_INSTRUCTIONS if name in text),
    )


def _warps(num_warps: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{pattern} is not in the compiled kernel: the format of this Triton's output is unknown")
    return int(found.group(1))


def _inspect_cubin(cubin: bytes) -> tuple[int, int, int]:
    """Answer (registers, bytes of stack, local memory instructions) of a cubin, by the tools that Triton ships."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", path)
        # `LOCAL` of the usage stays 0 beside real spills: only STACK and the instructions tell.
        disassembly = _output(tools / "nvdisasm", "-c", path)
    local = len(re.findall(r"\b(?:LDL|STL)\b", disassembly))
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), local


def _output(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the resources of a matrix of jobs, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--matrix", choices=("small", "full"), default="small")
    arguments = parser.parse_args()
    for job in small_matrix() if arguments.matrix == "small" else full_matrix():
        print(json.dumps(asdict(compile_job(job))), flush=True)


if __name__ == "__main__":
    main()
