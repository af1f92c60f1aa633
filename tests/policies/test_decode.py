"""Decode planning: holder closure, draining, masters and memory-driven growth."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.policies.base import ClusterView, Launch, Plan
from loongserve.policies.decode import assign_masters, decode_launch, plan_decodes
from loongserve.runtime.invariants import check_plan

MakeView = Callable[..., ClusterView]
FOUR = dict.fromkeys(range(4), 100)
ON_01 = ((0, 0, 5), (1, 5, 10))
CHAIN = {1: ((0, 0, 5), (1, 5, 9)), 2: ((1, 0, 5), (2, 5, 9)), 3: ((2, 0, 5), (3, 5, 9))}
APEX = {1: ((0, 0, 5),), 2: ((1, 0, 5),), 3: ON_01}


@pytest.mark.parametrize(
    ("case", "ready", "draining", "waiting"),
    [
        pytest.param({"decodes": {1: ((0, 0, 5),), 2: ((1, 0, 5),)}}, [((1,), (0,)), ((2,), (1,))], [], [], id="apart"),
        pytest.param({"decodes": APEX}, [((1, 2, 3), (0, 1))], [], [], id="one-links-two"),
        pytest.param({"decodes": CHAIN}, [((1, 2, 3), (0, 1, 2, 3))], [], [], id="chain"),
        pytest.param(
            {"decodes": APEX, "busy": {0: "decode"}, "running": (1,)}, [], [((2, 3), (0, 1))], [], id="holder-decodes"
        ),
        pytest.param({"decodes": APEX, "busy": {0: "prefill"}}, [((2,), (1,))], [], [1, 3], id="holder-prefills"),
        pytest.param(
            {"decodes": CHAIN, "busy": {3: "prefill"}}, [((1, 2), (0, 1, 2))], [], [3], id="chain-end-prefills"
        ),
        pytest.param(
            {"decodes": CHAIN, "busy": {1: "prefill"}}, [((3,), (2, 3))], [], [1, 2], id="chain-middle-prefills"
        ),
        pytest.param({"decodes": CHAIN, "reserved": (0,)}, [((2, 3), (1, 2, 3))], [], [1], id="holder-reserved"),
        pytest.param(
            {"decodes": APEX, "busy": {0: "decode", 1: "decode"}, "running": (1, 2, 3)}, [], [], [], id="all-run"
        ),
    ],
)
def test_components(
    make_view: MakeView,
    case: dict[str, object],
    ready: list[tuple[tuple[int, ...], tuple[int, ...]]],
    draining: list[tuple[tuple[int, ...], tuple[int, ...]]],
    waiting: list[int],
) -> None:
    reserved = case.get("reserved", ())
    view = make_view(FOUR, **{name: value for name, value in case.items() if name != "reserved"})
    plan = plan_decodes(view, reserved)  # type: ignore[arg-type]
    assert [(tuple(r.request for r in b.requests), b.group) for b in plan.ready] == ready
    assert [(tuple(r.request for r in b.requests), b.group) for b in plan.draining] == draining
    assert [request.request for request in plan.waiting] == waiting


def test_the_master_stays_while_it_has_room(make_view: MakeView) -> None:
    view = make_view({0: 100, 1: 6}, decodes={1: ON_01})
    assert plan_decodes(view).ready[0].masters == (1,)


def test_the_member_with_most_room_takes_over_from_a_full_master(make_view: MakeView) -> None:
    view = make_view({0: 9, 1: 5, 2: 12}, decodes={1: ((0, 0, 5), (2, 5, 10), (1, 10, 15))})
    (batch,) = plan_decodes(view).ready
    assert batch.masters == (2,)
    assert batch.group == (0, 1, 2)


def test_a_full_group_grows_by_the_idle_instance_with_most_room(make_view: MakeView) -> None:
    view = make_view({0: 5, 1: 7, 2: 9}, decodes={1: ((0, 0, 5),)})
    (batch,) = plan_decodes(view).ready
    assert (batch.group, batch.masters) == ((0, 2), (2,))
    launch = decode_launch(view, batch)
    assert launch.segments[0].save == ((2, 5, 6),)
    assert launch.segments[0].rotation == 1


def test_requests_on_the_new_member_come_along(make_view: MakeView) -> None:
    view = make_view({0: 5, 1: 9}, decodes={1: ((0, 0, 5),), 2: ((1, 0, 5),)})
    (batch,) = plan_decodes(view).ready
    assert batch.group == (0, 1)
    assert [request.request for request in batch.requests] == [1, 2]
    assert batch.masters == (1, 1)


def test_several_masters_share_a_batch(make_view: MakeView) -> None:
    view = make_view({0: 6, 1: 9}, decodes={1: ((0, 0, 3),), 2: ((0, 0, 2),), 3: ((1, 0, 5),)})
    (batch,) = plan_decodes(view).ready
    assert batch.masters == (0, 1, 1)


def test_a_busy_instance_with_room_is_drained_for_a_full_group(make_view: MakeView) -> None:
    view = make_view({0: 5, 1: 9}, decodes={1: ((0, 0, 5),), 2: ((1, 0, 5),)}, busy={1: "decode"}, running=(2,))
    plan = plan_decodes(view)
    assert plan.ready == ()
    assert plan.draining[0].group == (0, 1)


def test_the_drained_instance_stays_the_choice(make_view: MakeView) -> None:
    view = make_view({0: 5, 1: 9, 2: 20}, decodes={1: ((0, 0, 5),)}, busy={1: "decode", 2: "decode"}, drained={1: 1})
    assert plan_decodes(view).draining[0].group == (0, 1)


def test_who_finds_no_slot_waits_and_the_first_to_come_go_on(make_view: MakeView) -> None:
    view = make_view({0: 7, 1: 5}, decodes={1: ((0, 0, 3),), 2: ((0, 0, 2),), 3: ((0, 0, 1), (1, 1, 6))})
    plan = plan_decodes(view)
    assert [request.request for request in plan.ready[0].requests] == [1]
    assert [request.request for request in plan.waiting] == [2, 3]
    # Without request 3 nothing needs instance 1.
    assert plan.ready[0].group == (0,)
    assert decode_launch(view, plan.ready[0]).pauses == (2, 3)


def test_masters_are_assigned_first_come_first(make_view: MakeView) -> None:
    view = make_view(FOUR, decodes={1: ((0, 0, 5),), 2: ((0, 0, 5),), 3: ((0, 0, 5),)})
    assert assign_masters(view.decodes, (0, 1), {0: 1, 1: 1}) == ({1: 0, 2: 1}, [3])
    assert assign_masters(view.decodes[:1], (), {}) == ({}, [1])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_view_is_partitioned_into_legal_batches(data: st.DataObject, views: st.SearchStrategy[ClusterView]) -> None:
    view = data.draw(views)
    reserved = data.draw(st.sets(st.sampled_from([i.instance for i in view.instances])))
    plan = plan_decodes(view, reserved)
    batches = (*plan.ready, *plan.draining)
    planned = [request.request for batch in batches for request in batch.requests]
    planned += [request.request for request in plan.waiting]
    assert sorted(planned) == sorted(request.request for request in view.decodes if not request.running)
    members = [instance for batch in batches for instance in batch.group]
    assert len(members) == len(set(members))
    assert reserved.isdisjoint(members)
    for batch in batches:
        assert all(view.instance(instance).running != "prefill" for instance in batch.group)
        assert frozenset().union(*(r.holders for r in batch.requests)) | set(batch.masters) == set(batch.group)
    launches: list[Launch] = [decode_launch(view, batch) for batch in plan.ready]
    violation = check_plan(view, Plan(tuple(launches)))
    assert violation is None, str(violation)
