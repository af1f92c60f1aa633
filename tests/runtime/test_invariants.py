"""One legal plan, and for each invariant the smallest change that breaks it."""

from dataclasses import replace
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, InstanceView, Launch, Migrate, Plan, RequestView, SegmentPlan
from loongserve.runtime.invariants import INVARIANTS, check_plan

# Instances 0 to 2 are idle with 10, 4 and 0 free slots, 3 runs request 4. Requests 1 (KV on 0 and 1) and 2 (KV on 1)
# decode, 3 waits for its prefill, 5 has a chunk of its prefill on 2.
VIEW = ClusterView(
    now_s=1.0,
    instances=(
        InstanceView(0, 20, 10),
        InstanceView(1, 20, 4),
        InstanceView(2, 20, 0),
        InstanceView(3, 20, 20, running="decode"),
    ),
    prefills=(
        RequestView(3, 0.3, 6, computed_tokens=0, known_tokens=6, max_kv_tokens=9),
        RequestView(5, 0.5, 30, computed_tokens=20, known_tokens=30, max_kv_tokens=31, placement=((2, 0, 20),)),
    ),
    decodes=(
        RequestView(
            1, 0.1, 5, computed_tokens=8, known_tokens=9, max_kv_tokens=10, placement=((0, 0, 3), (1, 3, 8)), master=1
        ),
        RequestView(2, 0.2, 4, computed_tokens=4, known_tokens=5, max_kv_tokens=30, placement=((1, 0, 4),), master=1),
        RequestView(
            4,
            0.4,
            4,
            computed_tokens=4,
            known_tokens=5,
            max_kv_tokens=9,
            placement=((3, 0, 4),),
            master=3,
            running=True,
        ),
    ),
)
ROW_1 = SegmentPlan(1, 1, ((1, 8, 9),), rotation=1)
ROW_2 = SegmentPlan(2, 1, ((0, 4, 5),))
ROW_3 = SegmentPlan(3, 6, ((0, 0, 5), (1, 5, 6)))
DECODE = Launch((0, 1), (ROW_1, ROW_2))
MIXED = Launch((0, 1), (ROW_1, ROW_3), pauses=(2,))


def launch(base: Launch, **changes: Any) -> Plan:
    return Plan((replace(base, **changes),))


def row(base: SegmentPlan, **changes: Any) -> Plan:
    others = {1: (ROW_2,), 2: (ROW_1,), 3: (ROW_1,)}[base.request]
    return Plan((Launch((0, 1), (*others, replace(base, **changes)), pauses=(2,) if base.request == 3 else ()),))


LEGAL = [
    pytest.param(Plan(), id="nothing"),
    pytest.param(Plan((DECODE,), drains={3: 3, 0: 3}), id="decode, drains of a running and of a launched instance"),
    pytest.param(Plan((MIXED,)), id="decode and prefill in one iteration"),
    pytest.param(Plan((replace(DECODE, segments=(ROW_1,), pauses=(2,)),)), id="a paused neighbour"),
    pytest.param(
        launch(DECODE, segments=(replace(ROW_2, save=((0, 4, 7), (1, 7, 8))),), group=(1, 0), steps=4, pauses=(1,)),
        id="several steps",
    ),
    pytest.param(row(ROW_3, save=((1, 3, 6), (0, 2, 2), (0, 0, 3)), rotation=1), id="unordered save, an empty range"),
    pytest.param(row(ROW_3, count=2, save=((0, 0, 2),)), id="a chunk"),
    pytest.param(
        Plan((Launch((2,), (SegmentPlan(5, 20, ((2, 0, 20),)),)),), evictions=(5,)), id="evicted and begun anew"
    ),
    pytest.param(Plan((Launch((0,), (replace(ROW_3, save=((0, 0, 6),)),)),), evictions=(1,)), id="evicted, not paused"),
]

