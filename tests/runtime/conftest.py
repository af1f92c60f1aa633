"""A manager that is fed by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Plan
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import Command, Event, Iteration, IterationDone, Ready, SampledToken, StepTokens


class FunctionPolicy:
    """Plans by a function, which may be replaced, and keeps the views that it was shown."""

    name = "function"

    def __init__(self, function: Callable[[ClusterView], Plan]) -> None:
        self.function = function
        self.views: list[ClusterView] = []

    def plan(self, view: ClusterView) -> Plan:
        self.views.append(view)
        return self.function(view)


class ManagerDriver:
    """A manager that is fed by hand: ready instances, a clock, and all that it answered."""

    def __init__(
        self,
        plan: Callable[[ClusterView], Plan],
        *,
        fallback: Callable[[ClusterView], Plan] | None = None,
        num_slots: Sequence[int] = (20, 20),
        ready: bool = True,
        **options: Any,
    ) -> None:
        self.policy = FunctionPolicy(plan)
        self.fallback = FunctionPolicy(fallback or SafePolicy().plan)
        options = {"vocab_size": 100, "max_model_len": 30} | options
        self.manager = Manager(self.policy, self.fallback, num_instances=len(num_slots), **options)
        self.now = 0.0
        self.sent: list[Command] = []
        self.ready = [Ready(instance, slots) for instance, slots in enumerate(num_slots)]
        for event in self.ready if ready else ():
            self.send(event)

    @property
    def counters(self) -> dict[str, int]:
        return self.manager.journal.counters

    @property
    def views(self) -> list[ClusterView]:
        return self.policy.views

    def send(self, event: Event) -> list[Command]:
        commands = self.manager.handle(event, self.now)
        self.sent += commands
        self.manager.ledger.check()
        return commands

    def launched(self) -> Iteration:
        """The last iteration commanded."""
        return [command for command in self.sent if isinstance(command, Iteration)][-1]

    def sample(self, iteration: Iteration, step: int = 0, token: int = 7) -> list[Command]:
        """Let the members report ``token`` for each row that samples in a step."""
        commands = []
        for segment in iteration.segments:
            if segment.sampling is not None:
                member = iteration.group[segment.sampler_member(len(iteration.group))]
                sampled = SampledToken(segment.request, segment.begin + segment.count + step, token)
                commands += self.send(StepTokens(iteration.seq, iteration.epoch, member, step, (sampled,)))
        return commands

    def end(self, iteration: Iteration, elapsed_s: float = 0.01) -> list[Command]:
        """Let all members end an iteration."""
        commands = []
        for instance in iteration.group:
            commands += self.send(IterationDone(iteration.seq, iteration.epoch, instance, elapsed_s))
        return commands

    def run(self, iteration: Iteration | None = None, token: int = 7, elapsed_s: float = 0.01) -> list[Command]:
        """Let an iteration (the last one) sample in all its steps, and end."""
        iteration = iteration or self.launched()
        commands = []
        for step in range(iteration.steps):
            commands += self.sample(iteration, step, token)
        return commands + self.end(iteration, elapsed_s)

    def run_all(self) -> None:
        """Run iterations until no request holds anything."""
        for _ in range(200):
            if not self.manager.ledger.requests():
                return
            self.run()
        raise AssertionError("200 iterations, and requests still hold KV")


@pytest.fixture
def driver() -> type[ManagerDriver]:
    return ManagerDriver
