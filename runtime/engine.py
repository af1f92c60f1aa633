"""The library call: a manager and its instances behind ``Engine``; and the loop that it and the server share.

with Engine(EngineConfig(instances=3)) as engine:
    tokens = [t.token for t in engine.submit(prompt_ids, max_new_tokens=32)]
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from loongserve.policies.base import Policy
from loongserve.policies.registry import make_policy
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.executor import Deliver, Executor
from loongserve.runtime.manager import Manager
from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.source import open_model
from loongserve.runtime.model.weights import SharedWeights
from loongserve.runtime.process_executor import ProcessExecutor
from loongserve.runtime.protocol import (
    Abort,
    ClientEvent,
    Event,
    Finished,
    GetStatus,
    Refused,
    SamplingParams,
    ServerInfo,
    Status,
    Submit,
    Token,
)

ENDED = "the engine has ended: it was closed, or its manager failed and said why in the log"

# Starts the instances, one for each pool size.
StartInstances = Callable[[EngineConfig, ModelConfig, SharedWeights, Sequence[int], Deliver], Executor]


class ManagerLoop:
    """Feeds a manager its events, one at a time, and carries out what it commands.

    Args:
        manager: sans-IO; nothing else touches it.
        start: starts the instances, given where to deliver their events.
        on_event: called with everything for clients, from the thread that runs the loop.
    """

    def __init__(
        self, manager: Manager, start: Callable[[Deliver], Executor], on_event: Callable[[ClientEvent], None]
    ) -> None:
        self._manager = manager
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._executor = start(self._events.put)

    def post(self, event: Event) -> None:
        """Hand an event to the manager; from any thread."""
        self._events.put(event)

    def run(self) -> None:
        """Handle events until ``stop``, then end the instances."""
        try:
            while (event := self._events.get()) is not None:
                for command in self._manager.handle(event, time.monotonic()):
                    if isinstance(command, ClientEvent):
                        self._on_event(command)
                    else:
                        self._executor.submit(command)
        finally:
            self._executor.close()

    def stop(self) -> None:
        """Make ``run`` return after the events posted so far; from any thread."""
        self._events.put(None)


def start_processes(
    config: EngineConfig, model: ModelConfig, weights: SharedWeights, num_slots: Sequence[int], deliver: Deliver
) -> ProcessExecutor:
    """Start one process an instance. Raises: StartupError."""
    return ProcessExecutor(
        model,
        weights,
        num_slots,
        deliver,
        dtype=config.compute_dtype,
        device=config.compute_device,
        transport=config.transport,
    )


def start_threads(
    config: EngineConfig, model: ModelConfig, weights: SharedWeights, num_slots: Sequence[int], deliver: Deliver
) -> Executor:
    """Start one thread an instance in this process: the same instances on the same weights, for tests and debugging.

    With device cuda all of them share the current device. Their threads work on its default stream, so that a copy
    between two of them comes after what wrote it and before what reads it.
    """
    import torch

    from loongserve.comm.local import LocalWorld
    from loongserve.runtime.instance import Instance
    from loongserve.runtime.model.llama import LlamaModel
    from loongserve.runtime.model.weights import attach_weights
    from loongserve.runtime.thread_executor import ThreadExecutor

    world = LocalWorld(len(num_slots))
    replica = LlamaModel(
        model,
        attach_weights(weights.describe()),
        dtype=getattr(torch, config.compute_dtype),
        device=config.compute_device,
    )
    workers = [Instance(i, replica, world.transport(i), slots) for i, slots in enumerate(num_slots)]
    return ThreadExecutor(workers, deliver)


def start_loop(
    config: EngineConfig,
    on_event: Callable[[ClientEvent], None],
    *,
    policy: Policy | None = None,
    num_slots: Sequence[int] | None = None,
    start: StartInstances = start_processes,
) -> tuple[ManagerLoop, ServerInfo]:
    """Share the model, start the instances, and make the loop that manages them.

    Args:
        config: validated.
        on_event: where what is for clients goes.
        policy: instead of the one that the configuration names.
        num_slots: pool sizes by instance, instead of ``config.kv_tokens`` for each.
        start: ``start_processes``, or ``start_threads``.

    Raises:
        StartupError: an instance did not start.
        ValueError: the model or the configuration cannot be served.
    """
    import torch

    policy = policy or make_policy(config.policy, **dict(config.policy_options))
    model = open_model(config.model)
    shape = model.config
    max_model_len = min(config.max_model_len or shape.max_positions, shape.max_positions)
    slots = list(num_slots or [config.slots_an_instance(shape)] * config.instances)
    manager = Manager(
        policy,
        SafePolicy(),
        num_instances=len(slots),
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        control_interval_s=config.control_interval_ms / 1e3,
    )
    weights = model.share_weights(getattr(torch, config.compute_dtype))
    try:
        loop = ManagerLoop(manager, lambda deliver: start(config, shape, weights, slots, deliver), on_event)
    finally:
        weights.close()
    info = ServerInfo(
        model=model.path.name,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        total_slots=sum(slots),
        num_instances=len(slots),
        policy=policy.name,
        dtype=config.compute_dtype,
        device=config.compute_device,
        eos_tokens=shape.eos_token_ids,
    )
    return loop, info


class RequestRefused(ValueError):
    """The manager did not admit a request. ``code``: name of the gRPC status code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Stream:
    """The output of one request: iterate for its tokens; ``finished`` is set when the iteration has ended."""

    request: int
    finished: Finished | None = None
    _events: "queue.SimpleQueue[Token | Finished | Refused]" = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[Token]:
        """Yield each token as it comes. Raises: RequestRefused; RuntimeError if the request failed."""
        while self.finished is None:
            event = self._events.get()
            if isinstance(event, Token):
                yield event
            elif isinstance(event, Refused):
                self.finished = Finished(self.request, "error", 0, 0, event.message)
                raise RequestRefused(event.code, event.message)
            else:
                self.finished = event
                if event.reason == "error":
                    raise RuntimeError(f"request {self.request} failed: {event.message}")


