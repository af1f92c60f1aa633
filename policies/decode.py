"""Which decode steps to run now: groups that hold all KV of their rows, a master for each row, and whom to wait for.

Requests that share a holder share a group or wait (holder closure), so the requests that can run form connected
components over their holders, and a component runs as one group. What is assumed of the view: ``RequestView.master`` is
the instance that stored the request's last token, also right after its prefill; ``free_slots`` counts what iterations
in flight will fill as taken; a running request's holders are all in the group that runs it.

What a component waits for, and why no requests wait for each other for ever:

- A holder runs a prefill, which is long: just the requests with KV on it wait, the others run without them.
- A holder runs a decode iteration, which is short: it is drained, and the component's idle holders rest meanwhile, so
  that the whole component runs together from then on. Every instance of a waiting component stays at rest once it has
  come to rest, so a component that grows while it waits does so at most once an instance.
- Nobody has a slot for the next token: the request waits, the others run. First come, first served.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loongserve.policies.base import ClusterView, InstanceView, Launch, RequestView, SegmentPlan


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests that decode together. ``masters[i]`` stores the next token of ``requests[i]``; both lie in ``group``."""

    requests: tuple[RequestView, ...]
    masters: tuple[int, ...]
    # All holders and masters, ascending.
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What can decode now, what can once members have come to rest, and what cannot."""

    ready: tuple[DecodeBatch, ...]
    draining: tuple[DecodeBatch, ...]
    waiting: tuple[RequestView, ...]


def plan_decodes(view: ClusterView, reserved: Collection[int] = ()) -> DecodePlan:
    """Group all decode requests that are in no iteration, and choose a master for each.

    A master is sticky while it has a free slot; then the member with the most takes over, and where no member has any,
    the group grows by the instance with the most (idle ones first): that moves no KV.

    Args:
        view: The cluster now.
        reserved: Instances that must not be used.

    Returns:
        Disjoint batches; each request that is in no iteration is in one of them or in ``waiting``.
    """
    usable = {i.instance: i for i in view.instances if i.running != "prefill" and i.instance not in reserved}
    idle_requests = [request for request in view.decodes if not request.running]
    able = [request for request in idle_requests if request.holders <= usable.keys()]
    batches, short = _grow_batches(able, usable)
    while short:
        # Without those that find no slot the components may fall apart, so they are built anew.
        able = [request for request in able if request.request not in short]
        batches, short = _grow_batches(able, usable)
    planned = {request.request for request in able}
    return DecodePlan(
        ready=tuple(batch for batch in batches if all(usable[i].running is None for i in batch.group)),
        draining=tuple(batch for batch in batches if any(usable[i].running is not None for i in batch.group)),
        waiting=tuple(request for request in idle_requests if request.request not in planned),
    )


def decode_launch(view: ClusterView, batch: DecodeBatch) -> Launch:
    """Turn a batch whose group is idle into a launch of one step."""
    segments = tuple(
        SegmentPlan(
            request=request.request,
            count=1,
            save=((master, request.computed_tokens, request.computed_tokens + 1),),
            rotation=batch.group.index(master),
        )
        for request, master in zip(batch.requests, batch.masters, strict=True)
    )
    return Launch(batch.group, segments, pauses=paused_by(view, batch.group, batch.requests))


def paused_by(view: ClusterView, group: Iterable[int], rows: Iterable[RequestView]) -> tuple[int, ...]:
    """List the decoding requests outside ``rows`` that have KV on ``group``: they must wait for it."""
    members = set(group)
    inside = {request.request for request in rows}
    return tuple(
        request.request for request in view.decodes if request.request not in inside and request.holders & members
    )


def assign_masters(
    requests: Sequence[RequestView], group: Iterable[int], free_slots: dict[int, int]
) -> tuple[dict[int, int], list[int]]:
    """Choose who stores the next token of each request; all tokens together fit.

    Args:
        requests: First come first.
        group: The instances that may be masters.
        free_slots: Free slots by instance.

    Returns:
        request -> master, and the requests that find no slot.
    """
    room = {instance: free_slots[instance] for instance in sorted(group)}
    masters: dict[int, int] = {}
    short: list[int] = []
    for request in requests:
        master = request.master
        if master is None or room.get(master, 0) < 1:
            master = max(room, key=lambda instance: (room[instance], -instance), default=None)
        if master is None or room[master] < 1:
            short.append(request.request)
            continue
        room[master] -= 1
        masters[request.request] = master
    return masters, short


@dataclass(eq=False, slots=True)
class _Component:
    requests: list[RequestView]
    group: set[int]


def _grow_batches(
    requests: Sequence[RequestView], usable: dict[int, InstanceView]
) -> tuple[list[DecodeBatch], set[int]]:
    """Build batches; the second result is not empty when requests that find no slot must be left out first."""
    free_slots = {number: instance.free_slots for number, instance in usable.items()}
    order = {request.request: index for index, request in enumerate(requests)}
    todo = _components(requests)
    for component in todo:
        component.requests.sort(key=lambda request: order[request.request])
    done: list[tuple[_Component, dict[int, int]]] = []
    while todo:
        component = todo.pop(0)
        masters, short = assign_masters(component.requests, component.group, free_slots)
        if not short:
            done.append((component, masters))
            continue
        extra = _extra_instance(component, usable)
        if extra is None:
            return [], set(short)
        component.group.add(extra)
        # Whoever has KV on the new member comes along.
        others = [other for other in (*todo, *(entry[0] for entry in done)) if extra in other.group]
        for other in others:
            component.requests.extend(other.requests)
            component.group |= other.group
        todo = [component, *(other for other in todo if other not in others)]
        done = [entry for entry in done if entry[0] not in others]
        component.requests.sort(key=lambda request: order[request.request])
    done.sort(key=lambda entry: order[entry[0].requests[0].request])
    return [
        DecodeBatch(
            requests=tuple(component.requests),
            masters=tuple(masters[request.request] for request in component.requests),
            group=tuple(sorted(component.group)),
        )
        for component, masters in done
    ], set()


def _components(requests: Iterable[RequestView]) -> list[_Component]:
    """Connect requests that share a holder, directly or through others."""
    components: list[_Component] = []
    for request in requests:
        joined = _Component([], set(request.holders))
        apart = []
        for component in components:
            if component.group & request.holders:
                joined.requests.extend(component.requests)
                joined.group |= component.group
            else:
                apart.append(component)
        joined.requests.append(request)
        components = [*apart, joined]
    return components


def _extra_instance(component: _Component, usable: dict[int, InstanceView]) -> int | None:
    """Choose the instance that a component without a free slot grows by."""
    names = {request.request for request in component.requests}
    outside = [i for number, i in usable.items() if number not in component.group and i.free_slots > 0]
    if not outside:
        return None
    # The one already drained for it before others that decode: a change of mind would begin the wait again.
    return min(
        outside, key=lambda i: (i.running is not None, i.drained_for not in names, -i.free_slots, i.instance)
    ).instance
