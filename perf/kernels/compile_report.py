"""Compile every Triton kernel in every form for every GPU architecture, and write what each takes to a page.

    python perf/kernels/compile_report.py [--out FILE] [--arch sm_90 ...] [--seconds N]

No GPU is needed; all cores are used. Answers are kept in build/kernels-report.jsonl by what was compiled, so that a run
that was stopped (``--seconds``) goes on where it was, and a change of one kernel compiles that kernel alone. The exit
status is 1 if any form spills, takes more shared memory than a program may have, does not fit a multiprocessor or lacks
matrix instructions; 2 if the time was up before the end, and then nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import triton

from loongserve.kernels.triton_jobs import ARCHS, KERNELS, CompileJob, full_matrix
from loongserve.kernels.triton_resources import TARGETS, Resources, compile_all, job_key

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels-report.md"
KEPT_ROWS = ROOT / "build" / "kernels-report.jsonl"

HEAD = """\
# What the Triton kernels take

Made by `make kernels-report` with Triton {version}: {count} forms of {kernels} kernels, compiled for {archs} without a
GPU, by `perf/kernels/compile_report.py`. {verdict}

- *registers* are a thread's; on gfx942 vector and accumulation registers together. *stack* is a thread's in bytes (on
  gfx942 the private segment), *local* the number of instructions on local memory in the disassembly: both are 0 unless
  registers spill.
- *shared* is the shared memory of a program in KiB, *tensor* its columns of tensor memory (sm_100 has 512).
- *tile* is query rows (a row is a token and query head of one KV head) by keys; *stages* the depth of the pipeline over
  the keys.
- *occupancy* is programs at once on a multiprocessor (gfx942: a compute unit), their warps of the most that it holds,
  and what allows no more. It is arithmetic, not a measurement: registers are handed out in eights from 512 a lane and
  scheduler, with four schedulers; shared memory in 128 bytes with 1 KiB a program for the system (gfx942: in 512
  bytes); `kernels/triton_occupancy.py` has the limits and where they are from.
- float32 attention multiplies by tf32x3 on NVIDIA: three products of tf32, which keep float32's accuracy.
"""

COLUMNS = (
    "head_dim",
    "heads",
    "dtype",
    "form",
    "tile",
    "warps",
    "stages",
    "registers",
    "stack",
    "local",
    "shared",
    "tensor",
    "matrix",
    "occupancy",
)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def cells(resources: Resources) -> tuple[object, ...]:
    """Format one form."""
    found = resources.occupancy
    return (
        resources.head_dim or "any",
        resources.heads or "any",
        resources.dtype,
        resources.features or "plain",
        resources.tile or "-",
        resources.num_warps,
        resources.num_stages or "-",
        resources.registers,
        resources.stack_bytes,
        resources.local_instructions,
        f"{resources.shared_bytes / 1024:.1f}",
        resources.tensor_columns,
        " ".join(resources.matrix_instructions) or "-",
        f"{found.programs} ({found.warps}/{found.max_warps}, {found.limited_by})",
    )


def spread(values: Iterable[float], digits: int = 0) -> str:
    """Format the smallest and the largest of some numbers."""
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def page(rows: list[Resources]) -> str:
    """Write the page: what is wrong, one line a kernel and architecture, then every form."""
    bad = [row for row in rows if row.faults]
    archs = list(dict.fromkeys(row.arch for row in rows))
    verdict = f"{len(bad)} of them have faults." if bad else "None spills, all fit, all matrix work is on matrix units."
    text = HEAD.format(
        version=triton.__version__,
        count=len(rows),
        kernels=len({row.kernel for row in rows}),
        archs=", ".join(archs),
        verdict=verdict,
    )
    if bad:
        text += "\n## Faults\n\n" + "".join(f"- {row.name}: {', '.join(row.faults)}\n" for row in bad)
    grouped = [(key, list(group)) for key, group in groupby(rows, key=lambda row: (row.kernel, row.arch))]
    text += "\n## In short\n\n" + table(
        ("kernel", "arch", "forms", "registers", "shared KiB", "warps at once", "matrix"),
        (
            (
                kernel,
                arch,
                len(group),
                spread(row.registers for row in group),
                spread((row.shared_bytes / 1024 for row in group), 1),
                spread(row.occupancy.warps for row in group),
                " ".join(sorted({name for row in group for name in row.matrix_instructions})) or "-",
            )
            for (kernel, arch), group in grouped
        ),
    )
    for (kernel, arch), group in grouped:
        text += f"\n## {kernel}, {arch}\n\n" + table(COLUMNS, map(cells, group))
    return text


def load(path: Path) -> dict[str, Resources]:
    """Read the answers of earlier runs by key."""
    if not path.exists():
        return {}
    kept = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # Empty, or cut off when a run was killed: that form is compiled again.
            continue
        row["resources"]["matrix_instructions"] = tuple(row["resources"]["matrix_instructions"])
        kept[row["key"]] = Resources(**row["resources"])
    return kept


def compile_rest(jobs: list[CompileJob], kept: dict[str, Resources], path: Path, deadline: float) -> None:
    """Compile what ``kept`` lacks, adding to it and to the file at ``path``, until the deadline (time.monotonic)."""
    missing = [job for job in jobs if job_key(job) not in kept]
    print(f"{len(jobs)} forms, {len(missing)} to compile", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with path.open("a") as file, closing(compile_all(missing, os.cpu_count() or 1)) as answers:
        for done, (job, resources) in enumerate(answers, start=1):
            kept[job_key(job)] = resources
            # The line break comes first, to end a line that was cut off.
            file.write("\n" + json.dumps({"key": job_key(job), "resources": asdict(resources)}))
            file.flush()
            if resources.faults:
                print(f"FAULT {resources.name}: {', '.join(resources.faults)}", flush=True)
            now = time.monotonic()
            if done % 50 == 0:
                print(f"{done} of {len(missing)}, {(now - begin) / done:.2f} s each", flush=True)
            if now > deadline:
                return


def main() -> int:
    """Compile, write, and answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--arch", nargs="+", choices=TARGETS, default=ARCHS, help="architectures")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, to go on later")
    arguments = parser.parse_args()
    if tuple(arguments.arch) != ARCHS and arguments.out == PAGE:
        parser.error(f"{PAGE.name} shows {', '.join(ARCHS)}: with --arch, name another page by --out")
    jobs = full_matrix(tuple(arguments.arch))
    kept = load(KEPT_ROWS)
    compile_rest(jobs, kept, KEPT_ROWS, time.monotonic() + arguments.seconds)
    keys = [job_key(job) for job in jobs]
    lacking = sum(key not in kept for key in keys)
    if lacking:
        print(f"the time is up with {lacking} forms to go: call again")
        return 2
    order = list(KERNELS)
    rows = sorted((kept[key] for key in keys), key=lambda row: order.index(row.kernel))
    arguments.out.write_text(page(rows))
    bad = sum(bool(row.faults) for row in rows)
    print(f"{len(rows)} forms compiled, {bad} with faults: {arguments.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
