"""Iterations in flight, and how many decode steps the next one may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from loongserve.runtime.protocol import Iteration, IterationDone

IterationKind = Literal["prefill", "decode"]


@dataclass(slots=True)
class RunningIteration:
    """An iteration between its launch and the last member's ``IterationDone``."""

    iteration: Iteration
    # "prefill" if any segment is one.
    kind: IterationKind
    waiting_for: set[int] = field(init=False)
    # Request -> the instance that samples its tokens in this iteration.
    samplers: dict[int, int] = field(init=False)
    # The slowest member's time so far.
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        group = self.iteration.group
        self.waiting_for = set(group)
        self.samplers = {
            segment.request: group[segment.sampler_member(len(group))]
            for segment in self.iteration.segments
            if segment.sampling is not None
        }

    def done(self, event: IterationDone) -> bool:
        """Take one member's report. Returns: whether it was the last."""
        self.waiting_for.discard(event.instance)
        self.elapsed_s = max(self.elapsed_s, event.elapsed_s)
        return not self.waiting_for


class StepClock:
    """Moving averages of the time of a decode step, by group size; slower samples count at once, faster ones slowly.

    An iteration is one command: nothing can join or preempt it midway. Several steps in one save the round trip through
    the manager; bounding their time by the control interval bounds what an arrival, a drain or an abort waits for,
    so steps need not be cut while something waits.
    """

    # Weight of a sample that is faster than the average.
    WEIGHT = 0.25

    def __init__(self, control_interval_s: float, max_steps: int) -> None:
        if not control_interval_s > 0:
            raise ValueError(f"control_interval_s must be above 0, got {control_interval_s}")
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self._control_interval_s = control_interval_s
        self._max_steps = max_steps
        self._step_s: dict[int, float] = {}

    def observe(self, dop: int, steps: int, elapsed_s: float) -> None:
        """Learn from a decode iteration that ended."""
        sample = elapsed_s / steps
        known = self._step_s.get(dop, sample)
        self._step_s[dop] = max(sample, known + self.WEIGHT * (sample - known))

    def steps(self, dop: int, rows_of: Mapping[int, int], free_of: Mapping[int, int], remaining: int) -> int:
        """Choose how many steps a decode group takes.

        Args:
            dop: Its size.
            rows_of: Master -> how many rows it has: each stores one token a step.
            free_of: Master -> its free slots.
            remaining: The fewest tokens that one of its rows may still generate.

        Returns:
            At most ``max_steps``, the control interval, the slots and ``remaining``; 0 when a master lacks the slots
            for one step; 1 while the step time is unknown.
        """
        fitting = min(free_of[master] // rows for master, rows in rows_of.items())
        step_s = self._step_s.get(dop)
        if step_s is None:
            timely = 1
        elif step_s * self._max_steps <= self._control_interval_s:
            timely = self._max_steps
        else:
            timely = max(1, int(self._control_interval_s / step_s))
        return min(timely, fitting, remaining)
