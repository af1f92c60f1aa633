"""Random histories of the manager on an in-process cluster: in virtual time, and on real threads with random delays."""

import heapq
import itertools
import queue
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Plan, Policy, SegmentPlan
from loongserve.policies.registry import make_policy
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Abort,
    Command,
    Event,
    Finished,
    Free,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    Refused,
    SampledToken,
    StepTokens,
    Submit,
    Token,
)
from loongserve.runtime.thread_executor import ThreadExecutor

VOCAB = 997
MAX_MODEL_LEN = 40
# Virtual seconds within which every history must end.
PATIENCE_S = 60.0
# Counters of how requests end.
ENDS = ("finished", "aborted", "refused")


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

    def __init__(
        self,
        manager: Manager,
        num_slots: list[int],
        rng: random.Random,
        checksum: Any,
        step_s: tuple[float, float] = (0.0005, 0.015),
    ) -> None:
        self.manager = manager
        self.now = 0.0
        self.answers: dict[int, Answer] = {}
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
        steps = self._checksum.run_iteration(iteration, self.pools)
        for member, instance in enumerate(iteration.group):
            self._executing[instance] = iteration
            report_s = max(self.now, self._last_report_s[instance])
            for step, tokens in enumerate(steps):
                report_s += self._rng.uniform(*self._step_s)
                mine = tuple(token for sampler, token in tokens if sampler == member)
                if mine:
                    self.at(report_s, StepTokens(iteration.seq, iteration.epoch, instance, step, mine))
            end_s = report_s + self._rng.uniform(0, 0.002)
            # The rank goes on at once; its report is on the way for a while.
            self.at(end_s, (instance, iteration))
            report_s = end_s + self._rng.choice([0.0, 0.0001, 0.003])
            self._last_report_s[instance] = report_s
            self.at(report_s, IterationDone(iteration.seq, iteration.epoch, instance, end_s - self.now))


class Mail:
    """Messages between threads: one FIFO for each ordered pair of ranks, each post after a random delay."""

    def __init__(self, size: int, checksum: Any) -> None:
        pairs = itertools.product(range(size), repeat=2)
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {pair: queue.SimpleQueue() for pair in pairs}
        self._broken = checksum.broken

    def post(self, source: int, target: int, tag: Any, payload: Any) -> None:
        self._queues[source, target].put((tag, payload))

    def wait(self, source: int, target: int, tag: Any) -> Any:
        try:
            got, payload = self._queues[source, target].get(timeout=10)
        except queue.Empty:
            raise self._broken(f"{target} waits for {tag} from {source} in vain") from None
        if got != tag:
            raise self._broken(f"{target} waits for {tag} from {source} and gets {got}")
        return payload


