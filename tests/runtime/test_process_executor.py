"""Ranks that fail, hang or die, at any moment: stand-ins that do as the test says, commanded as real ones are."""

import logging
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from loongserve.comm import shm
from loongserve.runtime import process_executor
from loongserve.runtime.model.source import open_model
from loongserve.runtime.process_executor import ProcessExecutor, StartupError
from loongserve.runtime.protocol import (
    Free,
    InstanceLost,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    SamplingParams,
    Segment,
)

pytestmark = pytest.mark.timeout(60)

# What a stand-in does with its socket once it knows its number.
PRELUDE = """
import os, signal, socket, sys, time
from loongserve.runtime import wire
from loongserve.runtime.protocol import IterationDone, Ready, Shutdown, StartupFailed
sock = socket.socket(fileno=int(sys.argv[1]))
config = wire.receive_message(sock)
instance = config["instance"]
"""
READY = "wire.send_message(sock, Ready(instance, config['num_slots']))\n"
OBEY = """
while not isinstance(command := wire.receive_message(sock), Shutdown | None):
    if hasattr(command, "group"):
        wire.send_message(sock, IterationDone(command.seq, command.epoch, instance, 0.0))
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Start an executor over two stand-ins; whatever happens, none of their processes outlives the test."""
    processes: list[subprocess.Popen[bytes]] = []
    executors: list[ProcessExecutor] = []

    def start(*scripts: str, **options: Any) -> "tuple[ProcessExecutor, queue.SimpleQueue[Any]]":
        waiting = list(scripts)

        def spawn(module: str, sock: Any, **others: Any) -> "subprocess.Popen[bytes]":
            script = waiting.pop(0)
            path = os.path.dirname(os.path.dirname(sys.modules["loongserve"].__file__ or ""))
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", script, str(sock.fileno())],
                pass_fds=[sock.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
            processes.append(process)
            return process

        monkeypatch.setattr(process_executor, "spawn_module", spawn)
        model = SimpleNamespace(to_dict=dict)
        weights = SimpleNamespace(describe=dict, fds=())
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        executor = ProcessExecutor(model, weights, [10 + i for i in range(len(scripts))], events.put, **options)
        executors.append(executor)
        return executor, events

    yield start
    for process in processes:
        process.kill()
    for executor in executors:
        executor.close()
    assert [process for process in processes if process.wait(10) is None] == []


def long_iteration(seq: int, group: tuple[int, ...], num_tokens: int) -> Iteration:
    segment = Segment(1, 0, tuple(range(num_tokens)), (), ((group[0], 0, num_tokens),), 0, SamplingParams())
    return Iteration(seq, 0, group, (segment,))


def open_descriptors() -> int:
    return psutil.Process().num_fds()


def test_commands_go_out_and_events_come_back(start) -> None:
    before = open_descriptors()
    executor, events = start(PRELUDE + READY + OBEY, PRELUDE + READY + OBEY)
    assert [events.get(timeout=10) for _ in range(2)] == [Ready(0, 10), Ready(1, 11)]
    executor.submit(Free(1, 0, 0, 7))
    executor.submit(long_iteration(2, (1, 0), 300_000))
    done = {events.get(timeout=20) for _ in range(2)}
    assert done == {IterationDone(2, 0, 0, 0.0), IterationDone(2, 0, 1, 0.0)}
    with pytest.raises(ValueError, match="instance 2 does not exist: there are 2"):
        executor.submit(Free(3, 0, 2, 7))
    executor.close()
    executor.close()
    assert events.empty()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(
            "raise SystemExit(3)", "instance 1: process .* ended with status 3 before it was ready", id="early"
        ),
        pytest.param(PRELUDE + "os.kill(os.getpid(), 9)", "instance 1: process .* ended with signal 9", id="killed"),
        pytest.param(PRELUDE + "wire.send_message(sock, StartupFailed('no room'))", "^no room$", id="says-why"),
        pytest.param(
            PRELUDE + "sock.sendall(b'half')", "instance 1: .* ended with status 0 .* 4 bytes|frame", id="half"
        ),
    ],
)
def test_first_failure_ends_the_start(start, script: str, message: str) -> None:
    """Ranks wait for each other when they start: the one that failed was heard after the one that waited for it."""
    before = open_descriptors()
    begin = time.monotonic()
    with pytest.raises(StartupError, match=message):
        start(PRELUDE + "time.sleep(100)", script)
    assert time.monotonic() - begin < 30
    assert open_descriptors() == before


