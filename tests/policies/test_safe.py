"""The fallback: it is right for any view, and always gets on."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.policies.base import ClusterView, Plan
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.invariants import check_plan

MakeView = Callable[..., ClusterView]


def test_nothing_waits(make_view: MakeView) -> None:
    assert SafePolicy().plan(make_view({0: 10})) == Plan()


def test_a_busy_cluster_comes_to_rest(make_view: MakeView) -> None:
    view = make_view({0: 50, 1: 50, 2: 50}, prefills={3: 5}, busy={0: "decode", 2: "prefill"})
    plan = SafePolicy().plan(view)
    assert plan.launches == ()
    assert plan.drains == {0: 3, 2: 3}


def test_the_first_to_come_runs_on_all_instances(make_view: MakeView) -> None:
    decodes = {2: ((0, 0, 5),), 3: ((1, 0, 5),)}
    (launch,) = SafePolicy().plan(make_view({0: 50, 1: 50}, decodes=decodes, prefills={1: 9, 4: 9})).launches
    assert (launch.group, launch.pauses) == ((0, 1), (2, 3))
    assert [segment.request for segment in launch.segments] == [1]
    (launch,) = SafePolicy().plan(make_view({0: 50, 1: 50}, decodes=decodes, prefills={4: 9})).launches
    assert [segment.request for segment in launch.segments] == [2, 3]


def test_the_last_to_come_make_room(make_view: MakeView) -> None:
    decodes = {2: ((0, 0, 5),), 3: ((1, 0, 5),), 4: ((1, 5, 8),)}
    plan = SafePolicy().plan(make_view({0: 5, 1: 10}, decodes=decodes, prefills={1: 6}))
    assert plan.evictions == (4, 3)
    (launch,) = plan.launches
    assert launch.pauses == (2,)


def test_what_fits_no_empty_cluster_is_not_tried(make_view: MakeView) -> None:
    plan = SafePolicy().plan(make_view({0: 5}, prefills={1: 6}))
    assert plan.launches == plan.evictions == ()


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_it_gets_on_in_any_view(data: st.DataObject, views: st.SearchStrategy[ClusterView]) -> None:
    view = data.draw(views)
    plan = SafePolicy().plan(view)
    violation = check_plan(view, plan)
    assert violation is None, str(violation)
    assert SafePolicy().plan(view) == plan
    waiting = sorted((r for r in (*view.prefills, *view.decodes) if not r.running), key=lambda r: r.request)
    if waiting and all(i.running is None for i in view.instances):
        fits = waiting[0].known_tokens <= sum(i.num_slots for i in view.instances)
        assert not fits or waiting[0].request in {s.request for launch in plan.launches for s in launch.segments}


@pytest.mark.parametrize("seed", range(30))
def test_it_serves_alone(make_cluster: type, seed: int) -> None:
    rng = random.Random(seed)
    slots = {i: rng.randint(2, 30) for i in range(rng.randint(1, 4))}
    cluster = make_cluster(SafePolicy(), slots)
    for request in range(rng.randint(1, 10)):
        prompt = rng.randint(1, sum(slots.values()))
        cluster.submit(request, prompt, rng.randint(1, sum(slots.values()) - prompt + 1), at_s=30 * rng.random())
    cluster.run()
