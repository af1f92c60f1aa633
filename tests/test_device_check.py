"""perf/device_check.py proves itself on a CPU: it runs, it can fail, and no crash or hang of a case ends it."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PERF = Path(__file__).parents[1] / "perf"
SCRIPT = PERF / "device_check.py"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of perf/device."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(PERF))
    return lambda name: import_module(f"device.{name}")


def run_script(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def test_every_case_runs_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = run_script("--interpret", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["complete"]
    assert not list(tmp_path.glob("*.part"))
    statuses = {result["status"] for result in record["results"]}
    assert statuses == {"right", "measured", "not run"}
    assert {r["case"] for r in record["results"] if r["status"] == "not run"} == {
        "check_graph",
        "check_flash_attn float16",
    }
    assert {r["section"] for r in record["results"]} == {
        "attention",
        "layer",
        "instances",
        "large",
        "limits",
        "speed of prefill",
        "speed of save",
        "speed of launch",
        "speed of ring",
        "speed of decode",
        "speed of layer",
    }
    titles = " ".join(result["name"] for result in record["results"])
    for history in ("1 instances on one device, all-on-one", "2 instances on one device, scale-up", "3 instances"):
        assert history in titles
    assert [goal["status"] for goal in record["goals"]] == ["not applicable"] * 3
    assert {"device", "torch", "triton", "revision"} <= record["info"].keys()


def test_speed_is_skipped_when_the_time_is_up(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = run_script("--interpret", "--out", out, "--minutes", "0", "--only", "decode")
    assert done.returncode == 1, "nothing was right, so nothing is proven"
    results = json.loads(out.read_text())["results"]
    assert {(r["status"], r["reason"]) for r in results} == {("skipped", "the time was up: raise --minutes")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_what_to_do(tmp_path: Path) -> None:
    done = run_script("--out", tmp_path / "check.json")
    assert done.returncode == 2
    assert "--interpret" in done.stderr
    assert not list(tmp_path.iterdir())


EXPECTED = torch.tensor([1.0, -2.0, 3.0, -math.inf], dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "right"),
    [
        pytest.param(EXPECTED, True, id="equal"),
        pytest.param(EXPECTED + 1e-7, True, id="rounded"),
        pytest.param(EXPECTED + 1e-3, False, id="off"),
        pytest.param(EXPECTED.nan_to_num(neginf=-1e30), False, id="finite_for_infinite"),
        pytest.param(torch.tensor([1.0, math.nan, 3.0, -math.inf]), False, id="nan"),
        pytest.param(torch.tensor([1.0, -2.0, math.inf, -math.inf]), False, id="infinite"),
        pytest.param(EXPECTED[:3], False, id="too_short"),
    ],
)
def test_a_wrong_result_ends_with_status_1(actual: torch.Tensor, right: bool, device: Callable[[str], Any]) -> None:
    results = device("results")
    check = results.compare("x", torch.float32, actual, EXPECTED)
    assert check.right is right
    plain = [results.to_plain(check), results.to_plain(results.Speed("y", 1.0, 1.0, "GB/s"))]
    json.dumps(plain, allow_nan=False)
    assert device("parent").exit_status(plain) == (0 if right else 1)


def test_equality_and_limits_can_fail(device: Callable[[str], Any]) -> None:
    results = device("results")
    one = torch.tensor([1.0, math.nan])
    assert not results.same("x", one, one).right
    assert not results.same("x", one[:1], one[:1].repeat(2)).right
    assert results.same("x", one[:1], one[:1]).right
    assert not results.within("x", torch.float32, math.nan, 1.0).right
    assert not results.within("x", torch.float32, 1.01, 1.0).right


def test_one_wrong_kernel_is_found(device: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped diagonal, a row saved elsewhere, a state that is not merged: each makes the ring's check wrong."""
    monkeypatch.setenv("LOONG_KERNELS", "reference")
    attention, bench = device("attention"), device("bench").Bench(torch.device("cpu"))
    plan, run = attention.plan_striped_attention, attention.striped_attention

    def verdicts() -> list[bool]:
        return [check.right for check in attention.check_ring(bench, torch.float32, (3, 1, 64), 3)]

    assert all(verdicts())
    monkeypatch.setattr(
        attention, "plan_striped_attention", lambda q, k, uppers, **shape: plan(q, k, [0] * len(uppers), **shape)
    )
    assert not all(verdicts())
    monkeypatch.setattr(attention, "plan_striped_attention", plan)

    def misplace(*arguments: Any, save: Any = None, **options: Any) -> None:
        if save is not None:
            save.slots[save.slots.argmax()] = -1
        run(*arguments, save=save, **options)

    monkeypatch.setattr(attention, "striped_attention", misplace)
    assert not all(verdicts())
    monkeypatch.setattr(attention, "striped_attention", lambda *arguments, **options: None)
    assert not all(verdicts())


