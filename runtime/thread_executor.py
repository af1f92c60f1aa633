"""All instances in one process, one thread each: for tests and for a library call without processes."""

import logging
import queue
import threading
import time
from collections.abc import Sequence

from loongserve.runtime.executor import Deliver, Worker, recipients
from loongserve.runtime.protocol import (
    Free,
    InstanceLost,
    Iteration,
    IterationDone,
    IterationFailed,
    RankCommand,
    Ready,
    SampledToken,
    Shutdown,
    StepTokens,
)

logger = logging.getLogger(__name__)


class ThreadExecutor:
    """Runs each worker in its own thread, which obeys that worker's commands in order.

    A worker whose iteration raised reports ``IterationFailed`` for it and for every later one; one that fails otherwise
    is reported ``InstanceLost``.
    """

    def __init__(self, workers: Sequence[Worker], deliver: Deliver, *, close_timeout_s: float = 30.0) -> None:
        """Start the threads.

        Args:
            workers: Instance i is ``workers[i]``; they are closed by their threads.
            deliver: Called from the threads with what the workers report.
            close_timeout_s: How long ``close`` waits for what is queued.

        Raises:
            ValueError: There are no workers.
        """
        if not workers:
            raise ValueError("at least 1 worker is needed, got none")
        self._close_timeout_s = close_timeout_s
        self._closed = False
        self._threads = [_InstanceThread(instance, worker, deliver) for instance, worker in enumerate(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def num_instances(self) -> int:
        """How many instances there are."""
        return len(self._threads)

    def submit(self, command: RankCommand) -> None:
        """Queue a command for every instance that it is meant for.

        Raises:
            ValueError: It names an instance that does not exist.
            RuntimeError: The executor is closed.
        """
        if self._closed:
            raise RuntimeError("the executor is closed and takes no commands")
        for instance in recipients(command, self.num_instances):
            self._threads[instance].commands.put(command)

    def close(self) -> None:
        """End all threads after what is queued; one that is stuck is left behind with an error in the log."""
        if self._closed:
            return
        self._closed = True
        for thread in self._threads:
            thread.commands.put(Shutdown())
        deadline = time.monotonic() + self._close_timeout_s
        for instance, thread in enumerate(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.error("instance %d did not end within %g s", instance, self._close_timeout_s)


class _InstanceThread(threading.Thread):
    def __init__(self, instance: int, worker: Worker, deliver: Deliver) -> None:
        super().__init__(name=f"loong-instance-{instance}", daemon=True)
        self.commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._instance = instance
        self._worker = worker
        self._deliver = deliver
        self._failure: str | None = None

    def run(self) -> None:
        self._deliver(Ready(self._instance, self._worker.num_slots))
        try:
            while not isinstance(command := self.commands.get(), Shutdown):
                if isinstance(command, Free):
                    self._worker.free(command.request)
                else:
                    self._execute(command)
        except Exception as error:
            logger.exception("instance %d failed", self._instance)
            self._deliver(InstanceLost(self._instance, f"{type(error).__name__}: {error}"))
        finally:
            self._worker.close()

    def _execute(self, iteration: Iteration) -> None:
        seq, epoch, instance = iteration.seq, iteration.epoch, self._instance

        def emit(step: int, tokens: tuple[SampledToken, ...]) -> None:
            self._deliver(StepTokens(seq, epoch, instance, step, tokens))

        begin_s = time.monotonic()
        if self._failure is None:
            try:
                self._worker.execute(iteration, emit)
            except Exception as error:
                logger.exception("instance %d failed in iteration %d", instance, seq)
                self._failure = f"{type(error).__name__}: {error}"
        if self._failure is not None:
            self._deliver(IterationFailed(seq, epoch, instance, self._failure))
            return
        self._deliver(IterationDone(seq, epoch, instance, time.monotonic() - begin_s))
