"""Forced plans: every degree of parallelism, placement, chunk and master as a script says, for tests and experiments.

One iteration runs at a time: first each request's prefill, chunk by chunk, then all decoding requests as one batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loongserve.policies.base import ClusterView, Launch, Placement, Plan, RequestView, SegmentPlan

# Sizes of the runs that ``spread_unevenly`` deals out, over and over: from single tokens to long runs.
UNEVEN_RUNS = (1, 2, 1, 3, 5, 8, 1, 13, 34, 89, 233)


def all_on(instance: int) -> Callable[[int, RequestView], Placement]:
    """Place whole prompts on one instance."""
    return lambda end, request: ((instance, 0, end),)


def spread_evenly(num_instances: int) -> Callable[[int, RequestView], Placement]:
    """Cut prompts into one contiguous range an instance, alike in size."""
    return lambda end, request: tuple(
        (i, end * i // num_instances, end * (i + 1) // num_instances) for i in range(num_instances)
    )


def spread_unevenly(num_instances: int) -> Callable[[int, RequestView], Placement]:
    """Deal prompts out in runs of ``UNEVEN_RUNS`` tokens, one instance after the other, the last one first."""

    def place(end: int, request: RequestView) -> Placement:
        placement = []
        begin, turn = 0, 0
        while begin < end:
            run = UNEVEN_RUNS[turn % len(UNEVEN_RUNS)]
            placement.append(((num_instances - 1 - turn) % num_instances, begin, min(end, begin + run)))
            begin, turn = begin + run, turn + 1
        return tuple(placement)

    return place


@dataclass(frozen=True)
class Script:
    """What ``ScriptedPolicy`` does."""

    # Number of chunk -> the group, in ring order, that prefills it.
    prefill_group: Callable[[int], tuple[int, ...]]
    # (prompt tokens, request) -> placement of positions [0, prompt tokens).
    placement: Callable[[int, RequestView], Placement]
    # Output tokens so far -> the master of the next decode step.
    master: Callable[[int], int]
    # Tokens of a prefill segment; None: the whole prompt.
    chunk: int | None = None
    # Decode steps an iteration, where enough tokens are left.
    steps: int = 1


def histories(num_instances: int) -> Iterator[tuple[str, Script]]:
    """List the scripts that exercise ``num_instances``, by name: placements, scale-up, changing masters and groups."""
    last = num_instances - 1

    def everyone(chunk: int) -> tuple[int, ...]:
        return tuple(range(num_instances))

    yield "all-on-one", Script(everyone, all_on(last), master=lambda k: last)
    if num_instances == 1:
        return
    yield "even", Script(everyone, spread_evenly(num_instances), master=lambda k: last)
    yield "uneven", Script(everyone, spread_unevenly(num_instances), master=lambda k: 0)
    # The decode group is {0}, then {0, 1}, ...: new KV goes to the newcomer, old KV stays.
    yield "scale-up", Script(everyone, all_on(0), master=lambda k: min(k // 8, last))
    yield "master-change", Script(everyone, spread_unevenly(num_instances), master=lambda k: k // 3 % num_instances)
    # Chunks of a prefill on groups of changing size and order, over what earlier chunks left anywhere.
    yield (
        "chunks",
        Script(
            lambda chunk: tuple((chunk + i) % num_instances for i in range(1 + chunk % num_instances)),
            spread_unevenly(num_instances),
            master=lambda k: 0,
            chunk=100,
        ),
    )
    yield (
        "several-steps",
        Script(everyone, spread_unevenly(num_instances), master=lambda k: k // 5 % num_instances, steps=5),
    )


class ScriptedPolicy:
    """Follows ``script``, which may be replaced while the cluster is idle."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script

    def plan(self, view: ClusterView) -> Plan:
        """Launch the next prefill chunk, or all decodes, if nothing runs."""
        if any(instance.running for instance in view.instances):
            return Plan()
        if view.prefills:
            return Plan(launches=(self._prefill(view, view.prefills[0]),))
        if view.decodes:
            launch = self._decode(view.decodes)
            # A drained group is not renewed: so the script is asked for each iteration's master.
            return Plan(launches=(launch,), drains=dict.fromkeys(launch.group, view.decodes[0].request))
        return Plan()

    def _prefill(self, view: ClusterView, request: RequestView) -> Launch:
        script = self.script
        begin = request.computed_tokens
        count = min(request.pending_tokens, script.chunk or request.pending_tokens)
        whole = script.placement(request.known_tokens, request)
        save = tuple((i, max(b, begin), min(e, begin + count)) for i, b, e in whole if b < begin + count and e > begin)
        group = list(script.prefill_group(begin // script.chunk if script.chunk else 0))
        # Where it saves and where it is held already, whatever the script's group: holder closure.
        group += sorted({i for i, _, _ in save} - set(group))
        group += sorted(request.holders - set(group))
        segment = SegmentPlan(request.request, count, save, rotation=request.request % len(group))
        return Launch(tuple(group), (segment,), pauses=_on(group, view.decodes))

    def _decode(self, requests: tuple[RequestView, ...]) -> Launch:
        masters = {r.request: self.script.master(r.output_tokens) for r in requests}
        group = sorted({*masters.values()}.union(*(r.holders for r in requests)))
        steps = min(self.script.steps, *(r.max_kv_tokens - r.computed_tokens for r in requests))
        segments = tuple(
            SegmentPlan(
                r.request,
                1,
                ((masters[r.request], r.computed_tokens, r.computed_tokens + steps),),
                rotation=group.index(masters[r.request]),
            )
            for r in requests
        )
        return Launch(tuple(group), segments, steps=steps)


def _on(group: list[int], requests: tuple[RequestView, ...]) -> tuple[int, ...]:
    return tuple(r.request for r in requests if r.holders & set(group))
