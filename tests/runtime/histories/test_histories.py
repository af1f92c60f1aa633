"""Ten thousand random histories of the manager on a cluster in virtual time, and how long a wide prefill waits."""

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Plan, Policy, SegmentPlan
from loongserve.policies.registry import make_policy
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Command,
    Event,
    Finished,
    Free,
    Iteration,
    IterationDone,
    Ready,
    Refused,
    StepTokens,
    Submit,
    Token,
)

# Counters of how requests end.
ENDS = ("finished", "aborted", "refused")
# Virtual seconds within which every history must end.
PATIENCE_S = 60.0


class VirtualCluster:
    """Ranks in virtual time: each obeys its queue; an iteration starts when it is first in every member's queue."""

    def __init__(
        self,
        checksum: Any,
        manager: Manager,
        num_slots: list[int],
        rng: random.Random,
        step_s: tuple[float, float] = (0.0005, 0.015),
    ) -> None:
        self.manager = manager
        self.now = 0.0
        self.answers: defaultdict[int, Any] = defaultdict(checksum.answer)
        # (when it was commanded, iteration)
        self.iterations: list[tuple[float, Iteration]] = []
        self._step_s = step_s
        self.pools = [checksum.pool(instance, slots) for instance, slots in enumerate(num_slots)]
        self._checksum = checksum
        self._rng = rng
        self._queues: list[deque[Iteration | Free]] = [deque() for _ in num_slots]
        self._executing: list[Iteration | None] = [None] * len(num_slots)
        self._last_report_s = [0.0] * len(num_slots)
        self._last_seq = 0
        self._events: list[tuple[float, int, Event | tuple[int, Iteration]]] = []
        self._num_events = 0
        for instance, slots in enumerate(num_slots):
            self.at(rng.uniform(0, 0.01), Ready(instance, slots))

    def at(self, time_s: float, event: Event | tuple[int, Iteration]) -> None:
        """Let an event reach the manager, or (instance, iteration) end there, at a time."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, event))

    def run(self, each: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            assert self.now < PATIENCE_S, "the history does not end"
            if isinstance(event, tuple):
                instance, iteration = event
                assert self._queues[instance].popleft() is iteration
                self._executing[instance] = None
                self._advance([instance])
                continue
            for command in self.manager.handle(event, self.now):
                self._obey(command)
            each()
        assert not any(self._queues), "deadlock: commands wait for ever"

    def _obey(self, command: Command) -> None:
        if isinstance(command, Iteration | Free):
            assert command.seq > self._last_seq
            self._last_seq = command.seq
            group = command.group if isinstance(command, Iteration) else (command.instance,)
            if isinstance(command, Iteration):
                self.iterations.append((self.now, command))
                for instance in group:
                    assert not any(isinstance(waiting, Iteration) for waiting in self._queues[instance]), (
                        f"instance {instance} is in two groups at once"
                    )
            for instance in group:
                self._queues[instance].append(command)
            self._advance(group)
        else:
            assert isinstance(command, Token | Finished | Refused)
            self.answers[command.request].take(command)

    def _advance(self, instances: list[int] | tuple[int, ...]) -> None:
        for instance in instances:
            queue = self._queues[instance]
            while queue and isinstance(head := queue[0], Free):
                self.pools[instance].free(head.request)
                queue.popleft()
            if queue and self._executing[instance] is None:
                iteration = queue[0]
                assert isinstance(iteration, Iteration)
                if all(self._queues[i] and self._queues[i][0] is iteration for i in iteration.group):
                    self._execute(iteration)

    def _execute(self, iteration: Iteration) -> None:
        steps = self._checksum.run_iteration(iteration, self.pools)
        for member, instance in enumerate(iteration.group):
            self._executing[instance] = iteration
            report_s = max(self.now, self._last_report_s[instance])
            for step, tokens in enumerate(steps):
                report_s += self._rng.uniform(*self._step_s)
                mine = tuple(token for sampler, token in tokens if sampler == member)
                # Now and then a report comes twice.
                for _ in range(self._rng.choice([1] * 19 + [2]) if mine else 0):
                    self.at(report_s, StepTokens(iteration.seq, iteration.epoch, instance, step, mine))
            end_s = report_s + self._rng.uniform(0, 0.002)
            # The rank goes on at once; its report is on the way for a while.
            self.at(end_s, (instance, iteration))
            report_s = end_s + self._rng.choice([0.0, 0.0001, 0.003])
            self._last_report_s[instance] = report_s
            self.at(report_s, IterationDone(iteration.seq, iteration.epoch, instance, end_s - self.now))


@pytest.fixture
def run_histories(checksum: Any) -> Callable[[range, Callable[[int], Policy]], Counter[str]]:
    """Runs a range of seeds with a kind of policy and gives the sum of all counters."""

    def run(seeds: range, policy: Callable[[int], Policy]) -> Counter[str]:
        totals: Counter[str] = Counter()
        for seed in seeds:
            try:
                manager = checksum.run_history(seed, policy, partial(VirtualCluster, checksum))
            except AssertionError as error:
                raise AssertionError(f"history {seed}: {error}") from error
            totals.update(manager.journal.counters)
        return totals

    return run


@pytest.mark.parametrize("block", range(5))
def test_random_plans_end_with_the_right_tokens(block: int, checksum: Any, run_histories: Any) -> None:
    totals = run_histories(range(1000 * block, 1000 * (block + 1)), checksum.random_policy)
    assert totals["plan_violations"] == totals["fallback_plans"] == 0
    # The histories really go everywhere.
    for name in (*ENDS, "renewals", "scale_downs", "scale_ups", "evictions", "pauses", "drains"):
        assert totals[name] > 20, name


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("policy", ["elastic", "static"])
def test_policies_end_with_the_right_tokens(policy: str, block: int, checksum: Any, run_histories: Any) -> None:
    totals = run_histories(range(500 * block, 500 * (block + 1)), getattr(checksum, policy))
    assert totals["plan_violations"] == 0
    for name in (*ENDS, "renewals", "pauses", "drains"):
        assert totals[name] > 20, name


def test_faulty_plans_never_reach_an_instance(checksum: Any, run_histories: Any) -> None:
    totals = run_histories(range(1000), checksum.unruly_policy)
    for name in (*ENDS, "plan_violations", "fallback_plans"):
        assert totals[name] > 20, name


class WidePolicy:
    """A prompt of 100 tokens wants all instances and is left on the first; short ones live on one instance each."""

    name = "wide"

    def plan(self, view: ClusterView) -> Plan:
        idle = [instance.instance for instance in view.instances if instance.running is None]
        everything = tuple(instance.instance for instance in view.instances)
        for request in view.prefills:
            if request.prompt_tokens >= 100 and not request.running:
                if len(idle) < len(everything):
                    return Plan(drains=dict.fromkeys(everything, request.request))
                segment = SegmentPlan(request.request, request.pending_tokens, ((0, 0, request.known_tokens),))
                pauses = tuple(r.request for r in view.decodes)
                return Plan((Launch(everything, (segment,), pauses=pauses),))
        launches = []
        for instance in idle:
            mine = [r for r in view.prefills if not r.running and r.request % len(everything) == instance]
            mine = mine or [r for r in view.decodes if r.master == instance]
            segments = tuple(
                SegmentPlan(r.request, r.pending_tokens, ((instance, r.computed_tokens, r.known_tokens),)) for r in mine
            )
            rows = {r.request for r in mine}
            pauses = tuple(r.request for r in view.decodes if r.request not in rows and instance in r.holders)
            launches += [Launch((instance,), segments, pauses=pauses)] if segments else []
        return Plan(tuple(launches))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "policy", [WidePolicy(), make_policy("elastic", min_tokens_per_instance=10)], ids=lambda policy: policy.name
)
def test_a_wide_prefill_starts_within_one_control_interval_of_saturating_decode(
    policy: Policy, seed: int, checksum: Any
) -> None:
    rng = random.Random(seed)
    interval_s = 0.05
    manager = Manager(
        policy,
        SafePolicy(),
        num_instances=4,
        vocab_size=checksum.vocab,
        max_model_len=400,
        control_interval_s=interval_s,
        max_steps=16,
    )
    cluster = VirtualCluster(checksum, manager, [900] * 4, rng, step_s=(0.003, 0.006))
    submits = [Submit(request, tuple(range(1, rng.randint(2, 9))), rng.randint(90, 150)) for request in range(12)]
    submits.append(Submit(12, tuple(range(200)), 4))
    arrival_s = rng.uniform(0.2, 0.25)
    for submit in submits[:-1]:
        cluster.at(0.01 + rng.uniform(0, 0.02), submit)
    cluster.at(arrival_s, submits[-1])
    cluster.run()

    started_s, wide = next((time_s, i) for time_s, i in cluster.iterations if any(s.request == 12 for s in i.segments))
    assert sorted(wide.group) == [0, 1, 2, 3]
    # All four were decoding, several steps at a time, and none began anything else meanwhile.
    for instance in range(4):
        mine = [(time_s, i) for time_s, i in cluster.iterations if instance in i.group and time_s < started_s]
        last_s, last = mine[-1]
        assert last_s <= arrival_s
        assert last.steps > 1
    assert started_s - arrival_s <= interval_s + 0.005
    counters = manager.journal.counters
    assert counters["drains"] >= 4
    assert counters["plan_violations"] == counters["fallback_plans"] == 0
    for submit in submits:
        checksum.check_answer(submit, cluster.answers[submit.request], False, total_slots=3600, max_model_len=400)
