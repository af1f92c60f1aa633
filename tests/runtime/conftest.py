"""For the manager: one that is fed by hand, random plans, and a cluster without tensors whose pools notice misuse."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Placement, Plan, RequestView, SegmentPlan
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Command,
    Event,
    Iteration,
    IterationDone,
    Ready,
    SampledToken,
    Segment,
    StepTokens,
)

VOCAB = 997

# (k1, k2): what the two layers of the model keep of one position.
Row = tuple[int, int]


class ProtocolBroken(AssertionError):
    """Something that no rank may ever see."""


class ChecksumModel:
    """A causal model in integers: every token depends on all tokens before it, and each sum on every KV row.

    Layer 1 keeps ``k1 = hash(position, token)`` and attends by the sum of k1; layer 2 keeps ``k2 = hash(position, sum
    of k1)`` and attends by the sum of k2, from which the next token is drawn. A row that is missing, stale, twice there
    or computed from wrong rows changes every token after it.
    """

    @staticmethod
    def k1(position: int, token: int) -> int:
        return hash((1, position, token))

    @staticmethod
    def k2(position: int, sum1: int) -> int:
        return hash((2, position, sum1))

    @staticmethod
    def next_token(sum2: int) -> int:
        return hash((3, sum2)) % VOCAB

    @classmethod
    def generate(cls, prompt: Sequence[int], num_tokens: int, stop: Iterable[int] = ()) -> list[int]:
        """The tokens that follow a prompt, on one machine without any cache."""
        sum1 = sum2 = position = 0
        output: list[int] = []
        for token in prompt:
            sum1 += cls.k1(position, token)
            sum2 += cls.k2(position, sum1)
            position += 1
        while len(output) < num_tokens and not (output and output[-1] in stop):
            output.append(cls.next_token(sum2))
            sum1 += cls.k1(position, output[-1])
            sum2 += cls.k2(position, sum1)
            position += 1
        return output


class ChecksumPool:
    """One instance's KV rows; raises ProtocolBroken on any use that the manager must not command."""

    def __init__(self, instance: int, num_slots: int) -> None:
        self.instance = instance
        self.num_slots = num_slots
        self.used = 0
        # request -> position -> its row; None: reserved, not yet written.
        self._rows: dict[int, dict[int, Row | None]] = {}

    def reserve(self, request: int, save: Placement) -> None:
        rows = self._rows.setdefault(request, {})
        for instance, begin, end in save:
            if instance != self.instance:
                continue
            for position in range(begin, end):
                if position in rows:
                    raise ProtocolBroken(f"request {request}: position {position} is on {self.instance} already")
                rows[position] = None
            self.used += end - begin
        if not rows:
            del self._rows[request]
        if self.used > self.num_slots:
            raise ProtocolBroken(f"instance {self.instance}: {self.used} of {self.num_slots} slots used")

    def write(self, request: int, position: int, row: Row) -> None:
        rows = self._rows.get(request, {})
        if rows.get(position, row) is not None:
            raise ProtocolBroken(f"request {request}: position {position} has no reserved slot on {self.instance}")
        rows[position] = row

    def read(self, request: int, begin: int, end: int) -> list[Row]:
        rows = self._rows.get(request, {})
        found = [rows.get(position) for position in range(begin, end)]
        if None in found:
            raise ProtocolBroken(f"request {request}: positions [{begin}, {end}) are not all on {self.instance}")
        return [row for row in found if row is not None]

    def free(self, request: int) -> None:
        self.used -= len(self._rows.pop(request, ()))

    def check_written(self, requests: Iterable[int]) -> None:
        """After an iteration: every reserved slot of its rows was written."""
        for request in requests:
            if None in self._rows.get(request, {}).values():
                raise ProtocolBroken(f"request {request}: a reserved slot on {self.instance} was not written")


def savers(segment: Segment, steps: int) -> dict[int, int]:
    """Which instance saves which position, over all steps."""
    saved = {position: instance for instance, begin, end in segment.save for position in range(begin, end)}
    end = segment.begin + segment.count + steps - 1
    if sum(end - begin for _, begin, end in segment.save) != len(saved) or set(saved) != set(range(segment.begin, end)):
        raise ProtocolBroken(f"{segment} does not save [{segment.begin}, {end}) once")
    return saved


