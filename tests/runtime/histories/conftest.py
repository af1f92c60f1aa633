"""Random histories: a model of sums over KV rows, pools that notice misuse, random plans, and what must hold after."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Placement, Plan, Policy, RequestView, SegmentPlan
from loongserve.policies.registry import make_policy
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Abort,
    Command,
    Finished,
    Iteration,
    Refused,
    SampledToken,
    Segment,
    Submit,
    Token,
)

VOCAB = 997
MAX_MODEL_LEN = 40
# Counters of how requests end.
ENDS = ("finished", "aborted", "refused")

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


def random_submit(rng: random.Random, request: int) -> Submit:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 3, rng.randint(1, 24)])))
    stop = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 60])))
    return Submit(request, prompt, rng.choice([1, 2, rng.randint(1, 10)]), stop_tokens=stop)


def check_answer(
    submit: Submit, answer: Answer, aborted: bool, total_slots: int, max_model_len: int = MAX_MODEL_LEN
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
    right = ChecksumModel.generate(submit.tokens, max_new_tokens, frozenset(submit.stop_tokens))
    assert answer.tokens == right[: len(answer.tokens)]
    assert (finished.prompt_tokens, finished.output_tokens) == (len(submit.tokens), len(answer.tokens))
    if finished.reason == "abort":
        assert aborted
        return
    assert fits
    assert answer.tokens == right
    assert finished.reason == ("stop" if right[-1] in submit.stop_tokens else "length")


def run_history(seed: int, policy: Callable[[int], Policy], make_cluster: Callable[..., Any]) -> Manager:
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
    cluster = make_cluster(manager, num_slots, rng)
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
        check_answer(submit, answer, submit.request in aborted, sum(num_slots))
    manager.ledger.check()
    assert manager.ledger.total_free == sum(num_slots)
    assert [pool.used for pool in cluster.pools] == [0] * len(num_slots)
    counters = manager.journal.counters
    assert sum(counters[name] for name in ENDS) == len(cluster.answers)
    assert counters["failed"] == 0
    return manager


def elastic(seed: int) -> Policy:
    rng = random.Random(seed)
    return make_policy("elastic", min_tokens_per_instance=rng.randint(1, 6), max_batch_tokens=rng.randint(1, 40))


def static(seed: int) -> Policy:
    return make_policy("static", dop=random.Random(seed).randint(1, 3))


@pytest.fixture
def checksum() -> SimpleNamespace:
    """All of the above for the tests."""
    return SimpleNamespace(
        model=ChecksumModel,
        pool=ChecksumPool,
        savers=savers,
        run_iteration=run_iteration,
        broken=ProtocolBroken,
        random_policy=RandomPolicy,
        unruly_policy=UnrulyPolicy,
        elastic=elastic,
        static=static,
        answer=Answer,
        run_history=run_history,
        check_answer=check_answer,
        vocab=VOCAB,
    )
