"""Check every kernel, and elastic instances, on this machine's GPU; measure their speed; write one JSON file.

    python perf/device_check.py [--out FILE] [--minutes 8]     on a machine with a CUDA or ROCm device; one is enough
    python perf/device_check.py --interpret                    the same code on a CPU: tiny shapes, Triton's interpreter

Results are compared with float64, and several instances that share the device with transformers (where the extra
``serve`` is installed). Speed stands beside torch's SDPA, FlexAttention and flash-attn (where installed), and beside a
copy and a matrix product of the same run. Cases run in child processes: a kernel that kills its process costs that case
alone. The file is written anew after each case; ``perf/device/README.md`` says how to read it.

Exit status: 0 if every result is right, 1 if one is wrong or a case failed, 2 if there is no device. A goal that is not
met changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From a bare checkout too; in Python's safe mode the script's own folder is not there either.
sys.path[:0] = [str(ROOT / "perf"), str(ROOT / "src")]


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="the same code on a CPU, tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"), help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=8.0, help="no speed case begins later than this")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="processes that check at once (compiling is what takes time); 1 where the device lets one process in",
    )
    parser.add_argument("--case-seconds", type=float, default=240.0, help="a case that takes longer has failed")
    parser.add_argument("--only", default="", help="only cases whose section or name has this in it")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        from device.worker import work

        return work([int(n) for n in options.child.split(",")], options.interpret, options.deadline)
    import torch

    from device.parent import check_device

    if not options.interpret and not torch.cuda.is_available():
        print(
            "device_check needs a CUDA or ROCm device, and torch sees none: run it on a machine with a GPU, its driver "
            "and a torch built for it (`python -c 'import torch; print(torch.version.cuda)'` says which this is), or "
            "check the script itself on a CPU with --interpret",
            file=sys.stderr,
        )
        return 2
    return check_device(
        Path(__file__).resolve(),
        tiny=options.interpret,
        out=options.out,
        deadline=time.time() + 60 * options.minutes,
        jobs=options.jobs,
        case_seconds=options.case_seconds,
        only=options.only,
    )


if __name__ == "__main__":
    sys.exit(main())
