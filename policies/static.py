"""The baseline: a fixed degree of parallelism. Instances form fixed groups, and nothing ever scales."""

from collections.abc import Mapping, Sequence

from loongserve.policies.base import ClusterView, InstanceView, Launch, Placement, Plan, RequestView, SegmentPlan
from loongserve.policies.decode import DecodeBatch, assign_masters, decode_launch, paused_by


class StaticPolicy:
    """Each request is bound to one group, prefills and decodes on all its members and spreads its KV evenly over them.

    First come, first served: the first prompt that waits goes to the group with the most room to spare, once that group
    rests; its decodes pause for the prefill, and each paused request decodes before the next prefill. Prompts wait for
    a group that holds them and its other requests at their maximum lengths. One that no group could ever hold, or whose
    KV lies across groups, is passed over: only a fallback policy that takes over an idle cluster can run it.
    """

    name = "static"

    def __init__(self, dop: int | None = None) -> None:
        """Set the degree of parallelism.

        Args:
            dop: Members of a group, in the order of their numbers; the last group has what is left. None: one group of
                all instances.

        Raises:
            ValueError: ``dop`` is less than 1.
        """
        if dop is not None and dop < 1:
            raise ValueError(f"dop must be at least 1, or None for all instances, got {dop}")
        self._dop = dop

    def plan(self, view: ClusterView) -> Plan:
        """Give every idle group its next iteration, and drain the group that the first waiting prompt goes to."""
        groups = [_Group(view, members) for members in self._groups(view)]
        bound, head = _bind_next(view, groups)
        launches: list[Launch] = []
        drains: dict[int, int] = {}
        reasons: list[str] = []
        for group in groups:
            decode = group.decode_batch()
            owed = decode is not None and any(request.paused for request in decode.requests)
            if group is bound and head is not None:
                if group.is_idle and not owed:
                    launches.append(group.prefill_launch(head))
                    continue
                # Also when it decodes once more for paused requests: it rests after that.
                drains.update(dict.fromkeys(group.members, head.request))
                reasons.append(f"request {head.request} waits for group {group.members}")
                if not owed:
                    continue
            if group.is_idle and decode is not None:
                launches.append(decode_launch(view, decode))
        return Plan(tuple(launches), drains, reasons=tuple(reasons))

    def _groups(self, view: ClusterView) -> list[tuple[int, ...]]:
        numbers = tuple(instance.instance for instance in view.instances)
        dop = self._dop or len(numbers)
        return [numbers[begin : begin + dop] for begin in range(0, len(numbers), dop)]


class _Group:
    """One fixed group at the moment of planning."""

    def __init__(self, view: ClusterView, members: tuple[int, ...]) -> None:
        self.view = view
        self.members = members
        self.instances: list[InstanceView] = [i for i in view.instances if i.instance in members]
        self.num_slots = sum(instance.num_slots for instance in self.instances)
        self.free_slots = {instance.instance: instance.free_slots for instance in self.instances}
        self.is_idle = all(instance.running is None for instance in self.instances)
        self.prefills_now = any(instance.running == "prefill" for instance in self.instances)
        inside = [r for r in (*view.prefills, *view.decodes) if r.holders and r.holders <= set(members)]
        strays = [r for r in view.decodes if not r.holders <= set(members)]
        # What its requests come to at their maximum lengths, and what those of no group hold of it.
        self.committed = sum(request.max_kv_tokens for request in inside) + sum(
            end - begin for request in strays for instance, begin, end in request.placement if instance in members
        )
        self.decodes = [r for r in view.decodes if not r.running and r.holders <= set(members)]

    def can_hold(self, request: RequestView) -> bool:
        """Tell whether a request fits now, and at its maximum length beside the others at theirs."""
        growth = request.max_kv_tokens if not request.holders else 0
        fits_at_most = self.committed + growth <= self.num_slots
        return fits_at_most and request.pending_tokens <= sum(self.free_slots.values())

    def prefill_launch(self, request: RequestView) -> Launch:
        save = spread_evenly(request.computed_tokens, request.known_tokens, self.members, self.free_slots)
        # The member with the last range decodes, so it gets the last token and samples.
        rotation = (self.members.index(save[-1][0]) - (request.pending_tokens - 1)) % len(self.members)
        segment = SegmentPlan(request.request, request.pending_tokens, save, rotation)
        return Launch(self.members, (segment,), pauses=paused_by(self.view, self.members, (request,)))

    def decode_batch(self) -> DecodeBatch | None:
        """All its requests that find a slot; None when there is none."""
        masters, _ = assign_masters(self.decodes, self.members, self.free_slots)
        rows = tuple(request for request in self.decodes if request.request in masters)
        if not rows:
            return None
        return DecodeBatch(rows, tuple(masters[request.request] for request in rows), self.members)


def _bind_next(view: ClusterView, groups: Sequence[_Group]) -> tuple[_Group | None, RequestView | None]:
    """Choose the first prompt that waits and the group that takes it; no group while the prompt has to wait."""
    for request in view.prefills:
        if request.running:
            continue
        homes = [group for group in groups if request.holders <= set(group.members)]
        if all(request.max_kv_tokens > group.num_slots for group in homes):
            continue
        fitting = [group for group in homes if not group.prefills_now and group.can_hold(request)]
        if not fitting:
            return None, request
        drained = {i.instance for i in view.instances if i.drained_for == request.request}
        # A group that is already drained for it stays its choice: else the wait would begin again.
        chosen = min(
            fitting,
            key=lambda group: (
                drained.isdisjoint(group.members),
                group.committed - group.num_slots,
                not group.is_idle,
                group.members,
            ),
        )
        return chosen, request
    return None, None


def spread_evenly(begin: int, end: int, members: Sequence[int], free_slots: Mapping[int, int]) -> Placement:
    """Split positions [begin, end) into one range a member, as even as their free slots allow.

    Args:
        begin: First position.
        end: One past the last; at least one position.
        members: The instances.
        free_slots: Free slots by instance, for all positions together.

    Returns:
        Ranges without empty ones; the member with the most free slots has the last.
    """
    save = []
    position = begin
    # The fullest first: what it cannot take is spread over the rest.
    order = sorted(members, key=lambda instance: (free_slots[instance], instance))
    for index, instance in enumerate(order):
        taken = min(free_slots[instance], (end - position) // (len(order) - index))
        if taken > 0:
            save.append((instance, position, position + taken))
            position += taken
    return tuple(save)
