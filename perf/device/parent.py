"""The parent process: hands cases to child processes, keeps the record, and prints it as it grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device.cases import Case, all_cases
from device.goals import judge
from device.results import Missing, to_plain


@dataclass
class Record:
    """What the file holds, rewritten whenever a case has ended."""

    out: Path
    cases: Sequence[Case]
    started: float = field(default_factory=time.time)
    info: dict[str, Any] = field(default_factory=dict)
    results: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Keep and print a result of a case."""
        with self._lock:
            self.results.setdefault(number, []).append(result)
            print(_line(result), flush=True)

    def end(self, number: int, seconds: float) -> None:
        """Note that a case is over, and write the file."""
        with self._lock:
            self.seconds[number] = seconds
            self.write(complete=False)

    def plain(self, complete: bool) -> dict[str, Any]:
        """Answer the file's content."""
        results = [
            {"section": self.cases[number].section, "case": self.cases[number].name} | result
            for number in sorted(self.results)
            for result in self.results[number]
        ]
        statuses = [result["status"] for result in results]
        return {
            "info": self.info,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "complete": complete,
            "counts": {status: statuses.count(status) for status in sorted(set(statuses))},
            "goals": judge(results, str(self.info.get("device", "no device"))),
            "case_seconds": {self.cases[number].name: self.seconds[number] for number in sorted(self.seconds)},
            "results": results,
        }

    def write(self, complete: bool) -> None:
        """Replace the file in one step, so that there is never half of one."""
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(self.plain(complete), indent=1) + "\n")
        os.replace(beside, self.out)


def check_device(
    script: Path, *, tiny: bool, out: Path, deadline: float, jobs: int, case_seconds: float, only: str
) -> int:
    """Run all cases, checks first and several at once, and answer the exit status."""
    cases = all_cases(tiny)
    record = Record(out, cases)
    record.info = {"revision": _revision(script.parent), "command": " ".join(sys.argv)}
    chosen = [n for n, case in enumerate(cases) if only in case.section or only in case.name]
    if not chosen:
        raise ValueError(f"--only {only!r} is in the section or name of no case: leave it out to see all of them")
    record.write(complete=False)
    children = Children(script, record, tiny, deadline, case_seconds)
    together = [n for n in chosen if not cases[n].alone] if jobs > 1 else []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        # The pool's end waits for all of them; none raises for what a case does.
        try:
            list(pool.map(children.run, (together[job::jobs] for job in range(jobs))))
        except BaseException:
            # Interrupted: no child may go on, nor another start in place of one that was interrupted too.
            children.stop()
            raise
    children.run([n for n in chosen if n not in together])
    record.write(complete=True)
    plain = record.plain(complete=True)
    for goal in plain["goals"]:
        value = "" if goal["value"] is None else f" {goal['value']:.2f} of {goal['target']:g}:"
        print(f"goal {goal['status']}:{value} {goal['name']} ({goal['about']})")
    counts = ", ".join(f"{count} {status}" for status, count in plain["counts"].items())
    print(f"{record.info.get('device', 'no device')}: {counts}; written to {out}")
    return exit_status(plain["results"])


def exit_status(results: Sequence[dict[str, Any]]) -> int:
    """Answer 1 if a result is wrong, a case failed, or nothing was right at all; else 0."""
    statuses = {result["status"] for result in results}
    return 1 if statuses & {"wrong", "failed"} or not statuses & {"right", "measured"} else 0


@dataclass
class Children:
    """Starts child processes, one after another, until each of its cases is over."""

    script: Path
    record: Record
    tiny: bool
    deadline: float
    case_seconds: float
    _stopped: bool = False
    _running: set[subprocess.Popen[str]] = field(default_factory=set)

    def stop(self) -> None:
        """End all processes, and start none any more."""
        self._stopped = True
        for process in list(self._running):
            process.kill()

    def run(self, numbers: Sequence[int]) -> None:
        """Have cases run; one whose process ends or hangs has failed, and a new process runs what comes after it."""
        remaining = list(numbers)
        while remaining:
            over = self._run_one(remaining)
            if self._stopped:
                return
            if not over:
                for number in remaining:
                    self._fail(number, "its process ended before it began: see its messages")
                return
            remaining = remaining[over:]

    def _run_one(self, numbers: Sequence[int]) -> int:
        """Run one process. Returns: how many of the cases are over."""
        process = subprocess.Popen(self._command(numbers), stdout=subprocess.PIPE, text=True, env=self._environment())
        assert process.stdout is not None
        self._running.add(process)
        if self._stopped:
            process.kill()
        begun: int | None = None
        over = 0
        # Until a case begins the time is the process's own: to import and to start the device.
        watchdog = _watch(process, self.case_seconds)
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "info" in message:
                    self.record.info |= message["info"]
                elif "begin" in message:
                    watchdog.cancel()
                    watchdog = _watch(process, self.case_seconds)
                    begun = message["begin"]
                elif "result" in message:
                    self.record.add(message["case"], message["result"])
                else:
                    over += 1
                    begun = None
                    self.record.end(message["end"], message["seconds"])
            status = process.wait()
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            self._running.discard(process)
        if begun is not None and not self._stopped:
            self._fail(begun, f"its process ended with status {status} (-9 after {self.case_seconds:g} s: it hung)")
            over += 1
        return over

    def _fail(self, number: int, reason: str) -> None:
        self.record.add(number, to_plain(Missing(self.record.cases[number].name, "failed", reason)))
        self.record.end(number, 0.0)

    def _command(self, numbers: Sequence[int]) -> list[str]:
        command = [sys.executable, str(self.script), "--child", ",".join(map(str, numbers))]
        return [*command, "--deadline", str(self.deadline), *(["--interpret"] if self.tiny else [])]

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {"LOONG_KERNELS": "triton"}
        # Triton reads it when it is first imported.
        environment.pop("TRITON_INTERPRET", None)
        return environment | ({"TRITON_INTERPRET": "1"} if self.tiny else {})


def _watch(process: subprocess.Popen[str], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _revision(folder: Path) -> str:
    """Name the commit, with a + where files differ from it; unknown where there is no repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _line(result: dict[str, Any]) -> str:
    """Write a result for people."""
    status, name = result["status"], result["name"]
    if status in ("right", "wrong"):
        verdict = status if status == "right" else "WRONG"
        # Not finite: a string already.
        return f"{verdict:8} {float(result['error_ratio']):.1e} of {result['limit']:.1e}  {result['dtype']:9} {name}"
    if status == "measured":
        others = ", ".join(f"{ratio:.2f} x {other}" for other, ratio in result["ratios"].items())
        return f"{result['value']:8.1f} {result['unit']}  {name}{f': {others}' if others else ''}"
    return f"{status:8} {name}: {result['reason']}"