def run_iteration(iteration: Iteration, pools: Sequence[ChecksumPool]) -> list[list[tuple[int, SampledToken]]]:
    """Run all members of an iteration at once. Returns: by step, (index of the member that sampled, token)."""
    group = iteration.group
    for instance in group:
        for segment in iteration.segments:
            pools[instance].reserve(segment.request, segment.save)
    latest: dict[int, int] = {}
    steps = []
    for step in range(iteration.steps):
        sampled = []
        for segment in iteration.segments:
            tokens = (latest[segment.request],) if step else segment.tokens
            token = _run_segment(segment, segment.begin + step, tokens, iteration, pools)
            if segment.sampling is not None:
                latest[segment.request] = token
                position = segment.begin + segment.count + step
                member = segment.sampler_member(len(group))
                sampled.append((member, SampledToken(segment.request, position, token)))
        steps.append(sampled)
    for instance in group:
        pools[instance].check_written(segment.request for segment in iteration.segments)
    return steps


def _run_segment(
    segment: Segment, begin: int, tokens: Sequence[int], iteration: Iteration, pools: Sequence[ChecksumPool]
) -> int:
    sum1 = sum2 = num_rows = 0
    placement = segment.resident if begin == segment.begin else segment.resident + segment.save
    for instance, low, high in placement:
        if instance not in iteration.group:
            raise ProtocolBroken(f"request {segment.request}: holder {instance} is not in group {iteration.group}")
        for k1, k2 in pools[instance].read(segment.request, low, min(high, begin)):
            sum1 += k1
            sum2 += k2
            num_rows += 1
    if num_rows != begin:
        raise ProtocolBroken(f"request {segment.request}: {num_rows} rows are placed for positions [0, {begin})")
    saved = savers(segment, iteration.steps)
    for position, token in enumerate(tokens, begin):
        k1 = ChecksumModel.k1(position, token)
        sum1 += k1
        k2 = ChecksumModel.k2(position, sum1)
        sum2 += k2
        pools[saved[position]].write(segment.request, position, (k1, k2))
    return ChecksumModel.next_token(sum2)


