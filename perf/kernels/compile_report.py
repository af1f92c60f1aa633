"""Print what each Triton kernel takes from each GPU architecture, as a Markdown table. No GPU is needed.

    python perf/kernels/compile_report.py [--matrix small|full] [--json FILE]

A row that spills, or takes more shared memory than a program may have, ends with "!", and the exit status is 1. The
full matrix takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from loongserve.kernels.triton_resources import Resources, compile_job, full_matrix, small_matrix

HEADER = ("kernel", "arch", "heads", "head", "dtype", "warps", "registers", "stack B", "local", "shared KiB", "matrix")


def table_row(resources: Resources) -> str:
    """Format one row."""
    cells = (
        resources.kernel,
        resources.arch,
        resources.heads,
        resources.head_dim,
        resources.dtype,
        resources.num_warps,
        resources.registers,
        resources.stack_bytes,
        resources.local_instructions,
        f"{resources.shared_bytes / 1024:.1f}",
        " ".join(resources.matrix_instructions) or "-",
    )
    return f"| {' | '.join(map(str, cells))} |" + ("" if resources.fits else " !")


def report(all_resources: Iterable[Resources]) -> list[Resources]:
    """Print rows as they come; answer them."""
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    rows = []
    for resources in all_resources:
        print(table_row(resources), flush=True)
        rows.append(resources)
    return rows


def main() -> int:
    """Compile, print, and answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", choices=("small", "full"), default="small")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    jobs = small_matrix() if arguments.matrix == "small" else full_matrix()
    rows = report(map(compile_job, jobs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    bad = [row for row in rows if not row.fits]
    print(f"{len(rows)} kernels compiled, {len(bad)} of them do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
