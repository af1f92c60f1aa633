"""Random histories of the manager on an in-process cluster: in virtual time, and on real threads with random delays."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Abort,
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

VOCAB = 997
MAX_MODEL_LEN = 40
# Virtual seconds within which every history must end.
PATIENCE_S = 60.0


@dataclass
class Answer:
    """What the front end has got for one request."""

    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    refused: Refused | None = None

    def take(self, event: Command) -> None:
        assert self.finished is None
        assert self.refused is None
        if isinstance(event, Token):
            assert event.index == len(self.tokens)
            self.tokens.append(event.token)
        elif isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Refused):
            self.refused = event


class VirtualCluster:
    """Ranks in virtual time: each obeys its queue; an iteration starts when it is first in every member's queue."""

    def __init__(self, manager: Manager, num_slots: list[int], rng: random.Random, checksum: Any) -> None:
        self.manager = manager
        self.now = 0.0
        self.answers: dict[int, Answer] = {}
        self.iterations: list[Iteration] = []
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
                self.iterations.append(command)
                for instance in group:
                    assert not any(isinstance(waiting, Iteration) for waiting in self._queues[instance]), (
                        f"instance {instance} is in two groups at once"
                    )
            for instance in group:
                self._queues[instance].append(command)
            self._advance(group)
        else:
            assert isinstance(command, Token | Finished | Refused)
            self.answers.setdefault(command.request, Answer()).take(command)

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
        step_s = self._rng.uniform(0.001, 0.01)
        steps = self._checksum.run_iteration(iteration, self.pools)
        for member, instance in enumerate(iteration.group):
            self._executing[instance] = iteration
            report_s = max(self.now, self._last_report_s[instance])
            for step, tokens in enumerate(steps):
                report_s += step_s * self._rng.uniform(0.5, 1.5)
                mine = tuple(token for sampler, token in tokens if sampler == member)
                if mine:
                    self.at(report_s, StepTokens(iteration.seq, iteration.epoch, instance, step, mine))
            end_s = report_s + self._rng.uniform(0, 0.002)
            # The rank goes on at once; its report is on the way for a while.
            self.at(end_s, (instance, iteration))
            report_s = end_s + self._rng.choice([0.0, 0.0001, 0.003])
            self._last_report_s[instance] = report_s
            self.at(report_s, IterationDone(iteration.seq, iteration.epoch, instance, end_s - self.now))


def random_submit(rng: random.Random, request: int) -> Submit:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 3, rng.randint(1, 24)])))
    stop = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 60])))
    return Submit(request, prompt, rng.choice([1, 2, rng.randint(1, 10)]), stop_tokens=stop)


def check_answer(checksum: Any, submit: Submit, answer: Answer, aborted: bool, total_slots: int) -> None:
    """A request was refused rightly, or has the right tokens and the right end."""
    max_new_tokens = min(submit.max_new_tokens, MAX_MODEL_LEN - len(submit.tokens))
    fits = len(submit.tokens) + max_new_tokens - 1 <= total_slots
    if answer.refused is not None:
        assert not fits
        assert answer.refused.code == "INVALID_ARGUMENT"
        return
    finished = answer.finished
    assert finished is not None, "never finished"
    right = checksum.model.generate(submit.tokens, max_new_tokens, frozenset(submit.stop_tokens))
    assert answer.tokens == right[: len(answer.tokens)]
    assert (finished.prompt_tokens, finished.output_tokens) == (len(submit.tokens), len(answer.tokens))
    if finished.reason == "abort":
        assert aborted
        return
    assert fits
    assert answer.tokens == right
    assert finished.reason == ("stop" if right[-1] in submit.stop_tokens else "length")


def run_history(seed: int, checksum: Any, make_policy: Callable[[int], Any]) -> VirtualCluster:
    """One random history: arrivals, lengths, stops, aborts on 2 to 4 instances with unequal pools."""
    rng = random.Random(seed)
    num_slots = [rng.choice([0, rng.randint(1, 8), rng.randint(4, 24)]) for _ in range(rng.randint(2, 4))]
    num_slots[rng.randrange(len(num_slots))] += 8
    manager = Manager(
        make_policy(seed),
        make_policy(seed + 1),
        num_instances=len(num_slots),
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        control_interval_s=rng.choice([0.001, 0.05]),
    )
    cluster = VirtualCluster(manager, num_slots, rng, checksum)
    submits = [random_submit(rng, request) for request in range(rng.randint(1, 6))]
    aborted = set()
    for submit in submits:
        arrival_s = rng.uniform(0, 0.1)
        cluster.at(arrival_s, submit)
        if rng.random() < 0.2:
            aborted.add(submit.request)
            for _ in range(rng.randint(1, 2)):
                cluster.at(arrival_s + rng.uniform(0, 0.1), Abort(submit.request))
    cluster.at(rng.uniform(0, 0.2), Abort(len(submits)))
    cluster.run(each=manager.ledger.check if seed % 50 == 0 else lambda: None)

    for submit in submits:
        answer = cluster.answers.get(submit.request, Answer())
        check_answer(checksum, submit, answer, submit.request in aborted, sum(num_slots))
    manager.ledger.check()
    assert manager.ledger.total_free == sum(num_slots)
    assert [pool.used for pool in cluster.pools] == [0] * len(num_slots)
    counters = manager.journal.counters
    assert counters["admitted"] + counters["refused"] == len(cluster.answers)
    assert counters["admitted"] == counters["finished"] + counters["aborted"]
    assert counters["failed"] == 0
    return cluster


@pytest.mark.parametrize("block", range(10))
def test_random_histories_end_with_the_right_tokens(block: int, checksum: Any, random_policy: Any) -> None:
    totals: Counter[str] = Counter()
    for seed in range(1000 * block, 1000 * (block + 1)):
        try:
            counters = run_history(seed, checksum, random_policy).manager.journal.counters
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
        totals.update(counters)
        assert counters["plan_violations"] == counters["fallback_plans"] == 0, f"history {seed}"
    # The histories really go everywhere.
    for name in (
        "finished",
        "aborted",
        "refused",
        "renewals",
        "scale_downs",
        "scale_ups",
        "evictions",
        "pauses",
        "drains",
    ):
        assert totals[name] > 20, name
