"""Compile a merge of states with fewer registers than it needs, for each vendor: one JSON object a line.

``test_compile`` runs this in a process of its own, to see that its checks can fail.
"""

import json
from dataclasses import asdict, replace

from loongserve.kernels.triton_jobs import merge_jobs
from loongserve.kernels.triton_resources import compile_job


def main() -> None:
    """Compile and print."""
    for arch in ("sm_90", "gfx942"):
        job = next(job for job in merge_jobs(arch, 128, (32, 8)) if job.kernel == "merge_many")
        # NVIDIA's compiler takes a limit, AMD's so many waves on a scheduler that they leave 64 registers.
        limit = {"waves_per_eu": 8} if arch == "gfx942" else {"maxnreg": 64}
        tight = replace(job, constants={**job.constants, "BLOCK_R": 64}, options={**job.options, **limit})
        print(json.dumps(asdict(compile_job(tight))), flush=True)


if __name__ == "__main__":
    main()
