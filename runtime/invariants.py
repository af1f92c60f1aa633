"""What every plan must keep to, whoever made it. ``check_plan`` names the first invariant that a plan breaks.

Evictions take effect before launches, so a plan may give away the slots that it frees and prefill what it evicts.
Drains take effect after: a launch on an instance that the plan drains is one iteration; then the policy is asked again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loongserve.policies.base import ClusterView, Launch, Placement, Plan, RequestView, SegmentPlan

# name -> what it says
INVARIANTS = {
    "no-migration-yet": "ranks cannot move KV between pools yet: a plan has no migrations",
    "known-request": "every request that a plan names is live",
    "known-instance": "every instance that a plan names exists",
    "evict-waiting": "an evicted request has KV, is named once and is in no iteration",
    "group-shape": "a launch has a group without repetitions, at least one segment and at least one step",
    "disjoint-groups": "no instance is in two groups of a plan",
    "idle-instances": "only idle instances are launched on",
    "one-iteration-a-request": "a request is in one iteration at a time, once",
    "segment-count": "a segment has from 1 to all of the request's pending tokens",
    "rotation-in-group": "a segment's rotation is the index of a member of the group",
    "holder-closure": "a group contains every holder of every row",
    "steps-decode-only": "several steps are for groups in which every segment is a decode step",
    "steps-in-budget": "no row is given more steps than it has tokens left",
    "save-cover": "a save covers the new positions of all steps exactly once",
    "save-in-group": "new KV is saved on members of the group",
    "capacity": "no instance is given more new KV than it has free slots",
    "pauses-listed": "pauses are exactly the decoding requests outside a launch with KV on its group",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: its name in ``INVARIANTS``, and what was wrong."""

    invariant: str
    message: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message} ({INVARIANTS[self.invariant]})"


def check_plan(view: ClusterView, plan: Plan) -> Violation | None:
    """Check a plan against the view that it was made for.

    Args:
        view: The cluster at the moment of planning.
        plan: What a policy answered.

    Returns:
        The first invariant that is broken, or None when the plan is legal.
    """
    try:
        _check_plan(view, plan)
    except _Broken as broken:
        return broken.violation
    return None


class _Broken(Exception):
    def __init__(self, invariant: str, message: str) -> None:
        self.violation = Violation(invariant, message)


def _check_plan(view: ClusterView, plan: Plan) -> None:
    if plan.migrations:
        raise _Broken("no-migration-yet", f"got {len(plan.migrations)} migrations")
    requests = {request.request: request for request in (*view.prefills, *view.decodes)}
    decodes = {request.request for request in view.decodes}
    free = {instance.instance: instance.free_slots for instance in view.instances}

    for name in plan.evictions:
        evicted = _find(requests, name)
        if evicted.running or not evicted.holders or plan.evictions.count(name) > 1:
            raise _Broken("evict-waiting", f"request {name} cannot be evicted")
        for instance, begin, end in evicted.placement:
            free[instance] += end - begin
        requests[name] = replace(evicted, computed_tokens=0, placement=(), master=None)
        decodes.discard(name)

    _check_groups(view, plan.launches)
    for instance, name in plan.drains.items():
        if instance not in free:
            raise _Broken("known-instance", f"drained instance {instance} does not exist")
        _find(requests, name)
    rows = Counter(segment.request for launch in plan.launches for segment in launch.segments)
    for name, count in rows.items():
        if count > 1 or _find(requests, name).running:
            raise _Broken("one-iteration-a-request", f"request {name} is in {count} segments or already running")
    for launch in plan.launches:
        for segment in launch.segments:
            _check_segment(launch, segment, requests[segment.request], segment.request in decodes)
        _check_pauses(launch, requests, decodes)

    asked: Counter[int] = Counter()
    for launch in plan.launches:
        for segment in launch.segments:
            for instance, begin, end in segment.save:
                asked[instance] += end - begin
    for instance, num_tokens in asked.items():
        if num_tokens > free[instance]:
            raise _Broken("capacity", f"instance {instance} is given {num_tokens} tokens, {free[instance]} are free")


def _find(requests: dict[int, RequestView], name: int) -> RequestView:
    if name not in requests:
        raise _Broken("known-request", f"request {name} is not live")
    return requests[name]


def _check_groups(view: ClusterView, launches: Iterable[Launch]) -> None:
    running = {instance.instance: instance.running for instance in view.instances}
    taken: set[int] = set()
    for launch in launches:
        group = launch.group
        if not group or len(set(group)) != len(group) or not launch.segments or launch.steps < 1:
            raise _Broken("group-shape", f"group {group} with {len(launch.segments)} segments and {launch.steps} steps")
        for instance in group:
            if instance not in running:
                raise _Broken("known-instance", f"instance {instance} in group {group} does not exist")
            if instance in taken:
                raise _Broken("disjoint-groups", f"instance {instance} is in two groups")
            if running[instance] is not None:
                raise _Broken("idle-instances", f"instance {instance} runs a {running[instance]}")
        taken.update(group)


def _check_segment(launch: Launch, segment: SegmentPlan, request: RequestView, is_decode: bool) -> None:
    name, group = segment.request, launch.group
    if not 1 <= segment.count <= request.pending_tokens:
        raise _Broken(
            "segment-count", f"request {name} has {request.pending_tokens} pending tokens, got {segment.count}"
        )
    if not 0 <= segment.rotation < len(group):
        raise _Broken("rotation-in-group", f"request {name} has rotation {segment.rotation} in group {group}")
    if not request.holders <= set(group):
        raise _Broken("holder-closure", f"request {name} has KV on {sorted(request.holders)}, the group is {group}")
    if launch.steps > 1 and not is_decode:
        raise _Broken("steps-decode-only", f"request {name} is a prefill in an iteration of {launch.steps} steps")
    end = request.computed_tokens + segment.count + launch.steps - 1
    if end > request.max_kv_tokens:
        raise _Broken("steps-in-budget", f"request {name} would have {end} of at most {request.max_kv_tokens} tokens")
    _check_save(segment.save, name, request.computed_tokens, end)
    outside = {instance for instance, _, _ in segment.save} - set(group)
    if outside:
        raise _Broken("save-in-group", f"request {name} is saved on {sorted(outside)}, the group is {group}")


def _check_save(save: Placement, name: int, begin: int, end: int) -> None:
    position = begin
    for _, low, high in sorted(save, key=lambda piece: piece[1:]):
        if low == high:
            continue
        if low != position or high < low:
            break
        position = high
    else:
        if position == end:
            return
    raise _Broken("save-cover", f"request {name}: {save} does not cover [{begin}, {end}) once")


def _check_pauses(launch: Launch, requests: dict[int, RequestView], decodes: set[int]) -> None:
    rows = {segment.request for segment in launch.segments}
    group = set(launch.group)
    paused = {name for name in decodes - rows if requests[name].holders & group}
    if set(launch.pauses) != paused:
        raise _Broken(
            "pauses-listed",
            f"group {launch.group} pauses {sorted(paused)}, the launch lists {sorted(launch.pauses)}",
        )
