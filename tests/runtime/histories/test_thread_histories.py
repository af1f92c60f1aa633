"""Random histories of the manager on real threads, whose workers exchange messages after random delays."""

import heapq
import itertools
import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Plan, SegmentPlan
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Event,
    Free,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    SampledToken,
    Submit,
)
from loongserve.runtime.thread_executor import ThreadExecutor

# Seconds within which every history must end.
PATIENCE_S = 60.0


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
    """A manager over a ``ThreadExecutor`` whose workers exchange messages, in real time."""

    def __init__(self, checksum: Any, manager: Manager, num_slots: list[int], rng: random.Random) -> None:
        self.manager = manager
        self.answers: defaultdict[int, Any] = defaultdict(checksum.answer)
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
                        self.answers[command.request].take(command)
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


@pytest.mark.parametrize("policy", ["random_policy", "elastic", "static"])
def test_threads_with_random_delays_give_the_right_tokens(policy: str, checksum: Any) -> None:
    for seed in range(20):
        manager = checksum.run_history(seed, getattr(checksum, policy), partial(ThreadCluster, checksum))
        assert manager.journal.counters["plan_violations"] == 0, f"history {seed}"


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


@pytest.mark.parametrize("seed", range(4))
def test_overlapping_groups_take_turns(seed: int, checksum: Any) -> None:
    manager = Manager(
        OverlapPolicy(),
        OverlapPolicy(),
        num_instances=3,
        vocab_size=checksum.vocab,
        max_model_len=40,
        control_interval_s=1e-6,
    )
    cluster = ThreadCluster(checksum, manager, [40, 40, 40], random.Random(seed))
    submits = [Submit(0, (1, 2, 3), 12), Submit(1, (4, 5), 12)]
    for submit in submits:
        cluster.at(0.02, submit)
    cluster.run()
    for submit in submits:
        checksum.check_answer(submit, cluster.answers[submit.request], aborted=False, total_slots=120)
    assert manager.journal.counters["plan_violations"] == manager.journal.counters["fallback_plans"] == 0
    # Neither waits for the other's end.
    assert manager.journal.counters["pauses"] >= 10
    assert manager.ledger.total_free == 120