class ChecksumWorker:
    """One rank as a real one works: its own rows, queries to holders, blocks round the ring, states back."""

    def __init__(self, instance: int, num_slots: int, mail: Mail, seed: int, checksum: Any) -> None:
        self.pool = checksum.pool(instance, num_slots)
        self.num_slots = num_slots
        self._instance = instance
        self._mail = mail
        self._rng = random.Random(seed)
        self._checksum = checksum
        self._iteration: Iteration | None = None

    def execute(self, iteration: Iteration, emit: Callable[[int, tuple[SampledToken, ...]], None]) -> None:
        if self._iteration is not None:
            raise self._checksum.broken(f"instance {self._instance} is in two iterations at once")
        self._iteration = iteration
        for segment in iteration.segments:
            self.pool.reserve(segment.request, segment.save)
        latest: dict[int, int] = {}
        for step in range(iteration.steps):
            sampled = self._step(iteration, step, latest)
            latest = {token.request: token.token for token in sampled}
            if sampled:
                emit(step, sampled)
        self.pool.check_written(segment.request for segment in iteration.segments)
        self._iteration = None

    def free(self, request: int) -> None:
        self.pool.free(request)

    def close(self) -> None:
        pass

    def _step(self, iteration: Iteration, step: int, latest: dict[int, int]) -> tuple[SampledToken, ...]:
        model, dop = self._checksum.model, len(iteration.group)
        me = iteration.group.index(self._instance)
        tokens = {}
        for segment in iteration.segments:
            for t in range(segment.count):
                if (t + segment.rotation) % dop == me:
                    token = latest[segment.request] if step else segment.tokens[t]
                    tokens[segment.request, segment.begin + step + t] = token
        k1 = {(request, position): model.k1(position, token) for (request, position), token in tokens.items()}
        sums, saved1 = self._attend(iteration, step, 0, k1)
        k2 = {key: model.k2(key[1], sum1) for key, sum1 in sums.items()}
        sums, saved2 = self._attend(iteration, step, 1, k2)
        for (request, position), row in saved1.items():
            self.pool.write(request, position, (row, saved2[request, position]))
        sampled = []
        for segment in iteration.segments:
            if segment.sampling is not None and segment.sampler_member(dop) == me:
                position = segment.begin + step + segment.count
                token = model.next_token(sums[segment.request, position - 1])
                sampled.append(SampledToken(segment.request, position, token))
        return tuple(sampled)

    def _attend(
        self, iteration: Iteration, step: int, layer: int, fresh: dict[tuple[int, int], int]
    ) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """One layer. Returns: the sums of this member's rows, and the fresh rows that it saves."""
        group, dop = iteration.group, len(iteration.group)
        me = group.index(self._instance)
        name = (hash(iteration), step, layer)
        asked = {peer: self._resident(iteration, step, asks=me, holds=peer) for peer in range(dop)}
        asking = {peer: self._resident(iteration, step, asks=peer, holds=me) for peer in range(dop)}
        for peer in range(dop):
            if peer != me and asked[peer]:
                self._post(group[peer], ("query", name), sorted(asked[peer]))
        for peer in range(dop):
            if peer != me and asking[peer]:
                requests = self._mail.wait(group[peer], self._instance, ("query", name))
                assert requests == sorted(asking[peer])

        sums = dict.fromkeys(fresh, 0)
        saved = {}
        owners = {s.request: self._checksum.savers(s, iteration.steps) for s in iteration.segments}
        block = fresh
        for turn in range(dop):
            if turn:
                self._post(group[(me + 1) % dop], ("ring", name, turn), block)
                block = self._mail.wait(group[me - 1], self._instance, ("ring", name, turn))
            for (request, position), row in block.items():
                if owners[request][position] == self._instance:
                    saved[request, position] = row
                for mine in sums:
                    if mine[0] == request and mine[1] >= position:
                        sums[mine] += row

        states = {me: self._states(asking[me], layer)}
        for peer in range(dop):
            if peer != me and asking[peer]:
                self._post(group[peer], ("state", name), self._states(asking[peer], layer))
        for peer in range(dop):
            if peer != me and asked[peer]:
                states[peer] = self._mail.wait(group[peer], self._instance, ("state", name))
        for state in states.values():
            for mine in sums:
                sums[mine] += state.get(mine[0], 0)
        return sums, saved

    def _resident(self, iteration: Iteration, step: int, asks: int, holds: int) -> dict[int, list[tuple[int, int]]]:
        """Request -> ranges that one member holds and another has rows to attend with."""
        dop = len(iteration.group)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for segment in iteration.segments:
            if not any((t + segment.rotation) % dop == asks for t in range(segment.count)):
                continue
            begin = segment.begin + step
            for instance, low, high in segment.resident + (segment.save if step else ()):
                if instance == iteration.group[holds] and low < begin:
                    ranges.setdefault(segment.request, []).append((low, min(high, begin)))
        return ranges

    def _states(self, ranges: dict[int, list[tuple[int, int]]], layer: int) -> dict[int, int]:
        return {
            request: sum(row[layer] for low, high in pieces for row in self.pool.read(request, low, high))
            for request, pieces in ranges.items()
        }

    def _post(self, target: int, tag: Any, payload: Any) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.uniform(0, 0.001))
        self._mail.post(self._instance, target, tag, payload)