class Engine:
    """Elastic instances in processes of their own, managed from a thread of this one.

    Args:
        config: model, number of instances, policy and so on.
        policy: instead of the one that ``config`` names.
        num_slots: pool sizes by instance, instead of ``config.kv_tokens`` for each.
        start: ``start_processes``, or ``start_threads``.

    Raises:
        StartupError: an instance did not start.
        ValueError: the model or the configuration cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: Policy | None = None,
        num_slots: Sequence[int] | None = None,
        start: StartInstances = start_processes,
    ) -> None:
        self._lock = threading.Lock()
        self._next_number = 0
        self._streams: dict[int, Stream] = {}
        self._statuses: dict[int, queue.SimpleQueue[Status | None]] = {}
        self._ended = False
        self._loop, self.info = start_loop(config, self._on_event, policy=policy, num_slots=num_slots, start=start)
        self._thread = threading.Thread(target=self._run, name="manager", daemon=True)
        self._thread.start()

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_tokens: Sequence[int] = (),
        return_logits: bool = False,
    ) -> Stream:
        """Queue a request; its tokens come from the stream. Does not wait.

        Args:
            tokens: prompt ids, at least one.
            max_new_tokens: end after so many.
            sampling: greedy if None.
            stop_tokens: end after any of these.
            return_logits: each token comes with the float32 logits that it was chosen from.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._lock:
            stream = Stream(self._number())
            self._streams[stream.request] = stream
        sampling = sampling or SamplingParams()
        stops = tuple(stop_tokens)
        self._loop.post(Submit(stream.request, tuple(tokens), max_new_tokens, sampling, stops, return_logits))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request early; its stream ends with reason "abort"."""
        self._loop.post(Abort(stream.request))

    def status(self) -> Status:
        """Ask the manager for instances, counters and the last decisions. Raises: RuntimeError if closed."""
        answer: queue.SimpleQueue[Status | None] = queue.SimpleQueue()
        with self._lock:
            query = self._number()
            self._statuses[query] = answer
        self._loop.post(GetStatus(query))
        status = answer.get()
        if status is None:
            raise RuntimeError(ENDED)
        return status

    def close(self) -> None:
        """End all instances; requests still running fail."""
        self._loop.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            # However the loop ended, nobody waits for it for ever.
            with self._lock:
                self._ended = True
                for stream in self._streams.values():
                    stream._events.put(Finished(stream.request, "error", 0, 0, ENDED))
                for answer in self._statuses.values():
                    answer.put(None)

    def _number(self) -> int:
        if self._ended:
            raise RuntimeError(ENDED)
        self._next_number += 1
        return self._next_number

    def _on_event(self, event: ClientEvent) -> None:
        with self._lock:
            if isinstance(event, Status):
                self._statuses.pop(event.query).put(event)
                return
            stream = self._streams[event.request]
            if not isinstance(event, Token):
                del self._streams[event.request]
        stream._events.put(event)
