"""The kept report: it fails on what must not be, and goes on where it was stopped."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loongserve.kernels.triton_jobs import striped_job
from loongserve.kernels.triton_resources import Resources

JOBS = [striped_job("sm_90", head_dim, (9, 3), "bf16") for head_dim in (64, 128)]


def resources_of(job):
    """Make what a sound compile of the job might take."""
    return Resources(
        kernel=job.kernel,
        arch=job.arch,
        head_dim=job.head_dim,
        heads=job.heads,
        dtype=job.dtype,
        features=job.features,
        tile="128x64",
        num_warps=8,
        num_stages=3,
        registers=204,
        stack_bytes=0,
        local_instructions=0,
        shared_bytes=131072,
        tensor_columns=0,
        matrix_instructions=("wgmma",),
    )


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Load the script; ``compiled`` has answers by head_dim that are not sound, ``asked`` what was to be compiled."""
    path = Path(__file__).resolve().parents[2] / "perf" / "kernels" / "compile_report.py"
    spec = importlib.util.spec_from_file_location("compile_report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.compiled, module.asked = {}, []

    def compile_all(jobs, workers):
        module.asked.append([job.head_dim for job in jobs])
        for job in jobs:
            yield job, module.compiled.get(job.head_dim, resources_of(job))

    monkeypatch.setattr(module, "compile_all", compile_all)
    monkeypatch.setattr(module, "full_matrix", lambda archs: JOBS)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "KEPT_ROWS", tmp_path / "build" / "rows.jsonl")
    monkeypatch.setattr(sys, "argv", ["compile_report.py"])
    return module


def test_writes_a_row_a_form(report):
    assert report.main() == 0
    text = report.PAGE.read_text()
    assert "2 forms of 1 kernels" in text
    assert "## Faults" not in text
    row = (
        "| 128 | 9:3 | bf16 | diagonal save | 128x64 | 8 | 3 | 204 | 0 | 0 | 128.0 | 0 | wgmma | 1 (8/64, registers) |"
    )
    assert row in text


@pytest.mark.parametrize(
    "changes",
    [{"stack_bytes": 8}, {"local_instructions": 1}, {"shared_bytes": 1 << 20}, {"matrix_instructions": ("mma.sync",)}],
    ids=lambda changes: next(iter(changes)),
)
def test_fails_on_a_fault(changes, report):
    """Also when the answer is kept from an earlier run."""
    report.compiled[128] = replace(resources_of(JOBS[1]), **changes)
    for _ in range(2):
        assert report.main() == 1
        faults = report.PAGE.read_text().split("## Faults")[1].split("##")[0]
        assert "striped_attention sm_90 128" in faults
        assert "striped_attention sm_90 64" not in faults
    assert report.asked == [[64, 128], []]


def test_goes_on_where_it_was_stopped(report, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compile_report.py", "--seconds", "0"])
    assert report.main() == 2
    assert not report.PAGE.exists()
    with report.KEPT_ROWS.open("a") as file:
        file.write('\n{"key": "cut off')
    monkeypatch.setattr(sys, "argv", ["compile_report.py"])
    assert report.main() == 0
    assert report.main() == 0
    assert report.asked == [[64, 128], [128], []]


def test_refuses_to_overwrite_the_page_with_a_part(report, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile_report.py", "--arch", "sm_90"])
    with pytest.raises(SystemExit):
        report.main()
    assert "name another page by --out" in capsys.readouterr().err
