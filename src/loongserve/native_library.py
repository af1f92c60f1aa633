"""Compile a folder of C++ for this machine, once, into a cache that processes share.

On first use the sources are compiled with the machine's C++ compiler ($CXX, else c++, g++ or clang++) into

    ($XDG_CACHE_HOME or ~/.cache)/loongserve/native/<name>-<hash of sources, flags and compiler>.so

under a file lock, so that of many processes one compiles and the rest wait. Nothing happens at import.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_COMPILE_SECONDS = 300


class NativeBuildError(RuntimeError):
    """Native code can't be compiled or loaded; the message says why."""


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
    """Name the folder of compiled libraries."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "loongserve" / "native"


def build_library(sources: Path, entry: str, name: str, flags: Sequence[str]) -> Path:
    """Compile one file of a folder into a shared library, unless that was done before, and answer its path.

    Args:
        sources: the folder; a change of any .cpp or .h file in it makes another library.
        entry: the file to compile; it includes the others.
        name: begins the library's file name.
        flags: of the compiler.

    Raises:
        NativeBuildError: no compiler, or it failed.
        OSError: the cache can't be written or belongs to somebody else.
    """
    compiler = find_compiler()
    digest = hashlib.sha256()
    for part in (*flags, *compiler, _run([*compiler, "--version"]), platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Code is loaded from here: nobody else may have put it there.
    if (status := folder.stat()).st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    library = folder / f"{name}-{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have compiled it while this one waited.
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                output = Path(scratch) / library.name
                _run([*compiler, *flags, str(sources / entry), "-o", str(output)])
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
