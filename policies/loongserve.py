"""Elastic sequence parallelism: prefill on many instances, keep the KV on few, decode where it lies, grow when full.

Four steps, each a function that can be replaced by itself: ``dispatch`` (which prompts now), ``allocate_instances``
(on what), ``batch`` (who with whom) and ``make_scaling_plan`` (where the KV goes, and what decodes).

How prefill and decode share the instances. A prompt takes instances from running decodes: those that it wants are
drained, so it waits for at most one running decode iteration of each, and the decodes with KV on its group pause. In
return a paused request runs a decode iteration before another prefill may take any instance that it needs: however
many prompts wait, between two of its tokens lie at most the prefill that paused it and those that ran beside that one.
A prompt that meets such a request waits for that iteration too.

Source: LoongServe (SOSP 2024), section 5, with simple bodies: no cost models yet.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from loongserve.policies.base import ClusterView, InstanceView, Launch, Placement, Plan, RequestView, SegmentPlan
from loongserve.policies.decode import DecodeBatch, DecodePlan, decode_launch, paused_by, plan_decodes

# A ring step has a fixed price in every layer (a transfer, a kernel launch, a merge); an instance with fewer tokens of
# a prompt than this pays more for its place in the ring than it takes off the others.
MIN_TOKENS_PER_INSTANCE = 512

# A prefill of so many tokens keeps an instance's arithmetic busy: further prompts in the same iteration would only make
# each other wait.
MAX_BATCH_TOKENS = 4096

# Requests that are prefilled together, and the instances that they run on.
PrefillBatch = tuple[tuple[RequestView, ...], tuple[int, ...]]

Dispatch = Callable[[ClusterView], tuple[RequestView, ...]]
AllocateInstances = Callable[[ClusterView, Sequence[RequestView], Collection[int]], tuple[int, ...]]
Batch = Callable[[ClusterView, Sequence[RequestView], Sequence[int]], tuple[PrefillBatch, ...]]
MakeScalingPlan = Callable[[ClusterView, Sequence[PrefillBatch], Sequence[DecodeBatch]], tuple[Launch, ...]]


def dispatch(view: ClusterView, *, max_batch_tokens: int = MAX_BATCH_TOKENS) -> tuple[RequestView, ...]:
    """Choose the requests to prefill next: first come, first served, none overtakes one that does not fit.

    A request is admitted when it and all admitted ones would fit the cluster together at their maximum lengths, so that
    nobody is ever evicted. That is enough, as any slot of any instance can hold any token.

    Args:
        view: The cluster now.
        max_batch_tokens: No further request is added to a batch that has come to this.

    Returns:
        Requests in the order of arrival; the first that waits has no placement and is in no iteration.
    """
    total_slots = sum(instance.num_slots for instance in view.instances)
    free_slots = sum(instance.free_slots for instance in view.instances)
    admitted = [r for r in (*view.prefills, *view.decodes) if r.running or r.computed_tokens > 0]
    committed = sum(request.max_kv_tokens for request in admitted)
    chosen: list[RequestView] = []
    batch_tokens = 0
    for request in view.prefills:
        if request.running:
            continue
        # The rest of a chunked prefill is admitted already.
        growth = request.max_kv_tokens if request.computed_tokens == 0 else 0
        if chosen and batch_tokens >= max_batch_tokens:
            break
        if committed + growth > total_slots or batch_tokens + request.pending_tokens > free_slots:
            break
        committed += growth
        batch_tokens += request.pending_tokens
        chosen.append(request)
    return tuple(chosen)


def allocate_instances(
    view: ClusterView,
    requests: Sequence[RequestView],
    available: Collection[int],
    *,
    min_tokens_per_instance: int = MIN_TOKENS_PER_INSTANCE,
) -> tuple[int, ...]:
    """Choose the instances for a prefill: as many as help, idle ones first, then those with most free slots.

    Args:
        view: The cluster now.
        requests: What is to be prefilled; the first names the drains.
        available: Instances that may be used; those that decode would be drained.
        min_tokens_per_instance: n tokens are worth at most ceil(n / this) instances.

    Returns:
        Instances, ascending, with room for all new tokens and including all holders; () when there are none such.
    """
    num_tokens = sum(request.pending_tokens for request in requests)
    holders = frozenset[int]().union(*(request.holders for request in requests))
    if not holders <= set(available):
        return ()
    wanted = max(1, -(-num_tokens // min_tokens_per_instance))
    names = {request.request for request in requests}

    def preference(instance: InstanceView) -> tuple[bool, bool, bool, int, int]:
        # One that is already drained for it comes before others that decode: else the wait would begin again.
        drained = instance.drained_for in names
        number = instance.instance
        return number not in holders, instance.running is not None, not drained, -instance.free_slots, number

    chosen: list[int] = []
    room = 0
    for instance in sorted((i for i in view.instances if i.instance in available), key=preference):
        if len(chosen) >= max(wanted, len(holders)) and room >= num_tokens:
            break
        chosen.append(instance.instance)
        room += instance.free_slots
    return tuple(sorted(chosen)) if room >= num_tokens else ()


def batch(view: ClusterView, requests: Sequence[RequestView], instances: Sequence[int]) -> tuple[PrefillBatch, ...]:
    """Split requests and instances into prefill batches with disjoint groups: here, one batch of all."""
    return ((tuple(requests), tuple(instances)),)


def make_scaling_plan(
    view: ClusterView, batches: Sequence[PrefillBatch], decodes: Sequence[DecodeBatch]
) -> tuple[Launch, ...]:
    """Launch the prefills, each saving its KV on the fewest members that hold it, and the decodes.

    Scale-down is thus proactive: the KV that passes by in the ring is kept where the request will decode. Scale-up is
    in ``decodes`` already: their groups have the members that give each row a slot.

    Args:
        view: The cluster now.
        batches: Prefill batches; their groups are idle.
        decodes: Decode batches; their groups are idle and disjoint from those of the prefills.
    """
    free_slots = {instance.instance: instance.free_slots for instance in view.instances}
    unpromised = {instance: free_slots[instance] - num_slots for instance, num_slots in promised_slots(view).items()}
    launches = []
    for requests, group in batches:
        segments = []
        for request in requests:
            save = place_prefill(request, group, free_slots, unpromised)
            for instance, begin, end in save:
                free_slots[instance] -= end - begin
                unpromised[instance] -= end - begin
            master = save[-1][0]
            unpromised[master] -= _growth(request)
            # The member that decodes also gets the last token, and so samples.
            rotation = (group.index(master) - (request.pending_tokens - 1)) % len(group)
            segments.append(SegmentPlan(request.request, request.pending_tokens, save, rotation))
        launches.append(Launch(group, tuple(segments), pauses=paused_by(view, group, requests)))
    launches.extend(decode_launch(view, decode) for decode in decodes)
    return tuple(launches)


def promised_slots(view: ClusterView) -> dict[int, int]:
    """Count, by instance, the slots that its masters' requests will still fill at their maximum lengths."""
    promised = {instance.instance: 0 for instance in view.instances}
    for request in view.decodes:
        if request.master in promised:
            promised[request.master] += max(0, request.max_kv_tokens - request.computed_tokens)
    return promised


