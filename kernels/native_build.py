"""Compile the C++ kernels of ``native/`` for this machine, once, into a cache that processes share.

On first use the sources are compiled with the machine's C++ compiler ($CXX, else c++, g++ or clang++) for the best
instruction set that this CPU has, into

    ($XDG_CACHE_HOME or ~/.cache)/loongserve/native/<hash of sources, flags, compiler and instruction set>.so

under a file lock, so that of many processes one compiles and the rest wait. Without a compiler, or if it fails, there
is one warning and the torch kernels serve instead. ``LOONG_CPU_NATIVE=0`` asks for those; ``LOONG_CPU_ISA`` names an
instruction set. Nothing happens at import.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_logger = logging.getLogger(__name__)

SWITCH = "LOONG_CPU_NATIVE"
ISA_VARIABLE = "LOONG_CPU_ISA"
_SOURCES = Path(__file__).parent / "native"
_COMPILE_SECONDS = 300
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
# Instruction set -> (what /proc/cpuinfo must list, compiler flags), best first.
_AVX2 = (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"))
_AVX512 = (
    (*_AVX2[0], "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    (*_AVX2[1], "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
)
_INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512_bf16": ((*_AVX512[0], "avx512_bf16"), (*_AVX512[1], "-mavx512bf16")),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": ((), ()),
    # The arithmetic of avx512_bf16 in other instructions, so that it can be tested anywhere.
    "portable_bf16": ((), ("-DLOONG_BFLOAT16_PAIRS",)),
}
# As ``native/interface.h`` declares it; the other functions are given ctypes' own types.
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SMALL_LINEAR = (_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, *(_INT,) * 6)
# Chosen by themselves. The AVX-512 sets were compiled but have not run on any machine yet: ask for them by name.
_PROVEN = ("avx2", "portable")


class NativeBuildError(RuntimeError):
    """The native kernels can't be compiled or loaded; the message says why."""


def load_native() -> ctypes.CDLL | None:
    """Load the native kernels, compiling them if need be; None where torch's must serve, after one warning.

    Raises:
        ValueError: ``LOONG_CPU_NATIVE`` or ``LOONG_CPU_ISA`` holds something else than is known.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {switch!r}")
    return None if switch == "0" else _load(os.environ.get(ISA_VARIABLE, ""))


def choose_instruction_set() -> str:
    """Name the instruction set to compile for: ``LOONG_CPU_ISA``, else the best proven one that this CPU has.

    Raises:
        ValueError: unknown name, or one that this CPU can't run.
    """
    present = _cpu_flags()
    runnable = [name for name, (needed, _) in _INSTRUCTION_SETS.items() if set(needed) <= present]
    asked = os.environ.get(ISA_VARIABLE, "")
    if not asked:
        return next(name for name in runnable if name in _PROVEN)
    if asked not in runnable:
        raise ValueError(f"{ISA_VARIABLE} must be one of {', '.join(runnable)} on this CPU, got {asked!r}")
    return asked


@cache
def _load(asked: str) -> ctypes.CDLL | None:
    """Load what ``LOONG_CPU_ISA`` = ``asked`` asks for; decode calls this thousands of times a second."""
    instruction_set = choose_instruction_set()
    try:
        library = ctypes.CDLL(str(build(instruction_set)))
        library.loong_small_linear.argtypes = _SMALL_LINEAR
        return library
    except (NativeBuildError, OSError) as error:
        _logger.warning("no native CPU kernels, torch's serve instead: %s", error)
        return None


@cache
def _cpu_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def find_compiler() -> list[str]:
    """Answer the command of the C++ compiler: $CXX, else the first there is of c++, g++ and clang++.

    Raises:
        NativeBuildError: there is none.
    """
    if command := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(command[0]) is None:
            raise NativeBuildError(f"the C++ compiler of CXX is not there: {command[0]!r}")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise NativeBuildError("no C++ compiler: install g++ or clang++, or name one in CXX")


def cache_folder() -> Path:
    """Name the folder of compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "loongserve" / "native"


def build(instruction_set: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile for an instruction set, unless that was done before, and answer the library's path.

    Args:
        instruction_set: a name as ``LOONG_CPU_ISA`` takes; it need not be one that this CPU can run.
        extra_flags: more flags for the compiler.

    Raises:
        NativeBuildError: no compiler, or it failed.
        OSError: the cache can't be written or belongs to somebody else.
    """
    flags = (*_FLAGS, *_INSTRUCTION_SETS[instruction_set][1], *extra_flags)
    compiler = find_compiler()
    sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for part in (*flags, *compiler, _run([*compiler, "--version"]), platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Code is loaded from here: nobody else may have put it there.
    if (status := folder.stat()).st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    library = folder / f"{instruction_set}-{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have compiled it while this one waited.
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                output = Path(scratch) / library.name
                _run([*compiler, *flags, str(_SOURCES / "native.cpp"), "-o", str(output)])
                output.chmod(0o700)
                output.replace(library)
    return library


def _run(command: list[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{shlex.join(command)}: {error}") from error
    if process.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} failed:\n{process.stderr[-2000:]}")
    return process.stdout