# Stands in for the script as the parent starts it: cases 1, 4 and 6 raise, die and hang.
CHILD = """
import json, os, signal, sys, time
numbers = [int(n) for n in sys.argv[sys.argv.index("--child") + 1].split(",")]
say = lambda **message: print(json.dumps(message), flush=True)
say(info={"device": "stand-in", "processes": os.getpid()})
for number in numbers:
    say(begin=number)
    if number == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 6:
        time.sleep(60)
    right = {"status": "right", "name": f"case {number}", "dtype": "float32", "error_ratio": 0.0, "limit": 1.0}
    failed = {"status": "failed", "name": f"case {number}", "reason": "CUDA error"}
    say(case=number, result=failed if number == 1 else right)
    say(end=number, seconds=0.1)
    if number == 1:
        sys.exit(3)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return script


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_case_that_dies_or_hangs_costs_itself_alone(
    jobs: int, stand_in: Path, tmp_path: Path, device: Callable[[str], Any]
) -> None:
    parent, cases = device("parent"), device("cases")
    out = tmp_path / "check.json"
    status = parent.check_device(
        stand_in, tiny=True, out=out, deadline=time.time() + 60, jobs=jobs, case_seconds=3, only=""
    )
    assert status == 1
    record = json.loads(out.read_text())
    assert record["complete"]
    names = [case.name for case in cases.all_cases(tiny=True)]
    failed = {r["case"]: r["reason"] for r in record["results"] if r["status"] == "failed"}
    assert set(failed) == {names[1], names[4], names[6]}
    assert f"status {-signal.SIGSEGV}" in failed[names[4]]
    assert "hung" in failed[names[6]]
    assert [r["case"] for r in record["results"]] == names


def test_children_that_cannot_start_fail_every_case(tmp_path: Path, device: Callable[[str], Any]) -> None:
    script = tmp_path / "child.py"
    script.write_text("raise SystemExit('no module named x')")
    out = tmp_path / "check.json"
    arguments: dict[str, Any] = {"tiny": True, "out": out, "deadline": 0.0, "jobs": 2, "case_seconds": 30}
    assert device("parent").check_device(script, only="", **arguments) == 1
    results = json.loads(out.read_text())["results"]
    assert len(results) == len(device("cases").all_cases(tiny=True))
    assert {r["status"] for r in results} == {"failed"}
    with pytest.raises(ValueError, match="--only 'no such'"):
        device("parent").check_device(script, only="no such", **arguments)


def speed(name: str, value: float, ratios: dict[str, float], **details: float) -> dict[str, Any]:
    return {"status": "measured", "name": name, "value": value, "ratios": ratios, "details": details}


def test_goals(device: Callable[[str], Any]) -> None:
    results = [
        speed("striped_attention, causal, a", 600.0, {"sdpa flash": 1.2}, tokens=16384.0, head_dim=128.0),
        speed(
            "striped_attention, causal, b", 300.0, {"sdpa flash": 1.5, "flash-attn": 0.8}, tokens=4096.0, head_dim=64.0
        ),
        speed("striped_attention, causal, short", 1.0, {"sdpa flash": 0.1}, tokens=1024.0, head_dim=64.0),
        speed("paged_attention, decode, c", 3000.0, {"copy": 0.9}, kv_bytes=1e9),
        speed("paged_attention, decode, small", 3.0, {"copy": 0.1}, kv_bytes=1e6),
    ]
    judge = device("goals").judge
    h200 = judge(results, "NVIDIA H200")
    assert [(goal["status"], goal["value"]) for goal in h200] == [("not met", 0.8), ("met", 600.0), ("met", 0.9)]
    assert h200[0]["about"] == "striped_attention, causal, b"
    assert [goal["status"] for goal in judge(results, "NVIDIA A100")] == ["not met", "not applicable", "met"]
    assert [goal["status"] for goal in judge([], "NVIDIA H200")] == ["not applicable"] * 3


def test_worker_turns_errors_into_results(device: Callable[[str], Any]) -> None:
    worker, cases, bench = device("worker"), device("cases"), device("bench")
    cpu = bench.Bench(torch.device("cpu"))

    def run(function: Callable[[Any], Iterator[Any]], section: str = "layer") -> list[Any]:
        return worker._results(cases.Case(section, "x", function), cpu, time.time() - 1)

    def broken(bench: Any) -> Iterator[Any]:
        yield device("results").Speed("first", 1.0, 1.0, "GB/s")
        raise RuntimeError("CUDA error:\nan illegal memory access was encountered")

    def impossible(bench_here: Any) -> Iterator[Any]:
        raise bench.NotRun("needs 9 GiB")
        yield

    first, second = run(broken)
    assert first.name == "first"
    assert (second.status, second.reason) == (
        "failed",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    )
    assert [(r.status, r.reason) for r in run(impossible)] == [("not run", "needs 9 GiB")]
    assert [r.status for r in run(lambda bench: iter(()))] == ["failed"]
    assert [r.status for r in run(broken, "speed of x")] == ["skipped"]


def test_an_interrupt_ends_the_children(
    stand_in: Path, tmp_path: Path, device: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = device("parent")
    record = parent.Record(tmp_path / "check.json", device("cases").all_cases(tiny=True))
    children = parent.Children(stand_in, record, True, time.time() + 60, 60.0)
    thread = threading.Thread(target=children.run, args=([6, 0],))
    thread.start()
    while not children._running:
        time.sleep(0.01)
    children.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert not children._running
    assert not any(result["status"] == "failed" for result in record.results.get(0, []))


class StandInEvent:
    """A clock that stands for a device's events."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "StandInEvent") -> float:
        return (other.at - self.at) * 1e3