def test_rank_that_never_is_ready_ends_the_start(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_executor, "STARTUP_TIMEOUT_S", 3.0)
    with pytest.raises(StartupError, match=r"instances \[1\] were not ready within 3 s"):
        start(PRELUDE + READY + OBEY, "import time; time.sleep(100)")


def test_rank_that_dies_is_lost(start) -> None:
    executor, events = start(PRELUDE + READY + OBEY, PRELUDE + READY + OBEY)
    os.kill(executor.pids()[1], signal.SIGKILL)
    [lost] = [events.get(timeout=10) for _ in range(3)][2:]
    assert lost == InstanceLost(1, f"process {executor.pids()[1]} ended with signal 9")
    # Commands to it are no error; the others obey theirs.
    executor.submit(long_iteration(1, (0, 1), 10))
    assert events.get(timeout=10) == IterationDone(1, 0, 0, 0.0)


def test_rank_that_does_not_read_is_killed(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt to a rank that was stopped blocked the manager for ever, and then ``close`` too."""
    monkeypatch.setattr(process_executor, "SEND_TIMEOUT_S", 0.5)
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    executor, events = start(PRELUDE + READY + OBEY, PRELUDE + READY + stopped)
    assert {events.get(timeout=10) for _ in range(2)} == {Ready(0, 10), Ready(1, 11)}
    executor.submit(long_iteration(1, (1, 0), 300_000))
    assert {type(events.get(timeout=20)) for _ in range(2)} == {IterationDone, InstanceLost}
    executor.close()


def test_close_ends_ranks_that_hang(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_executor, "CLOSE_TIMEOUT_S", 1.0)
    hang = "time.sleep(100)"
    executor, _ = start(*[PRELUDE + READY + hang] * 4)
    begin = time.monotonic()
    executor.close()
    # One deadline for all of them.
    assert time.monotonic() - begin < 3
    assert not any(psutil.pid_exists(pid) for pid in executor.pids())


def test_without_a_compiler_gloo_serves(
    start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    shm._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            executor, _ = start(PRELUDE + "assert config['transport'] == 'gloo'\n" + READY + OBEY)
        assert executor.transport == "gloo"
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            "no shared-memory transport, gloo serves instead"
        ]
        assert "no-such-compiler" in caplog.text
        with pytest.raises(StartupError, match=r"no shared-memory transport, use gloo or auto: .*no-such-compiler"):
            start(PRELUDE + READY + OBEY, transport="shm")
    finally:
        shm._library.cache_clear()


def test_a_dead_rank_is_named_by_its_peer() -> None:
    """Killed amid a prefill of both: the other's iteration fails with its name, and the executor reports it lost."""
    source = open_model()
    weights = source.share_weights(torch.float32)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    executor = ProcessExecutor(source.config, weights, [4000, 4000], events.put)
    try:
        weights.close()
        assert executor.transport == "shm"
        assert {events.get(timeout=10) for _ in range(2)} == {Ready(0, 4000), Ready(1, 4000)}
        executor.submit(long_iteration(1, (0, 1), 3000))
        time.sleep(0.5)
        os.kill(executor.pids()[1], signal.SIGKILL)
        killed = time.monotonic()
        seen = [events.get(timeout=20) for _ in range(3)]
        failed = next(event for event in seen if isinstance(event, IterationFailed))
        assert (failed.instance, failed.seq) == (0, 1)
        assert failed.message.startswith("PeerLost: rank 1 is lost")
        assert {event.instance for event in seen if isinstance(event, InstanceLost)} == {0, 1}
        # What it was computing comes before; a transport's own deadline is a minute.
        assert time.monotonic() - killed < 20
    finally:
        executor.close()
