"""The fallback: first come, first served, one group of all instances. Slow, and hard to get wrong."""

from loongserve.policies.base import ClusterView, Launch, Plan, RequestView, SegmentPlan
from loongserve.policies.decode import DecodeBatch, assign_masters, decode_launch, paused_by
from loongserve.policies.static import spread_evenly


class SafePolicy:
    """Runs the request that came first, whatever it takes.

    While anything runs, all running instances are drained and nothing is launched. On an idle cluster, a decode step of
    the first request takes along every other decode that finds a slot; a prefill runs alone. Where the first request
    finds no room, the last to come are evicted until it does. It is never evicted itself, so it ends, and then the
    next is the first.
    """

    name = "safe"

    def plan(self, view: ClusterView) -> Plan:
        """Run the first request, or wait for the cluster to come to rest."""
        first = min(
            (request for request in (*view.prefills, *view.decodes) if not request.running), key=_arrival, default=None
        )
        if first is None:
            return Plan()
        running = [instance.instance for instance in view.instances if instance.running is not None]
        if running:
            reason = f"request {first.request} waits for the cluster to come to rest"
            return Plan(drains=dict.fromkeys(running, first.request), reasons=(reason,))
        free_slots = {instance.instance: instance.free_slots for instance in view.instances}
        evicted = _make_room(view, first, free_slots)
        if sum(free_slots.values()) < first.pending_tokens:
            return Plan(reasons=(f"request {first.request} does not fit the empty cluster",))
        return Plan(
            launches=(self._launch(view, first, free_slots, evicted),),
            evictions=tuple(request.request for request in evicted),
            reasons=(f"request {first.request} came first",),
        )

    def _launch(
        self, view: ClusterView, first: RequestView, free_slots: dict[int, int], evicted: list[RequestView]
    ) -> Launch:
        group = tuple(instance.instance for instance in view.instances)
        if first in view.decodes:
            decodes = sorted((r for r in view.decodes if r not in evicted), key=_arrival)
            masters, _ = assign_masters(decodes, group, free_slots)
            rows = tuple(request for request in decodes if request.request in masters)
            launch = decode_launch(view, DecodeBatch(rows, tuple(masters[r.request] for r in rows), group))
            return _without_pauses_of(launch, evicted)
        save = spread_evenly(first.computed_tokens, first.known_tokens, group, free_slots)
        rotation = (group.index(save[-1][0]) - (first.pending_tokens - 1)) % len(group)
        segment = SegmentPlan(first.request, first.pending_tokens, save, rotation)
        return _without_pauses_of(Launch(group, (segment,), pauses=paused_by(view, group, (first,))), evicted)


def _make_room(view: ClusterView, first: RequestView, free_slots: dict[int, int]) -> list[RequestView]:
    """Choose whom to evict until the first request's new tokens fit, and credit their slots to ``free_slots``."""
    others = [r for r in (*view.prefills, *view.decodes) if r.holders and r.request != first.request]
    evicted: list[RequestView] = []
    for request in sorted(others, key=_arrival, reverse=True):
        if sum(free_slots.values()) >= first.pending_tokens:
            break
        for instance, begin, end in request.placement:
            free_slots[instance] += end - begin
        evicted.append(request)
    return evicted


def _without_pauses_of(launch: Launch, evicted: list[RequestView]) -> Launch:
    gone = {request.request for request in evicted}
    pauses = tuple(request for request in launch.pauses if request not in gone)
    return Launch(launch.group, launch.segments, launch.steps, pauses)


def _arrival(request: RequestView) -> tuple[float, int]:
    return request.arrival_s, request.request
