"""What a policy sees and what it answers: ``ClusterView`` in, ``Plan`` out.

Plain Python: a policy imports no torch and keeps no clock; time comes in the view. Positions are token positions of a
request, counted from 0; a placement covers positions with half-open ranges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

# ((instance, begin, end), ...): positions begin..end-1 of one request lie on that instance.
Placement = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One elastic instance at the moment of planning."""

    instance: int
    num_slots: int
    # Slots that hold nothing and are promised to nothing.
    free_slots: int
    # What it runs now; None: idle. Only an idle instance can be launched on.
    running: Literal["prefill", "decode"] | None = None
    # The request that it is kept idle for, by the last plan.
    drained_for: int | None = None


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request at the moment of planning.

    ``known_tokens - computed_tokens`` tokens wait to be computed: more than one, or none computed yet, is a prefill;
    exactly one after that is a decode step.
    """

    request: int
    arrival_s: float
    prompt_tokens: int
    # Tokens with KV in the pools: the position of the first new token.
    computed_tokens: int
    # Prompt and output so far.
    known_tokens: int
    # The most KV tokens that it can ever come to.
    max_kv_tokens: int
    placement: Placement = ()
    # The instance that stores its new KV; None before the first token.
    master: int | None = None
    # In an iteration now; its numbers are those before that iteration.
    running: bool = False
    # A launch has listed it in its pauses since it last ran.
    paused: bool = False
    # When its first token was sampled.
    decode_since_s: float | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.known_tokens - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens that have no KV yet."""
        return self.known_tokens - self.computed_tokens

    @property
    def holders(self) -> frozenset[int]:
        """The instances with KV of this request."""
        return frozenset(instance for instance, begin, end in self.placement if end > begin)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that a policy may know. Tuples are in a fixed order: instances by number, requests by arrival."""

    now_s: float
    instances: tuple[InstanceView, ...]
    # Requests whose next work is a prefill (or the rest of one), first come first.
    prefills: tuple[RequestView, ...]
    # Requests whose next work is a decode step.
    decodes: tuple[RequestView, ...]
    # Mean decode-phase duration of finished requests; 0 until one has finished.
    mean_decode_s: float = 0.0

    def instance(self, instance: int) -> InstanceView:
        """Look an instance up by number. Raises: KeyError."""
        for view in self.instances:
            if view.instance == instance:
                return view
        raise KeyError(instance)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Compute ``count`` new tokens of a request and save their KV as ``save`` says.

    ``save`` covers positions [computed, computed + count + steps - 1) exactly once, on members of the group. Token t
    of the segment goes to member ``(t + rotation) % DoP`` of the group; for a decode step, ``rotation`` is thus the
    master's index in the group.
    """

    request: int
    count: int
    save: Placement
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One iteration: ``group`` (idle instances, in ring order) runs ``segments``; ``steps`` > 1 only for pure decode.

    ``pauses`` lists the decoding requests outside the launch that have KV on the group: they wait meanwhile.
    """

    group: tuple[int, ...]
    segments: tuple[SegmentPlan, ...]
    steps: int = 1
    pauses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move KV of positions [begin, end) of a request from one instance to another."""

    request: int
    source: int
    target: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. ``drains`` and the rest are complete: a drain that a later plan does not repeat is cancelled."""

    launches: tuple[Launch, ...] = ()
    # instance -> the request that it shall end its iteration (also one that this plan launches) and stay idle for.
    drains: Mapping[int, int] = field(default_factory=dict)
    migrations: tuple[Migrate, ...] = ()
    # Requests whose KV is dropped, to be recomputed later.
    evictions: tuple[int, ...] = ()
    # One line a decision, for people.
    reasons: tuple[str, ...] = ()


class Policy(Protocol):
    """Decides what runs next. Deterministic: the same view gives the same plan."""

    name: str

    def plan(self, view: ClusterView) -> Plan:
        """Answer what to launch, drain, migrate and evict now."""
        ...
