"""The static policy: fixed groups, even placements, nothing crosses a group."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.policies.base import ClusterView
from loongserve.policies.safe import SafePolicy
from loongserve.policies.static import StaticPolicy, spread_evenly
from loongserve.runtime.invariants import check_plan

MakeView = Callable[..., ClusterView]
FOUR = dict.fromkeys(range(4), 100)


@pytest.mark.parametrize(
    ("end", "free", "save"),
    [
        pytest.param(9, {0: 50, 1: 50, 2: 50}, ((0, 0, 3), (1, 3, 6), (2, 6, 9)), id="even"),
        pytest.param(10, {0: 50, 1: 50, 2: 50}, ((0, 0, 3), (1, 3, 6), (2, 6, 10)), id="remainder-last"),
        pytest.param(1, {0: 50, 1: 50, 2: 50}, ((2, 0, 1),), id="one-token"),
        pytest.param(30, {0: 50, 1: 2, 2: 50}, ((1, 0, 2), (0, 2, 16), (2, 16, 30)), id="nearly-full-member"),
        pytest.param(9, {0: 3, 1: 3, 2: 3}, ((0, 0, 3), (1, 3, 6), (2, 6, 9)), id="just-fits"),
        pytest.param(8, {0: 3, 1: 0, 2: 5}, ((0, 0, 3), (2, 3, 8)), id="full-member"),
    ],
)
def test_spread_evenly(end: int, free: dict[int, int], save: tuple[tuple[int, int, int], ...]) -> None:
    assert spread_evenly(0, end, tuple(free), free) == save


@given(free=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
@settings(deadline=None)
def test_whatever_fits_is_spread(free: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, sum(free)))
    save = spread_evenly(0, end, range(len(free)), dict(enumerate(free)))
    assert [position for _, begin, stop in save for position in range(begin, stop)] == list(range(end))
    assert all(stop - begin <= free[instance] for instance, begin, stop in save)


@pytest.mark.parametrize(
    ("dop", "group"),
    [(None, (0, 1, 2, 3)), (1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (9, (0, 1, 2, 3))],
)
def test_prefills_run_on_a_whole_group(make_view: MakeView, dop: int | None, group: tuple[int, ...]) -> None:
    (launch,) = StaticPolicy(dop).plan(make_view(FOUR, prefills={1: 24})).launches
    assert launch.group == group
    assert {instance for instance, _, _ in launch.segments[0].save} == set(group)


def test_the_least_loaded_group_is_chosen(make_view: MakeView) -> None:
    view = make_view(FOUR, decodes={1: ((0, 0, 5), (1, 5, 10))}, prefills={2: 24})
    launches = StaticPolicy(2).plan(view).launches
    assert [launch.group for launch in launches] == [(0, 1), (2, 3)]
    assert [launch.segments[0].request for launch in launches] == [1, 2]


def test_a_decoding_group_is_drained_and_then_paused(make_view: MakeView) -> None:
    decodes = {1: ((0, 0, 5), (1, 5, 10))}
    view = make_view({0: 50, 1: 50}, decodes=decodes, prefills={2: 24}, busy={0: "decode", 1: "decode"}, running=(1,))
    plan = StaticPolicy().plan(view)
    assert plan.launches == ()
    assert plan.drains == {0: 2, 1: 2}
    (launch,) = StaticPolicy().plan(make_view({0: 50, 1: 50}, decodes=decodes, prefills={2: 24})).launches
    assert launch.pauses == (1,)


def test_a_paused_request_decodes_before_the_next_prefill(make_view: MakeView) -> None:
    view = make_view({0: 50, 1: 50}, decodes={1: ((0, 0, 5), (1, 5, 10))}, prefills={2: 24}, paused=(1,))
    plan = StaticPolicy().plan(view)
    assert [segment.request for launch in plan.launches for segment in launch.segments] == [1]
    assert plan.drains == {0: 2, 1: 2}


def test_a_prompt_that_no_group_can_hold_is_passed_over(make_view: MakeView) -> None:
    plan = StaticPolicy(1).plan(make_view(FOUR, prefills={1: 150, 2: 24}))
    assert [segment.request for launch in plan.launches for segment in launch.segments] == [2]


def test_a_prompt_that_has_to_wait_is_not_overtaken(make_view: MakeView) -> None:
    view = make_view({0: 50}, decodes={1: ((0, 0, 20),)}, prefills={2: 30, 3: 2})
    plan = StaticPolicy(1).plan(view)
    assert [segment.request for launch in plan.launches for segment in launch.segments] == [1]
    assert plan.drains == {}


def test_bad_dop_is_refused() -> None:
    with pytest.raises(ValueError, match="dop must be at least 1, or None for all instances, got 0"):
        StaticPolicy(0)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_plans_for_any_view_are_legal(data: st.DataObject, views: st.SearchStrategy[ClusterView]) -> None:
    view = data.draw(views)
    dop = data.draw(st.sampled_from([None, 1, 2, 3]))
    plan = StaticPolicy(dop).plan(view)
    violation = check_plan(view, plan)
    assert violation is None, str(violation)
    numbers = tuple(i.instance for i in view.instances)
    size = dop or len(numbers)
    assert all(
        launch.group in [numbers[i : i + size] for i in range(0, len(numbers), size)] for launch in plan.launches
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_end(make_cluster: type, seed: int) -> None:
    rng = random.Random(seed)
    num_slots, num_instances, dop = rng.randint(8, 40), rng.randint(1, 4), rng.choice([None, 1, 2])
    cluster = make_cluster(
        StaticPolicy(dop),
        dict.fromkeys(range(num_instances), num_slots),
        fallback=SafePolicy(),
        prefill_s_per_token=0.2,
    )
    fits_every_group = rng.random() < 0.7
    most = num_slots if fits_every_group else num_slots * num_instances
    for request in range(rng.randint(1, 14)):
        prompt = rng.randint(1, most)
        cluster.submit(request, prompt, rng.randint(1, min(20, most - prompt + 1)), at_s=60 * rng.random())
    cluster.run()
    if fits_every_group:
        assert cluster.num_fallbacks == 0


def test_a_stream_of_prefills_starves_no_decode(make_cluster: type) -> None:
    cluster = make_cluster(StaticPolicy(), {0: 200, 1: 200})
    cluster.submit(0, prompt=10, output=20)
    for request in range(1, 40):
        cluster.submit(request, prompt=8, output=1, at_s=1.0 + 0.1 * request)
    cluster.run()
    for before, after in zip(cluster.tokens[0], cluster.tokens[0][1:], strict=False):
        assert sum(before <= i.begin_s < after for i in cluster.log if i.kind == "prefill") <= 1
