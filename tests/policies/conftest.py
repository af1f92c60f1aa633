"""Views by hand and by hypothesis, and a cluster in virtual time that does a manager's work and checks every plan."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

import pytest
from hypothesis import strategies as st

from loongserve.kvpool.ledger import PlacementLedger
from loongserve.policies.base import ClusterView, InstanceView, Launch, Placement, Plan, Policy, RequestView
from loongserve.runtime.invariants import check_plan


@dataclass
class Iteration:
    """One entry of the log."""

    kind: str
    begin_s: float
    end_s: float
    group: tuple[int, ...]
    requests: tuple[int, ...]
    pauses: tuple[int, ...]


@dataclass
class Cluster:
    """Instances that run a policy's plans. A decode step lasts 1 s, a prefill ``prefill_s_per_token`` a token."""

    policy: Policy
    slots: dict[int, int]
    prefill_s_per_token: float = 0.1
    fallback: Policy | None = None
    now_s: float = 0.0
    log: list[Iteration] = field(default_factory=list)
    # request -> times of its tokens
    tokens: dict[int, list[float]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    max_placement: dict[int, int] = field(default_factory=Counter)
    num_fallbacks: int = 0
    num_evictions: int = 0

    def __post_init__(self) -> None:
        self.ledger = PlacementLedger(self.slots)
        self.live: dict[int, RequestView] = {}
        self.running: dict[int, tuple[Iteration, Launch]] = {}
        self.drains: dict[int, int] = {}
        self.events: list[tuple[float, int, object]] = []
        self.order = count()

    def submit(self, request: int, prompt: int, output: int = 1, at_s: float = 0.0) -> None:
        view = RequestView(request, at_s, prompt, 0, prompt, prompt + output - 1)
        heapq.heappush(self.events, (at_s, next(self.order), view))

    def resume(self, request: int, placement: Placement, output: int, at_s: float = 0.0) -> None:
        """Add a request that is decoding, with KV as given."""
        self.ledger.place(request, placement)
        computed = max(end for _, _, end in placement)
        view = RequestView(request, at_s, computed, computed, computed + 1, computed + output)
        heapq.heappush(self.events, (at_s, next(self.order), view))

    def view(self) -> ClusterView:
        requests = []
        for request in self.live.values():
            placement = self.ledger.resident(request.request, request.computed_tokens)
            master = placement[-1][0] if placement else None
            requests.append(replace(request, placement=placement, master=master))
        is_decode = {r.request: r.computed_tokens > 0 and r.pending_tokens == 1 for r in requests}
        instances = tuple(
            InstanceView(
                instance=i,
                num_slots=num_slots,
                free_slots=self.ledger.free_slots(i),
                running=self.running[i][0].kind if i in self.running else None,  # type: ignore[arg-type]
                drained_for=self.drains.get(i) if self.drains.get(i) in self.live else None,
            )
            for i, num_slots in sorted(self.slots.items())
        )
        return ClusterView(
            self.now_s,
            instances,
            tuple(r for r in requests if not is_decode[r.request]),
            tuple(r for r in requests if is_decode[r.request]),
        )

    def run(self, until_s: float = 1e9, max_events: int = 20_000) -> None:
        """Run until all requests have ended, or until a time. Fails on an illegal plan and on a stall."""
        for _ in range(max_events):
            if not self.events or self.events[0][0] > until_s:
                break
            self.now_s, _, event = heapq.heappop(self.events)
            if isinstance(event, RequestView):
                self.live[event.request] = event
                self.tokens[event.request] = []
                changed = True
            else:
                assert isinstance(event, Iteration)
                changed = self._end(event)
            if changed and self.live:
                self._plan()
        else:
            pytest.fail(f"{max_events} events and still {sorted(self.live)} are live: a livelock")
        if not self.events:
            assert not self.live, f"requests {sorted(self.live)} never end"
            self.ledger.check()
            assert self.ledger.total_free == sum(self.slots.values())

    def _plan(self) -> None:
        plan = self._ask(self.policy)
        if plan is None:
            assert self.fallback is not None, "a stall"
            self.num_fallbacks += 1
            plan = self._ask(self.fallback)
            assert plan is not None, "the fallback stalls"
        for name in plan.evictions:
            self.num_evictions += 1
            self.ledger.free(name)
            self.live[name] = replace(self.live[name], computed_tokens=0, paused=False)
        self.drains = dict(plan.drains)
        for launch in plan.launches:
            self._launch(launch)

    def _ask(self, policy: Policy) -> Plan | None:
        view = self.view()
        plan = policy.plan(view)
        assert policy.plan(view) == plan, "not deterministic"
        violation = check_plan(view, plan)
        assert violation is None, str(violation)
        waits_for_arrivals = bool(self.running)
        return plan if plan.launches or waits_for_arrivals else None

    def _launch(self, launch: Launch) -> None:
        rows = [self.live[segment.request] for segment in launch.segments]
        is_prefill = any(r.computed_tokens == 0 or r.pending_tokens > 1 for r in rows)
        num_tokens = sum(segment.count for segment in launch.segments)
        length_s = num_tokens * self.prefill_s_per_token if is_prefill else float(launch.steps)
        names = tuple(row.request for row in rows)
        kind = "prefill" if is_prefill else "decode"
        iteration = Iteration(kind, self.now_s, self.now_s + length_s, launch.group, names, launch.pauses)
        self.log.append(iteration)
        for segment in launch.segments:
            self.ledger.place(segment.request, segment.save)
            held = len(self.ledger.holders(segment.request))
            self.max_placement[segment.request] = max(self.max_placement[segment.request], held)
            self.live[segment.request] = replace(self.live[segment.request], running=True, paused=False)
        for name in launch.pauses:
            self.live[name] = replace(self.live[name], paused=True)
        self.running.update(dict.fromkeys(launch.group, (iteration, launch)))
        heapq.heappush(self.events, (iteration.end_s, next(self.order), iteration))

    def _end(self, iteration: Iteration) -> bool:
        launch = self.running[iteration.group[0]][1]
        for instance in iteration.group:
            del self.running[instance]
        whole = True
        for segment in launch.segments:
            request = self.live[segment.request]
            computed = request.computed_tokens + segment.count + launch.steps - 1
            known = max(request.known_tokens, computed) + (computed >= request.known_tokens)
            self.live[segment.request] = replace(request, computed_tokens=computed, known_tokens=known, running=False)
            if computed < known:
                self.tokens[segment.request].append(self.now_s)
            if computed >= request.max_kv_tokens:
                del self.live[segment.request]
                self.ledger.free(segment.request)
                self.finished.append(segment.request)
                whole = False
        drained = any(instance in self.drains for instance in iteration.group)
        if iteration.kind == "prefill" or not whole or drained:
            return True
        return not self._renew(launch)

    def _renew(self, launch: Launch) -> bool:
        """Run a decode group again, masters kept; False when a master lacks slots."""
        masters = [launch.group[segment.rotation] for segment in launch.segments]
        if any(self.ledger.free_slots(i) < needed for i, needed in Counter(masters).items()):
            return False
        segments = []
        for segment, master in zip(launch.segments, masters, strict=True):
            begin = self.live[segment.request].computed_tokens
            segments.append(replace(segment, save=((master, begin, begin + 1),)))
        self._launch(replace(launch, segments=tuple(segments), steps=1, pauses=()))
        return True

    def started(self, request: int, kind: str = "prefill") -> Iteration:
        """The first iteration of a kind with a request."""
        return next(i for i in self.log if i.kind == kind and request in i.requests)


@pytest.fixture
def make_cluster() -> type[Cluster]:
    """The class: tests make as many clusters as they like."""
    return Cluster


def build_view(
    slots: Mapping[int, int],
    *,
    decodes: Mapping[int, Placement] | None = None,
    prefills: Mapping[int, int] | None = None,
    busy: Mapping[int, Literal["prefill", "decode"]] | None = None,
    running: Collection[int] = (),
    paused: Collection[int] = (),
    drained: Mapping[int, int] | None = None,
    growth: int = 4,
) -> ClusterView:
    """Write a view down.

    Args:
        slots: Slots by instance; the free ones follow from the placements.
        decodes: Placement of each decoding request.
        prefills: Prompt length of each waiting request.
        busy: What instances run.
        running: Requests in an iteration.
        paused: Requests that a launch has paused.
        drained: As ``InstanceView.drained_for``.
        growth: New KV tokens that each request may still come to, beyond what is known.
    """
    used: Counter[int] = Counter()
    decode_views = []
    for name, placement in (decodes or {}).items():
        for instance, begin, end in placement:
            used[instance] += end - begin
        computed = max(end for _, _, end in placement)
        decode_views.append(
            RequestView(
                request=name,
                arrival_s=float(name),
                prompt_tokens=computed,
                computed_tokens=computed,
                known_tokens=computed + 1,
                max_kv_tokens=computed + 1 + growth,
                placement=placement,
                master=placement[-1][0],
                running=name in running,
                paused=name in paused,
            )
        )
    prefill_views = [
        RequestView(name, float(name), prompt, 0, prompt, prompt + growth, running=name in running)
        for name, prompt in (prefills or {}).items()
    ]
    instances = tuple(
        InstanceView(i, num_slots, num_slots - used[i], (busy or {}).get(i), (drained or {}).get(i))
        for i, num_slots in sorted(slots.items())
    )
    return ClusterView(100.0, instances, tuple(prefill_views), tuple(decode_views))


@pytest.fixture(scope="session")
def make_view() -> Callable[..., ClusterView]:
    """The function ``build_view``."""
    return build_view


@st.composite
def _views(draw: st.DrawFn) -> ClusterView:
    """Any view that a manager could show: groups in flight, KV anywhere, drains, pauses, chunks, unequal pools."""
    slots = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    numbers = range(len(slots))
    # Iteration 0 is none: an idle instance.
    iteration_of = {i: draw(st.integers(0, 2)) for i in numbers}
    kinds = {1: draw(st.sampled_from(["prefill", "decode"])), 2: draw(st.sampled_from(["prefill", "decode"]))}
    groups = {it: [i for i in numbers if iteration_of[i] == it] for it in kinds}
    free = dict(enumerate(slots))
    prefills: list[RequestView] = []
    decodes: list[RequestView] = []
    for name in range(draw(st.integers(0, 7))):
        iteration = draw(st.integers(0, 2))
        running = iteration > 0 and bool(groups[iteration])
        homes = groups[iteration] if running else list(numbers)
        is_decode = kinds[iteration] == "decode" if running else draw(st.booleans())
        placement: list[tuple[int, int, int]] = []
        computed = 0
        for instance in draw(st.permutations(homes)):
            if computed == 0 or draw(st.booleans()):
                taken = draw(st.integers(0, min(free[instance], 12)))
                if taken and (is_decode or draw(st.booleans())):
                    placement.append((instance, computed, computed + taken))
                    free[instance] -= taken
                    computed += taken
        is_decode = is_decode and computed > 0
        if running and is_decode != (kinds[iteration] == "decode"):
            running = False
        pending = 1 if is_decode else draw(st.integers(2 if computed else 1, 40))
        known = computed + pending
        prompt = draw(st.integers(1, computed)) if is_decode else known
        request = RequestView(
            request=name,
            arrival_s=float(name),
            prompt_tokens=prompt,
            computed_tokens=computed,
            known_tokens=known,
            max_kv_tokens=known + draw(st.integers(0, 20)),
            placement=tuple(placement),
            master=placement[-1][0] if placement else None,
            running=running,
            paused=is_decode and not running and draw(st.booleans()),
        )
        (decodes if is_decode else prefills).append(request)
    live = [r.request for r in (*prefills, *decodes)]
    instances = []
    for i in numbers:
        kind = kinds.get(iteration_of[i])
        in_flight = draw(st.integers(0, free[i])) if kind else 0
        drained_for = draw(st.sampled_from([None, *live]))
        instances.append(InstanceView(i, slots[i], free[i] - in_flight, kind, drained_for))  # type: ignore[arg-type]
    return ClusterView(100.0, tuple(instances), tuple(prefills), tuple(decodes))


@pytest.fixture(scope="session")
def views() -> st.SearchStrategy[ClusterView]:
    """Strategy of views."""
    return _views()