class ThreadCluster:
    """The same on real threads: a ``ThreadExecutor`` over workers that exchange messages."""

    def __init__(self, manager: Manager, num_slots: list[int], rng: random.Random, checksum: Any) -> None:
        self.manager = manager
        self.answers: dict[int, Answer] = {}
        self._scheduled: list[tuple[float, int, Event]] = []
        self._reports: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: dict[int, set[int]] = {}
        mail = Mail(len(num_slots), checksum)
        self._workers = [
            ChecksumWorker(instance, slots, mail, rng.randrange(2**32), checksum)
            for instance, slots in enumerate(num_slots)
        ]
        self.pools = [worker.pool for worker in self._workers]

    def at(self, time_s: float, event: Event) -> None:
        heapq.heappush(self._scheduled, (time_s, len(self._scheduled), event))

    def run(self, each: Callable[[], None] = lambda: None) -> None:
        executor = ThreadExecutor(self._workers, self._reports.put, close_timeout_s=10)
        begin_s = time.monotonic()
        num_ready = 0
        try:
            while self._scheduled or self._open or num_ready < len(self._workers):
                assert time.monotonic() - begin_s < PATIENCE_S, "the history does not end"
                event = self._next(begin_s)
                if isinstance(event, Ready):
                    num_ready += 1
                if isinstance(event, IterationDone):
                    self._open[event.seq].discard(event.instance)
                    if not self._open[event.seq]:
                        del self._open[event.seq]
                if event is None:
                    continue
                if isinstance(event, IterationFailed):
                    raise AssertionError(event.message)
                for command in self.manager.handle(event, time.monotonic()):
                    if isinstance(command, Iteration | Free):
                        executor.submit(command)
                        if isinstance(command, Iteration):
                            self._open[command.seq] = set(command.group)
                    else:
                        self.answers.setdefault(command.request, Answer()).take(command)
                each()
        finally:
            executor.close()

    def _next(self, begin_s: float) -> Event | None:
        wait_s = self._scheduled[0][0] - (time.monotonic() - begin_s) if self._scheduled else 1.0
        if wait_s > 0:
            try:
                return self._reports.get(timeout=wait_s)
            except queue.Empty:
                return None
        return heapq.heappop(self._scheduled)[2]


def random_submit(rng: random.Random, request: int) -> Submit:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 3, rng.randint(1, 24)])))
    stop = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 60])))
    return Submit(request, prompt, rng.choice([1, 2, rng.randint(1, 10)]), stop_tokens=stop)


def check_answer(
    checksum: Any, submit: Submit, answer: Answer, aborted: bool, total_slots: int, max_model_len: int = MAX_MODEL_LEN
) -> None:
    """A request was refused rightly, or has the right tokens and the right end."""
    max_new_tokens = min(submit.max_new_tokens, max_model_len - len(submit.tokens))
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


def run_history(
    seed: int, checksum: Any, policy: Callable[[int], Policy], make_cluster: type = VirtualCluster
) -> Manager:
    """One random history: arrivals, lengths, stops, aborts on 2 to 4 instances with unequal pools."""
    rng = random.Random(seed)
    num_slots = [rng.choice([0, rng.randint(1, 8), rng.randint(4, 24)]) for _ in range(rng.randint(2, 4))]
    num_slots[rng.randrange(len(num_slots))] += 8
    manager = Manager(
        policy(seed),
        SafePolicy(),
        num_instances=len(num_slots),
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        control_interval_s=rng.choice([0.001, 0.05]),
    )
    cluster = make_cluster(manager, num_slots, rng, checksum)
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
    assert sum(counters[name] for name in ENDS) == len(cluster.answers)
    assert counters["failed"] == 0
    return manager