def place_prefill(
    request: RequestView, group: Sequence[int], free_slots: dict[int, int], unpromised: dict[int, int]
) -> Placement:
    """Choose where the new KV of a prefill is kept: on the fewest members, with room to grow where possible.

    Args:
        request: With at least one pending token.
        group: The members.
        free_slots: Free slots by instance; the members have room for all pending tokens together.
        unpromised: Free slots that no other request is going to need.

    Returns:
        One contiguous range an instance; the last one's instance is the master to be.
    """
    begin, end = request.computed_tokens, request.known_tokens
    needed = end - begin + _growth(request)
    members = sorted(group, key=lambda instance: (-unpromised[instance], instance))
    room = {instance: max(0, unpromised[instance]) for instance in members}
    if sum(room.values()) < needed:
        # It shares the room to grow with others; what is free now must do.
        members = sorted(group, key=lambda instance: (-free_slots[instance], instance))
        room = {instance: free_slots[instance] for instance in members}
    save = []
    position = begin
    for instance in members:
        taken = min(room[instance], end - position)
        if taken > 0:
            save.append((instance, position, position + taken))
            position += taken
    return tuple(save)


def _growth(request: RequestView) -> int:
    return max(0, request.max_kv_tokens - request.known_tokens)


class LoongServePolicy:
    """The elastic policy. Stateless: the same view gives the same plan."""

    name = "elastic"

    def __init__(
        self,
        *,
        min_tokens_per_instance: int = MIN_TOKENS_PER_INSTANCE,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        dispatch: Dispatch | None = None,
        allocate_instances: AllocateInstances | None = None,
        batch: Batch | None = None,
        make_scaling_plan: MakeScalingPlan | None = None,
    ) -> None:
        """Compose the four steps.

        Args:
            min_tokens_per_instance: As in ``allocate_instances``.
            max_batch_tokens: As in ``dispatch``.
            dispatch: Replaces the function of that name, as do the next three.
            allocate_instances: See ``dispatch``.
            batch: See ``dispatch``.
            make_scaling_plan: See ``dispatch``.

        Raises:
            ValueError: A number is less than 1.
        """
        for name, value in (
            ("min_tokens_per_instance", min_tokens_per_instance),
            ("max_batch_tokens", max_batch_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._dispatch = dispatch or partial(_DISPATCH, max_batch_tokens=max_batch_tokens)
        self._allocate_instances = allocate_instances or partial(
            _ALLOCATE_INSTANCES, min_tokens_per_instance=min_tokens_per_instance
        )
        self._batch = batch or _BATCH
        self._make_scaling_plan = make_scaling_plan or _MAKE_SCALING_PLAN

    def plan(self, view: ClusterView) -> Plan:
        """Prefill the first that wait, on instances taken from decodes where it must be; decode on all others."""
        decodes = plan_decodes(view)
        requests, instances = self._next_prefill(view, decodes)
        drains: dict[int, int] = {}
        batches: tuple[PrefillBatch, ...] = ()
        reasons: list[str] = []
        if requests:
            head = requests[0].request
            running = [i.instance for i in view.instances if i.running is not None and i.instance in instances]
            owed = _owed_group(decodes)
            if owed.isdisjoint(instances):
                decodes = plan_decodes(view, instances)
                if not running:
                    batches = self._batch(view, requests, instances)
            if not batches:
                # Instances that run one more decode iteration for paused requests are to rest after it.
                drains.update(dict.fromkeys(instances, head))
                reasons.append(f"request {head} waits for instances {instances}")
        for waiting in decodes.draining:
            drains.update(dict.fromkeys(waiting.group, waiting.requests[0].request))
            reasons.append(f"request {waiting.requests[0].request} waits for instances {waiting.group} to decode")
        return Plan(self._make_scaling_plan(view, batches, decodes.ready), drains, reasons=tuple(reasons))

    def _next_prefill(self, view: ClusterView, decodes: DecodePlan) -> tuple[tuple[RequestView, ...], tuple[int, ...]]:
        """Choose requests to prefill and instances that hold them, fewer requests where not all find room."""
        requests = self._dispatch(view)
        # A paused request that cannot run yet keeps its instances from further prefills, or streams of them on either
        # of its holders could keep it waiting for ever.
        kept = {number for request in decodes.waiting if request.paused for number in request.holders}
        available = [i.instance for i in view.instances if i.running != "prefill" and i.instance not in kept]
        while requests:
            instances = self._allocate_instances(view, requests, available)
            if instances:
                return requests, instances
            requests = requests[:-1]
        return (), ()


def _owed_group(decodes: DecodePlan) -> set[int]:
    """The instances of every batch in which a paused request can run now or soon."""
    return {
        instance
        for decode in (*decodes.ready, *decodes.draining)
        if any(request.paused for request in decode.requests)
        for instance in decode.group
    }


# The constructor's parameters have the names of the functions that they replace.
_DISPATCH = dispatch
_ALLOCATE_INSTANCES = allocate_instances
_BATCH = batch
_MAKE_SCALING_PLAN = make_scaling_plan
