"""One child process: runs cases and writes a line of JSON for each thing that happens.

    {"info": {...}}                              once: device and versions
    {"begin": 3}                                 a case by its number,
    {"case": 3, "result": {...}}                 its results as they come,
    {"end": 3, "seconds": 1.2}                   and its end

A case that raises has a failed result. If the device no longer answers after it, the process ends with ``DEVICE_LOST``,
and the parent has the rest run by another.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import torch

from device.bench import Bench, NotRun
from device.cases import Case, all_cases
from device.results import Missing, Result, to_plain

DEVICE_LOST = 3


def work(numbers: Sequence[int], tiny: bool, deadline: float) -> int:
    """Run cases by number, the speed ones only until ``deadline`` (of ``time.time``). Returns: the exit status."""
    # The lines go to standard output alone; whatever libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Containers may have it on; float32 products are compared with float64 here.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device()))
    _write(out, {"info": describe(bench)})
    cases = all_cases(tiny)
    for number in numbers:
        case = cases[number]
        begin = time.monotonic()
        _write(out, {"begin": number})
        for result in _results(case, bench, deadline):
            _write(out, {"case": number, "result": to_plain(result)})
        lost = not _recover(bench)
        _write(out, {"end": number, "seconds": round(time.monotonic() - begin, 3)})
        if lost:
            return DEVICE_LOST
    return 0


def _results(case: Case, bench: Bench, deadline: float) -> list[Result]:
    if case.is_speed and time.time() > deadline:
        return [Missing(case.name, "skipped", "the time was up: raise --minutes")]
    results: list[Result] = []
    try:
        results.extend(case.run(bench))
        bench.synchronize()
        if not results:
            raise RuntimeError("the case ended without a result")
    except NotRun as reason:
        results.append(Missing(case.name, "not run", str(reason)))
    # A case is guarded against anything that it may meet: what it was is the result.
    except Exception as error:
        results.append(Missing(case.name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"))
    return results


def _recover(bench: Bench) -> bool:
    """Give back memory and say whether the device still answers."""
    gc.collect()
    if bench.tiny:
        return True
    try:
        bench.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        print(f"the device is lost to this process: {error}", file=sys.stderr)
        return False
    return True


def _write(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def describe(bench: Bench) -> dict[str, Any]:
    """Answer what the results depend on: device, driver and versions."""
    import triton

    info: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if bench.tiny:
        return {"device": "Triton's interpreter on a CPU"} | info
    properties = torch.cuda.get_device_properties(bench.device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(bench.device.index or 0),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    } | info


def _driver(index: int) -> str:
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip()