def run_histories(seeds: range, checksum: Any, policy: Callable[[int], Policy]) -> Counter[str]:
    """Returns: the sum of all counters."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        try:
            totals.update(run_history(seed, checksum, policy).journal.counters)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
    return totals


def elastic(seed: int) -> Policy:
    rng = random.Random(seed)
    return make_policy("elastic", min_tokens_per_instance=rng.randint(1, 6), max_batch_tokens=rng.randint(1, 40))


def static(seed: int) -> Policy:
    return make_policy("static", dop=random.Random(seed).randint(1, 3))


@pytest.mark.parametrize("block", range(5))
def test_random_plans_end_with_the_right_tokens(block: int, checksum: Any, random_policy: Any) -> None:
    totals = run_histories(range(1000 * block, 1000 * (block + 1)), checksum, random_policy)
    assert totals["plan_violations"] == totals["fallback_plans"] == 0
    # The histories really go everywhere.
    for name in (*ENDS, "renewals", "scale_downs", "scale_ups", "evictions", "pauses", "drains"):
        assert totals[name] > 20, name


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("policy", [elastic, static])
def test_policies_end_with_the_right_tokens(policy: Callable[[int], Policy], block: int, checksum: Any) -> None:
    totals = run_histories(range(500 * block, 500 * (block + 1)), checksum, policy)
    assert totals["plan_violations"] == 0
    for name in (*ENDS, "renewals", "pauses", "drains"):
        assert totals[name] > 20, name


@pytest.mark.parametrize("block", range(1))
def test_faulty_plans_never_reach_an_instance(block: int, checksum: Any, unruly_policy: Any) -> None:
    totals = run_histories(range(1000 * block, 1000 * (block + 1)), checksum, unruly_policy)
    for name in (*ENDS, "plan_violations", "fallback_plans"):
        assert totals[name] > 20, name


@pytest.mark.parametrize("block", range(4))
def test_threads_with_random_delays_give_the_right_tokens(block: int, checksum: Any, random_policy: Any) -> None:
    for seed in range(15 * block, 15 * (block + 1)):
        counters = run_history(seed, checksum, random_policy, ThreadCluster).journal.counters
        assert counters["plan_violations"] == counters["fallback_plans"] == 0, f"history {seed}"


class OverlapPolicy:
    """Request 0 lives on instances {0, 1}, request 1 on {1, 2}: they take turns, by drains of instance 1."""

    name = "overlap"

    def plan(self, view: ClusterView) -> Plan:
        launches: list[Launch] = []
        drains = {}
        idle = {instance.instance for instance in view.instances if instance.running is None}
        waiting = sorted((*view.prefills, *view.decodes), key=lambda r: (r.output_tokens, r.request))
        for request in waiting:
            group = (request.request, request.request + 1)
            if request.running:
                continue
            if not idle.issuperset(group):
                drains[1] = request.request
                continue
            begin, end = request.computed_tokens, request.known_tokens
            save = tuple((group[position % 2], position, position + 1) for position in range(begin, end))
            pauses = tuple(r.request for r in view.decodes if r is not request and r.holders & set(group))
            segment = SegmentPlan(request.request, end - begin, save, rotation=end % 2)
            launches.append(Launch(group, (segment,), pauses=pauses))
            idle -= set(group)
        return Plan(tuple(launches), drains)


@pytest.mark.parametrize("make_cluster", [VirtualCluster, ThreadCluster])
def test_overlapping_groups_take_turns(make_cluster: type, checksum: Any) -> None:
    manager = Manager(
        OverlapPolicy(), OverlapPolicy(), num_instances=3, vocab_size=VOCAB, max_model_len=40, control_interval_s=1e-6
    )
    cluster = make_cluster(manager, [40, 40, 40], random.Random(1), checksum)
    submits = [Submit(0, (1, 2, 3), 12), Submit(1, (4, 5), 12)]
    for submit in submits:
        cluster.at(0.02, submit)
    cluster.run()
    for submit in submits:
        check_answer(checksum, submit, cluster.answers[submit.request], aborted=False, total_slots=120)
    assert manager.journal.counters["plan_violations"] == manager.journal.counters["fallback_plans"] == 0
    # Neither waits for the other's end.
    assert manager.journal.counters["pauses"] >= 10
    assert manager.ledger.total_free == 120


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


@pytest.mark.parametrize("seed", range(10))
def test_a_wide_prefill_starts_within_one_control_interval_of_saturating_decode(seed: int, checksum: Any) -> None:
    rng = random.Random(seed)
    interval_s = 0.05
    manager = Manager(
        WidePolicy(),
        WidePolicy(),
        num_instances=4,
        vocab_size=VOCAB,
        max_model_len=400,
        control_interval_s=interval_s,
        max_steps=16,
    )
    cluster = VirtualCluster(manager, [800] * 4, rng, checksum, step_s=(0.003, 0.006))
    submits = [Submit(request, tuple(range(1, rng.randint(2, 9))), rng.randint(90, 150)) for request in range(12)]
    submits.append(Submit(12, tuple(range(200)), 4))
    arrival_s = rng.uniform(0.2, 0.25)
    for submit in submits[:-1]:
        cluster.at(0.01 + rng.uniform(0, 0.02), submit)
    cluster.at(arrival_s, submits[-1])
    cluster.run()

    started_s, wide = next((time_s, i) for time_s, i in cluster.iterations if len(i.group) == 4)
    assert {segment.request for segment in wide.segments} == {12}
    # All four were decoding, several steps at a time, and none began anything else meanwhile.
    before = [(time_s, i) for time_s, i in cluster.iterations if time_s < started_s]
    for instance in range(4):
        last_s, last = [(time_s, i) for time_s, i in before if i.group == (instance,)][-1]
        assert last_s <= arrival_s
        assert last.steps > 1
    assert started_s - arrival_s <= interval_s + 0.005
    assert manager.journal.counters["drains"] == 4
    assert manager.journal.counters["scale_downs"] == 1
    assert manager.journal.counters["plan_violations"] == manager.journal.counters["fallback_plans"] == 0
    for submit in submits:
        check_answer(checksum, submit, cluster.answers[submit.request], False, total_slots=3200, max_model_len=400)