def test_a_device_is_timed_in_turn_and_often(device: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for devices, over a clock that stands for theirs."""
    timing, bench = device("timing"), device("bench")

    class Stand(bench.Bench):  # type: ignore[misc, name-defined]
        tiny = False

    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 20))
    here = Stand(torch.device("cpu"))
    calls: list[str] = []
    slow, fast = timing.measure(here, lambda: (calls.append("slow"), time.sleep(0.004)), lambda: calls.append("fast"))
    assert len(slow) == len(fast) >= timing.MIN_REPEATS
    assert min(slow) >= 4.0
    # After the warm-up and the estimate.
    assert calls == ["slow", "fast"] * (2 + len(slow))
    assert len(timing.measure(here, lambda: None, repeats=30)[0]) == 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(bench.NotRun, match=r"needs 1\.1 GiB"):
        here.require_memory(1 << 30)


def test_cases_of_a_device_have_names_of_their_own(device: Callable[[str], Any]) -> None:
    cases = device("cases")
    for tiny in (False, True):
        names = [case.name for case in cases.all_cases(tiny)]
        assert len(set(names)) == len(names)
    here = {case.name.split()[0] for case in cases.all_cases(tiny=True)}
    assert {case.name.split()[0] for case in cases.all_cases(tiny=False)} == here
