"""What carries the manager's commands to the instances, and what an instance's worker is."""

from collections.abc import Callable, Sequence
from typing import Protocol

from loongserve.runtime.protocol import Free, Iteration, RankCommand, RankEvent, SampledToken

# Where an executor hands over what ranks report; called from any thread, in each rank's own order.
Deliver = Callable[[RankEvent], None]
# emit(step, tokens): what this member sampled in a step, as soon as it is known.
Emit = Callable[[int, tuple[SampledToken, ...]], None]


class Executor(Protocol):
    """Runs commands on instances; made with a ``Deliver``. The manager can't tell one kind from another.

    Every instance is reported ``Ready`` or ``InstanceLost``; each obeys its commands in the order of ``submit``, which
    must be called from one thread.
    """

    @property
    def num_instances(self) -> int:
        """How many instances there are; they are 0 .. num_instances - 1."""
        ...

    def submit(self, command: RankCommand) -> None:
        """Queue a command: an ``Iteration`` on every rank of its group, a ``Free`` on its instance, never waiting.

        Raises:
            ValueError: The command names an instance that does not exist.
        """
        ...

    def close(self) -> None:
        """End all instances and wait until they have ended; again: nothing."""
        ...


def recipients(command: RankCommand, num_instances: int) -> Sequence[int]:
    """List the instances that a command goes to.

    Raises:
        ValueError: One of them does not exist.
    """
    match command:
        case Iteration():
            instances: Sequence[int] = command.group
        case Free():
            instances = (command.instance,)
        case _:
            return range(num_instances)
    for instance in instances:
        if not 0 <= instance < num_instances:
            raise ValueError(f"instance {instance} does not exist: there are {num_instances}")
    return instances


class Worker(Protocol):
    """One instance. Called from one thread at a time, with commands in the order of their seq."""

    @property
    def num_slots(self) -> int:
        """Slots of its pool, in tokens."""
        ...

    def execute(self, iteration: Iteration, emit: Emit) -> None:
        """Run this member's part of an iteration, calling ``emit`` for each step in which it samples.

        Raises:
            Exception: The iteration failed; the instance is of no use any more.
        """
        ...

    def free(self, request: int) -> None:
        """Give back all slots of a request; without any, nothing."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