ILLEGAL = [
    ("no-migration-yet", Plan(migrations=(Migrate(1, 0, 1, 0, 3),))),
    ("known-request", Plan((replace(DECODE, segments=(SegmentPlan(9, 1, ()),)),))),
    ("known-request", Plan(drains={0: 9})),
    ("known-request", Plan(evictions=(9,))),
    ("known-instance", launch(DECODE, group=(0, 1, 9))),
    ("known-instance", Plan(drains={9: 1})),
    ("evict-waiting", Plan(evictions=(4,))),
    ("evict-waiting", Plan(evictions=(3,))),
    ("evict-waiting", Plan(evictions=(1, 1))),
    ("group-shape", launch(DECODE, group=())),
    ("group-shape", launch(DECODE, group=(0, 1, 0))),
    ("group-shape", launch(DECODE, segments=())),
    ("group-shape", launch(DECODE, steps=0)),
    ("disjoint-groups", Plan((DECODE, Launch((1, 2), (replace(ROW_3, save=((1, 0, 6),)),))))),
    ("idle-instances", launch(DECODE, group=(0, 1, 3))),
    ("one-iteration-a-request", launch(DECODE, segments=(ROW_1, ROW_2, ROW_2))),
    ("one-iteration-a-request", launch(DECODE, segments=(ROW_1, ROW_2, SegmentPlan(4, 1, ((0, 4, 5),))))),
    ("segment-count", row(ROW_2, count=2, save=((0, 4, 6),))),
    ("segment-count", row(ROW_3, count=0, save=())),
    ("segment-count", row(ROW_3, count=7, save=((0, 0, 7),))),
    ("rotation-in-group", row(ROW_1, rotation=2)),
    ("rotation-in-group", row(ROW_1, rotation=-1)),
    ("holder-closure", launch(DECODE, group=(1,), segments=(replace(ROW_1, rotation=0),), pauses=(2,))),
    ("holder-closure", Plan((Launch((0,), (SegmentPlan(5, 3, ((0, 20, 23),)),), pauses=(1,)),))),
    ("steps-decode-only", launch(MIXED, steps=2, segments=(ROW_3,), pauses=(1, 2))),
    ("steps-in-budget", launch(DECODE, segments=(replace(ROW_1, save=((0, 8, 11),)),), steps=3, pauses=(2,))),
    ("save-cover", row(ROW_1, save=())),
    ("save-cover", row(ROW_1, save=((1, 7, 8),))),
    ("save-cover", row(ROW_3, save=((0, 0, 5), (1, 4, 6)))),
    ("save-cover", row(ROW_3, save=((0, 0, 3), (1, 4, 6)))),
    ("save-cover", row(ROW_3, save=((0, 0, 6), (1, 6, 5), (1, 5, 6)))),
    ("save-cover", launch(DECODE, steps=2)),
    ("save-in-group", row(ROW_1, save=((2, 8, 9),))),
    ("capacity", row(ROW_3, save=((1, 0, 6),))),
    ("capacity", Plan((Launch((2,), (SegmentPlan(5, 1, ((2, 20, 21),)),)),))),
    ("pauses-listed", launch(DECODE, segments=(ROW_1,))),
    ("pauses-listed", launch(DECODE, pauses=(2,))),
    ("pauses-listed", launch(DECODE, pauses=(4,))),
    ("pauses-listed", Plan((Launch((0,), (replace(ROW_3, save=((0, 0, 6),)),), pauses=(1,)),), evictions=(1,))),
]


@pytest.mark.parametrize("plan", LEGAL)
def test_legal_plans_pass(plan: Plan) -> None:
    assert check_plan(VIEW, plan) is None


@pytest.mark.parametrize(
    ("invariant", "plan"), [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(ILLEGAL)]
)
def test_the_broken_invariant_is_named(invariant: str, plan: Plan) -> None:
    violation = check_plan(VIEW, plan)
    assert violation is not None
    assert violation.invariant == invariant
    assert str(violation).startswith(f"{invariant}: ")


def test_every_invariant_has_a_plan_that_breaks_it() -> None:
    assert {name for name, _ in ILLEGAL} == set(INVARIANTS)