class RandomPolicy:
    """Legal plans without sense: random groups, chunks, placements, rotations, steps, pauses, evictions and drains.

    It launches something whenever nothing runs, evicting the youngest until something fits.
    """

    name = "random"

    def __init__(self, seed: int, *, eviction_rate: float = 0.04, drain_rate: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._eviction_rate = eviction_rate
        self._drain_rate = drain_rate

    def plan(self, view: ClusterView) -> Plan:
        chance = self._random.random
        requests = {r.request: r for r in (*view.prefills, *view.decodes) if not r.running}
        evictable = [name for name, r in requests.items() if r.holders]
        evictions = [name for name in evictable if chance() < self._eviction_rate]
        running = any(instance.running is not None for instance in view.instances)
        while True:
            launches = [] if running and chance() < 0.1 else self._launches(view, requests, evictions)
            if launches or running or not requests:
                break
            evictions += [max(left) for left in [set(evictable) - set(evictions)] if left]
        drains = {
            instance.instance: self._random.choice([r.request for r in (*view.prefills, *view.decodes)])
            for instance in view.instances
            if chance() < self._drain_rate
        }
        return Plan(tuple(launches), drains, evictions=tuple(evictions))

    def _launches(self, view: ClusterView, requests: dict[int, RequestView], evictions: Sequence[int]) -> list[Launch]:
        free = {instance.instance: instance.free_slots for instance in view.instances}
        for name in evictions:
            for instance, begin, end in requests[name].placement:
                free[instance] += end - begin
        holders = {name: set() if name in evictions else set(r.holders) for name, r in requests.items()}
        computed = {name: 0 if name in evictions else r.computed_tokens for name, r in requests.items()}
        decodes = {r.request for r in view.decodes} - set(evictions)
        idle = {instance.instance for instance in view.instances if instance.running is None}
        waiting = list(requests)
        self._random.shuffle(waiting)
        launches = []
        for first in waiting:
            if not idle or not holders[first] <= idle:
                continue
            extra = [instance for instance in sorted(idle - holders[first]) if self._random.random() < 0.5]
            group = [*sorted(holders[first]), *extra] or [min(idle, key=lambda i: (-free[i], i))]
            self._random.shuffle(group)
            rows = [first] + [
                name
                for name in waiting
                if name != first and holders[name] <= set(group) and self._random.random() < 0.6
            ]
            rows = [name for name in rows if name in requests]
            steps = self._random.randint(1, 4) if decodes.issuperset(rows) else 1
            segments = []
            for name in rows:
                segment = self._segment(requests[name], computed[name], group, free, steps)
                if segment is not None:
                    segments.append(segment)
                    del requests[name]
            if not segments:
                continue
            launched = {segment.request for segment in segments}
            waiting = [name for name in waiting if name not in launched]
            pauses = tuple(name for name in sorted(decodes - launched) if holders.get(name, set()) & set(group))
            launches.append(Launch(tuple(group), tuple(segments), steps, pauses))
            idle -= set(group)
        return launches

    def _segment(
        self, request: RequestView, computed: int, group: list[int], free: dict[int, int], steps: int
    ) -> SegmentPlan | None:
        """A segment that fits the free slots of the group, which it takes; None when none does."""
        pending = request.known_tokens - computed
        room = sum(free[instance] for instance in group)
        count = pending if self._random.random() < 0.6 else self._random.randint(1, pending)
        count = min(count, room - steps + 1)
        if count < 1 or computed + count + steps - 1 > request.max_kv_tokens:
            return None
        save = []
        position, end = computed, computed + count + steps - 1
        while position < end:
            instance = self._random.choice([i for i in group if free[i] > 0])
            size = self._random.randint(1, min(free[instance], end - position))
            if self._random.random() < 0.5:
                size = min(free[instance], end - position)
            save.append((instance, position, position + size))
            free[instance] -= size
            position += size
        self._random.shuffle(save)
        return SegmentPlan(request.request, count, tuple(save), self._random.randrange(len(group)))


class UnrulyPolicy(RandomPolicy):
    """Random plans, many of which break an invariant, and some of which are none at all."""

    name = "unruly"

    def plan(self, view: ClusterView) -> Plan:
        plan = super().plan(view)
        if self._random.random() < 0.5 or not plan.launches:
            return plan
        match self._random.randrange(9):
            case 0:
                raise RuntimeError("no plan today")
            case 1:
                return None  # type: ignore[return-value]
            case 2:
                return replace(plan, launches=plan.launches * 2)
            case 3:
                return replace(plan, launches=())
            case 4:
                return replace(plan, drains={99: 0})
        launch, *others = plan.launches
        segment, *rest = launch.segments
        match self._random.randrange(5):
            case 0:
                segment = replace(segment, count=segment.count + 1)
            case 1:
                segment = replace(segment, save=segment.save[:-1])
            case 2:
                segment = replace(segment, save=tuple((0, begin, end) for _, begin, end in segment.save))
            case 3:
                segment = replace(segment, request=segment.request + 1)
            case 4:
                launch = replace(launch, group=launch.group[1:])
        return replace(plan, launches=(replace(launch, segments=(segment, *rest)), *others))


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


@pytest.fixture
def unruly_policy() -> type[UnrulyPolicy]:
    return UnrulyPolicy


@pytest.fixture
def random_policy() -> type[RandomPolicy]:
    return RandomPolicy


@pytest.fixture
def checksum() -> SimpleNamespace:
    """The cluster without tensors: ``model``, ``pool``, ``run_iteration``, ``savers``, ``broken``, ``vocab``."""
    return SimpleNamespace(
        model=ChecksumModel,
        pool=ChecksumPool,
        run_iteration=run_iteration,
        savers=savers,
        broken=ProtocolBroken,
        vocab=VOCAB,
    )
