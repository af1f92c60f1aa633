"""Threads obey their commands in order and report what their workers do."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loongserve.runtime.protocol import (
    Free,
    InstanceLost,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    SampledToken,
    StepTokens,
)
from loongserve.runtime.thread_executor import ThreadExecutor


class RecordingWorker:
    """Keeps what it is told; an iteration of seq 13 fails, and one with a gate waits for it."""

    def __init__(self, num_slots: int, gate: threading.Event | None = None) -> None:
        self.num_slots = num_slots
        self.told: list[Any] = []
        self.closed_by: str | None = None
        self._gate = gate

    def execute(self, iteration: Iteration, emit: Callable[[int, tuple[SampledToken, ...]], None]) -> None:
        self.told.append(iteration.seq)
        if self._gate is not None:
            assert self._gate.wait(10)
        if iteration.seq == 13:
            raise MemoryError("no room")
        for step in range(iteration.steps):
            emit(step, (SampledToken(7, 10 + step, 42),))

    def free(self, request: int) -> None:
        self.told.append(("free", request))

    def close(self) -> None:
        self.closed_by = threading.current_thread().name


def iteration(seq: int, group: tuple[int, ...], steps: int = 1) -> Iteration:
    return Iteration(seq, 2, group, (), steps)


def collect(events: "queue.SimpleQueue[Any]", count: int) -> list[Any]:
    return [events.get(timeout=10) for _ in range(count)]


def test_each_instance_reports_ready_tokens_and_the_end_in_its_own_order() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers = [RecordingWorker(8), RecordingWorker(16)]
    executor = ThreadExecutor(workers, events.put)
    assert executor.num_instances == 2
    executor.submit(iteration(1, (1, 0), steps=2))
    executor.submit(Free(2, 2, 1, 7))
    executor.submit(iteration(3, (1,)))
    reports = collect(events, 2 + 2 * 3 + 2)
    executor.close()

    for instance, seqs in ((0, [1]), (1, [1, 3])):
        mine = [event for event in reports if event.instance == instance]
        assert mine[0] == Ready(instance, workers[instance].num_slots)
        steps = [(e.seq, e.epoch, e.step, e.tokens) for e in mine if isinstance(e, StepTokens)]
        assert steps[:2] == [(1, 2, step, (SampledToken(7, 10 + step, 42),)) for step in range(2)]
        assert [event.seq for event in mine if isinstance(event, IterationDone)] == seqs
        assert all(event.elapsed_s >= 0 for event in mine if isinstance(event, IterationDone))
        assert isinstance(mine[-1], IterationDone)
    assert workers[0].told == [1]
    assert workers[1].told == [1, ("free", 7), 3]
    assert [worker.closed_by for worker in workers] == ["loong-instance-0", "loong-instance-1"]


def test_submit_does_not_wait_and_close_ends_what_is_queued() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gate = threading.Event()
    worker = RecordingWorker(8, gate)
    executor = ThreadExecutor([worker], events.put)
    for seq in (1, 2, 3):
        executor.submit(iteration(seq, (0,)))
    gate.set()
    executor.close()
    executor.close()
    assert worker.told == [1, 2, 3]
    assert worker.closed_by is not None
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(iteration(4, (0,)))


@pytest.mark.parametrize("command", [iteration(1, (0, 2)), Free(1, 0, -1, 5)], ids=["iteration", "free"])
def test_a_command_for_an_unknown_instance_reaches_nobody(command: Any) -> None:
    worker = RecordingWorker(8)
    executor = ThreadExecutor([worker], lambda event: None)
    with pytest.raises(ValueError, match="does not exist: there are 1"):
        executor.submit(command)
    executor.close()
    assert worker.told == []


def test_a_failed_worker_executes_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker = RecordingWorker(8)
    executor = ThreadExecutor([worker], events.put)
    executor.submit(iteration(13, (0,)))
    executor.submit(iteration(14, (0,)))
    reports = collect(events, 3)
    executor.close()
    message = "MemoryError: no room"
    assert reports[1:] == [IterationFailed(13, 2, 0, message), IterationFailed(14, 2, 0, message)]
    assert worker.told == [13]
    assert "instance 0 failed in iteration 13" in caplog.text


def test_close_leaves_a_stuck_worker_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    executor = ThreadExecutor([RecordingWorker(8, gate), RecordingWorker(8)], lambda e: None, close_timeout_s=0.2)
    executor.submit(iteration(1, (0,)))
    executor.close()
    gate.set()
    assert "instance 0 did not end within 0.2 s" in caplog.text
    assert "instance 1 did not" not in caplog.text


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ThreadExecutor([], lambda event: None)


def test_a_worker_that_cannot_free_is_lost() -> None:
    """Its thread ended without a word, and requests on it waited for ever."""

    class Broken(RecordingWorker):
        def free(self, request: int) -> None:
            raise ValueError("double free")

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker = Broken(8)
    executor = ThreadExecutor([worker], events.put)
    executor.submit(Free(1, 0, 0, 7))
    assert collect(events, 2) == [Ready(0, 8), InstanceLost(0, "ValueError: double free")]
    executor.close()
    assert worker.closed_by == "loong-instance-0"
