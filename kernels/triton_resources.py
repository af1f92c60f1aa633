"""What each Triton kernel takes from a GPU, found by compiling it without one.

    python -m loongserve.kernels.triton_resources

compiles the small matrix of ``triton_jobs`` for NVIDIA and AMD and prints one JSON object a line: registers, stack,
spills, shared memory and the matrix instructions used. The process must not have ``TRITON_INTERPRET`` set. The tests
assert on it; ``perf/kernels/compile_report.py`` makes the kept table of the full matrix.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loongserve.kernels import triton_tile
from loongserve.kernels.triton_jobs import KERNELS, CompileJob, small_matrix
from loongserve.kernels.triton_merge import MERGED_AT_ONCE
from loongserve.kernels.triton_occupancy import ARCH_LIMITS, Occupancy, occupancy

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "v_mfma")
# The newest matrix instruction of an architecture. A tile of 16 rows, as decode has it, is too small for the newest.
_NEWEST = {"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}

# Arguments that do not have the type of the model's tensors.
_POINTERS = {
    **dict.fromkeys(("out", "lse", "partial_out", "partial_lse", "state_out"), "*fp32"),
    **dict.fromkeys(("a_out", "a_lse", "b_out", "b_lse", "cos", "sin"), "*fp32"),
    **{f"{name}{index}": "*fp32" for name in ("out", "lse") for index in range(MERGED_AT_ONCE)},
    **dict.fromkeys(("items", "merges", "slots", "rows", "first_visible"), "*i64"),
    **dict.fromkeys(("positions", "query_positions", "key_positions"), "*i64"),
}
# Kernels whose ``out`` is the model's tensor, not a state's.
_MODEL_OUT = ("finalize", "rms_norm", "silu_and_mul", "gelu_and_mul")
_SCALARS = {"scale_log2": "fp32", "cap_factor": "fp32", "eps": "fp32"}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        kernel: as the job's, and so ``arch``, ``head_dim``, ``heads``, ``dtype`` and ``features``.
        tile: query rows and keys of a tile, e.g. "128x64"; empty where there is none.
        num_warps: warps (AMD: waves) a program.
        num_stages: depth of the software pipeline; 0 where the kernel leaves it to Triton.
        registers: a thread; on AMD vector and accumulation registers together.
        stack_bytes: a thread; on AMD the private segment.
        local_instructions: instructions that load or store local memory, which is where spilled registers go.
        shared_bytes: a program.
        tensor_columns: of tensor memory a program.
        matrix_instructions: those of ``MATRIX_INSTRUCTIONS`` that the kernel has.
    """

    kernel: str
    arch: str
    head_dim: int
    heads: str
    dtype: str
    features: str
    tile: str
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    local_instructions: int
    shared_bytes: int
    tensor_columns: int
    matrix_instructions: tuple[str, ...]

    @property
    def name(self) -> str:
        """What was compiled, in words."""
        parts = (self.kernel, self.arch, str(self.head_dim), self.heads, self.dtype, self.features)
        return " ".join(part for part in parts if part)

    @property
    def occupancy(self) -> Occupancy:
        """How many programs run at once on a multiprocessor."""
        return occupancy(self.arch, self.num_warps, self.registers, self.shared_bytes, self.tensor_columns)

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be: spills, shared memory over the limit, not one program at once, no matrix instruction."""
        limit = ARCH_LIMITS[self.arch].max_shared_bytes
        wanted = wanted_matrix_instructions(self.kernel, self.arch, self.dtype)
        checks = {
            f"a stack of {self.stack_bytes} bytes": self.stack_bytes > 0,
            f"{self.local_instructions} instructions on local memory": self.local_instructions > 0,
            f"{self.shared_bytes} bytes of shared memory, {limit} allowed": self.shared_bytes > limit,
            "not one program fits a multiprocessor": self.occupancy.programs == 0,
            f"no {' or '.join(wanted)}": bool(wanted) and not set(wanted) & set(self.matrix_instructions),
        }
        return tuple(fault for fault, found in checks.items() if found)


def wanted_matrix_instructions(kernel: str, arch: str, dtype: str) -> tuple[str, ...]:
    """Name the matrix instructions of which a kernel must have one; none for a kernel without matrix products."""
    if kernel not in ("striped_attention", "paged_attention_decode", "paged_attention_prefill"):
        return ()
    if arch.startswith("gfx"):
        return ("v_mfma",)
    if dtype == "fp32":
        # tf32x3: its tiles may be too small for the newest.
        return ("mma.sync", "wgmma", "tcgen05.mma")
    return ("mma.sync",) if kernel == "paged_attention_decode" else (_NEWEST[arch],)


def job_key(job: CompileJob) -> str:
    """Name everything that the answer depends on: the same key, the same ``Resources``."""
    # Not Triton's own key, which has the line number in it: an edit of a tuning table would compile everything again.
    values = [*vars(sys.modules[KERNELS[job.kernel].__module__]).values(), *vars(triton_tile).values()]
    sources = [value.src for value in values if isinstance(value, triton.JITFunction)]
    globals_read = [str(value) for value in values if isinstance(value, tl.constexpr)]
    parts = [triton.__version__, sources, globals_read, argument_types(job), job.constants, job.options]
    # Fields that are shown alone tell apart jobs that compile to the same code.
    shown = (job.kernel, job.arch, job.head_dim, job.heads, job.dtype, job.features, list(Resources.__slots__))
    return hashlib.sha256(json.dumps([*parts, *shown], sort_keys=True).encode()).hexdigest()[:24]


def compile_job(job: CompileJob) -> Resources:
    """Compile one job and read its resources from the binary.

    Raises:
        RuntimeError: Triton is in interpreter mode, in which nothing is compiled, or it cannot compile the job.
    """
    function = KERNELS[job.kernel]
    if not isinstance(function, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled in interpreter mode: unset TRITON_INTERPRET before the start")
    signature = argument_types(job)
    # As a launch finds it for tensors of torch, whose rows are whole 16 bytes.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if name.startswith("stride_") or kind.startswith("*")
    }
    source = ASTSource(function, signature=signature, constexprs=job.constants, attrs=attributes)
    try:
        compiled = triton.compile(source, target=TARGETS[job.arch], options=job.options)
    except Exception as error:
        raise RuntimeError(f"Triton cannot compile {job}: {error}") from error
    if TARGETS[job.arch].backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", text)
        stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
        local = len(re.findall(r"\bscratch_(?:load|store)_", text))
    else:
        text = compiled.asm["ptx"]
        registers, stack, local = _inspect_cubin(compiled.asm["cubin"])
    constants = job.constants
    return Resources(
        kernel=job.kernel,
        arch=job.arch,
        head_dim=job.head_dim,
        heads=job.heads,
        dtype=job.dtype,
        features=job.features,
        tile=f"{constants['BLOCK_M']}x{constants['BLOCK_N']}" if "BLOCK_M" in constants else "",
        num_warps=job.options["num_warps"],
        num_stages=job.options.get("num_stages", 0),
        registers=registers,
        stack_bytes=stack,
        local_instructions=local,
        shared_bytes=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        matrix_instructions=tuple(name for name in MATRIX_INSTRUCTIONS if name in text),
    )


def compile_all(jobs: Sequence[CompileJob], workers: int) -> Iterator[tuple[CompileJob, Resources]]:
    """Compile jobs in ``workers`` processes; answers come as they are ready.

    Raises:
        RuntimeError: as ``compile_job``.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_the_parent) as pool:
        futures = {pool.submit(compile_job, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """End this worker when its parent is killed, which no one else would tell it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("not a worker process")

    def watch(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


def argument_types(job: CompileJob) -> dict[str, str]:
    """Name the type of each argument of a job's kernel, as Triton writes them."""
    types = {}
    for name in KERNELS[job.kernel].arg_names:
        if name in job.constants:
            types[name] = "constexpr"
        elif name in _SCALARS:
            types[name] = _SCALARS[name]
        elif name.startswith(("stride_", "num_", "total_")):
            types[name] = "i32"
        elif name == "rows" and not job.constants["HAS_ROWS"]:
            # Something must stand there; nothing looks at it.
            types[name] = "*fp32"
        elif name == "out" and job.kernel in _MODEL_OUT:
            types[name] = f"*{job.dtype}"
        else:
            types[name] = _POINTERS.get(name, f"*{job.dtype}")
    return types


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
        disassembly = _output(tools / "nvdisasm", "--print-code", "--no-dataflow", path)
    local = len(re.findall(r"\b(?:LDL|STL)\b", disassembly))
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), local


def _output(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the resources of the small matrix, one JSON object a line."""
    for _, resources in compile_all(small_matrix(), workers=min(2, os.cpu_count() or 1)):
        print(json.dumps(asdict(resources)), flush=True)


if __name__ == "__main__":
    main()
