"""The elastic policy: each step by itself, plans for any view, and what comes of it in virtual time."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.policies.base import ClusterView, InstanceView, RequestView
from loongserve.policies.loongserve import (
    LoongServePolicy,
    allocate_instances,
    batch,
    dispatch,
    make_scaling_plan,
    place_prefill,
)
from loongserve.runtime.invariants import check_plan

MakeView = Callable[..., ClusterView]
FOUR = dict.fromkeys(range(4), 100)


# dispatch


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        pytest.param({"prefills": {1: 10, 2: 20, 3: 30}}, [1, 2, 3], id="all-fit"),
        pytest.param({"prefills": {1: 50, 2: 200, 3: 10}}, [1, 2], id="batch-is-full"),
        pytest.param({"prefills": {1: 390, 2: 20, 3: 2}}, [1], id="nobody-overtakes"),
        pytest.param({"prefills": {1: 397}}, [], id="maximum-length-too-long"),
        pytest.param({"prefills": {1: 396}}, [1], id="maximum-length-just-fits"),
        pytest.param({"prefills": {1: 10, 2: 20}, "running": (1,)}, [2], id="running-is-admitted"),
        pytest.param({"prefills": {1: 390, 2: 20}, "running": (1,)}, [], id="running-is-counted"),
        pytest.param(
            {"prefills": {2: 200}, "decodes": {1: ((0, 0, 100), (1, 100, 200))}}, [], id="growth-of-decodes-is-counted"
        ),
        pytest.param({}, [], id="nothing-waits"),
    ],
)
def test_dispatch(make_view: MakeView, case: dict[str, object], chosen: list[int]) -> None:
    requests = dispatch(make_view(FOUR, **case), max_batch_tokens=200)
    assert [request.request for request in requests] == chosen


# allocate_instances


@pytest.mark.parametrize(
    ("num_tokens", "case", "chosen"),
    [
        pytest.param(1, {}, (0,), id="one-token"),
        pytest.param(20, {}, (0, 1), id="exact-multiple"),
        pytest.param(21, {}, (0, 1, 2), id="rounded-up"),
        pytest.param(90, {}, (0, 1, 2, 3), id="all"),
        pytest.param(20, {"busy": {0: "prefill", 1: "prefill"}}, (2, 3), id="never-waits-for-prefills"),
        pytest.param(20, {"busy": {0: "decode"}}, (1, 2), id="idle-first"),
        pytest.param(
            20, {"busy": dict.fromkeys(range(4), "decode"), "drained": {2: 9, 3: 9}}, (2, 3), id="drained-first"
        ),
        pytest.param(10, {"decodes": {1: ((0, 0, 50),)}}, (1,), id="most-free-slots"),
        pytest.param(
            90, {"decodes": {1: ((0, 0, 90), (1, 90, 170), (2, 170, 265))}, "busy": {3: "prefill"}}, (), id="no-room"
        ),
    ],
)
def test_allocate_instances(
    make_view: MakeView, num_tokens: int, case: dict[str, object], chosen: tuple[int, ...]
) -> None:
    view = make_view(FOUR, prefills={9: num_tokens}, **case)
    available = [i.instance for i in view.instances if i.running != "prefill"]
    assert allocate_instances(view, view.prefills, available, min_tokens_per_instance=10) == chosen


def test_more_instances_than_help_are_taken_for_their_slots(make_view: MakeView) -> None:
    view = make_view({0: 10, 1: 10, 2: 10}, prefills={9: 25})
    assert allocate_instances(view, view.prefills, [0, 1, 2], min_tokens_per_instance=1000) == (0, 1, 2)


def test_the_rest_of_a_chunked_prefill_needs_its_holders() -> None:
    chunked = RequestView(1, 0.0, 10, 4, 10, 12, placement=((1, 0, 4),), master=1)
    view = ClusterView(0.0, tuple(InstanceView(i, 100, 100) for i in range(3)), (chunked,), ())
    assert allocate_instances(view, (chunked,), [0, 1, 2], min_tokens_per_instance=100) == (1,)
    assert allocate_instances(view, (chunked,), [0, 2], min_tokens_per_instance=100) == ()


# batch, make_scaling_plan


def test_one_batch_of_all(make_view: MakeView) -> None:
    view = make_view(FOUR, prefills={1: 10, 2: 20})
    assert batch(view, view.prefills, [1, 2]) == ((view.prefills, (1, 2)),)


@pytest.mark.parametrize(
    ("free", "unpromised", "save"),
    [
        pytest.param({0: 50, 1: 60, 2: 40}, {0: 50, 1: 60, 2: 40}, ((1, 0, 20),), id="scales-down-to-one"),
        pytest.param({0: 50, 1: 60, 2: 40}, {0: 50, 1: 10, 2: 40}, ((0, 0, 20),), id="promises-are-kept"),
        pytest.param({0: 15, 1: 16, 2: 9}, {0: 15, 1: 16, 2: 9}, ((1, 0, 16), (0, 16, 20)), id="two-hold-it"),
        pytest.param({0: 10, 1: 10, 2: 5}, {0: 9, 1: 3, 2: 5}, ((0, 0, 10), (1, 10, 20)), id="promises-cannot-be-kept"),
        pytest.param({0: 20, 1: 0, 2: 0}, {0: -5, 1: -5, 2: 0}, ((0, 0, 20),), id="over-promised"),
    ],
)
def test_place_prefill(
    free: dict[int, int], unpromised: dict[int, int], save: tuple[tuple[int, int, int], ...]
) -> None:
    request = RequestView(1, 0.0, 20, 0, 20, 24)
    assert place_prefill(request, (0, 1, 2), free, unpromised) == save


def test_prompts_of_a_batch_are_kept_on_different_members(make_view: MakeView) -> None:
    view = make_view(FOUR, prefills={1: 60, 2: 60, 3: 30})
    (launch,) = make_scaling_plan(view, [(view.prefills, (0, 1, 2, 3))], [])
    assert [segment.save for segment in launch.segments] == [((0, 0, 60),), ((1, 0, 60),), ((2, 0, 30),)]
    for segment in launch.segments:
        last_token = segment.count - 1
        assert launch.group[(last_token + segment.rotation) % 4] == segment.save[-1][0]


def test_promises_of_running_masters_are_left_alone(make_view: MakeView) -> None:
    view = make_view({0: 100, 1: 90}, decodes={1: ((0, 0, 5),)}, prefills={2: 10}, growth=80)
    (launch,) = make_scaling_plan(view, [(view.prefills, (0, 1))], [])
    assert launch.segments[0].save == ((1, 0, 10),)
    assert launch.pauses == (1,)


# the policy


def test_each_step_can_be_replaced(make_view: MakeView) -> None:
    view = make_view(FOUR, prefills={1: 60, 2: 60})
    policy = LoongServePolicy(
        dispatch=lambda view: view.prefills[1:],
        allocate_instances=lambda view, requests, available: (1, 3),
        batch=lambda view, requests, instances: ((tuple(requests), tuple(reversed(instances))),),
        make_scaling_plan=lambda view, batches, decodes: make_scaling_plan(view, batches, decodes),
    )
    (launch,) = policy.plan(view).launches
    assert launch.group == (3, 1)
    assert [segment.request for segment in launch.segments] == [2]


@pytest.mark.parametrize("option", ["min_tokens_per_instance", "max_batch_tokens"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        LoongServePolicy(**{option: 0})  # type: ignore[arg-type]


def test_a_wide_prefill_drains_what_it_wants_and_nothing_else(make_view: MakeView) -> None:
    view = make_view(
        FOUR,
        decodes={i: ((i, 0, 10 + i),) for i in range(4)},
        prefills={9: 30},
        busy=dict.fromkeys(range(4), "decode"),
        running=range(4),
    )
    plan = LoongServePolicy(min_tokens_per_instance=10).plan(view)
    assert plan.launches == ()
    assert plan.drains == {0: 9, 1: 9, 2: 9}


def test_a_paused_request_decodes_before_the_next_prefill(make_view: MakeView) -> None:
    decodes = {1: ((0, 0, 10),), 2: ((1, 0, 10),)}
    policy = LoongServePolicy(min_tokens_per_instance=10)
    view = make_view({0: 100, 1: 100}, decodes=decodes, prefills={9: 30}, paused=(1,))
    plan = policy.plan(view)
    assert [launch.group for launch in plan.launches] == [(0,), (1,)]
    assert plan.drains == {0: 9, 1: 9}
    view = make_view({0: 100, 1: 100}, decodes=decodes, prefills={9: 30})
    plan = policy.plan(view)
    assert [launch.group for launch in plan.launches] == [(0, 1)]
    assert plan.launches[0].pauses == (1, 2)


def test_a_paused_request_that_waits_for_a_prefill_keeps_its_other_holders_from_prefills(make_view: MakeView) -> None:
    view = make_view(
        {0: 100, 1: 100, 2: 100},
        decodes={1: ((0, 0, 5), (1, 5, 10))},
        prefills={9: 90},
        busy={0: "prefill"},
        paused=(1,),
    )
    (launch,) = LoongServePolicy(min_tokens_per_instance=10).plan(view).launches
    assert launch.group == (2,)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_plans_for_any_view_are_legal(data: st.DataObject, views: st.SearchStrategy[ClusterView]) -> None:
    view = data.draw(views)
    policy = LoongServePolicy(
        min_tokens_per_instance=data.draw(st.sampled_from([1, 5, 100])),
        max_batch_tokens=data.draw(st.sampled_from([1, 30, 1000])),
    )
    plan = policy.plan(view)
    violation = check_plan(view, plan)
    assert violation is None, str(violation)
    assert policy.plan(view) == plan
    assert plan.evictions == plan.migrations == ()
    # On an idle cluster whose requests fit at their maximum lengths there is always something to run.
    admitted = sum(r.max_kv_tokens for r in (*view.prefills, *view.decodes) if r.computed_tokens)
    idle = all(i.running is None for i in view.instances)
    if idle and view.decodes and admitted <= sum(i.num_slots for i in view.instances):
        assert plan.launches


# in virtual time


def test_a_wide_prefill_starts_after_one_iteration_of_saturating_decodes(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(min_tokens_per_instance=10), dict.fromkeys(range(4), 1000))
    for request in range(8):
        cluster.submit(request, prompt=10, output=200, at_s=0.0)
    cluster.run(until_s=60.0)
    assert len(cluster.view().decodes) == 8
    assert all(instance.running == "decode" for instance in cluster.view().instances)
    cluster.submit(99, prompt=40, output=2, at_s=60.5)
    cluster.run()
    prefill = cluster.started(99)
    assert prefill.group == (0, 1, 2, 3)
    assert prefill.begin_s <= 61.5
    assert len(prefill.pauses) == 8
    assert cluster.max_placement[99] == 1
    assert sorted(cluster.finished) == [*range(8), 99]


def test_requests_that_share_holders_come_together_within_an_iteration(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(), {0: 1000, 1: 1000})
    cluster.resume(1, ((0, 0, 5),), output=50)
    cluster.resume(2, ((1, 0, 5),), output=50, at_s=0.3)
    cluster.resume(3, ((0, 0, 5), (1, 5, 9)), output=50, at_s=0.5)
    cluster.run()
    assert (cluster.log[0].group, cluster.log[1].group) == ((0,), (1,))
    # Instance 0 rests at 1.0 until instance 1 does at 1.3.
    together = cluster.started(3, "decode")
    assert (together.begin_s, together.group, together.requests) == (1.3, (0, 1), (1, 2, 3))
    assert all(cluster.tokens[request][-1] <= 54.0 for request in (1, 2, 3))


def test_a_chain_of_shared_holders_comes_together(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(), dict.fromkeys(range(4), 1000))
    for link in range(3):
        at_s = (0.0, 0.6, 0.3)[link]
        cluster.resume(link, ((link, 0, 5), (link + 1, 5, 9)), output=50, at_s=at_s)
    cluster.run()
    together = next(i for i in cluster.log if i.group == (0, 1, 2, 3))
    assert together.requests == (0, 2, 1)
    assert together.begin_s <= 2.0


def test_a_prefill_on_one_holder_stops_nobody_else(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(), {0: 1000, 1: 900}, prefill_s_per_token=0.2)
    cluster.resume(1, ((0, 0, 5),), output=300)
    cluster.resume(2, ((1, 0, 5),), output=300)
    cluster.resume(3, ((0, 0, 5), (1, 5, 9)), output=300)
    cluster.submit(4, prompt=100, output=2, at_s=5.5)
    cluster.run()
    prefill = cluster.started(4)
    assert (prefill.begin_s, prefill.group, prefill.pauses) == (6.0, (0,), (1, 3))
    during = [i for i in cluster.log if prefill.begin_s <= i.begin_s < prefill.end_s and i is not prefill]
    assert {(i.group, i.requests) for i in during} == {((1,), (2,))}
    assert len(during) >= 20
    after = next(i for i in cluster.log if i.begin_s >= prefill.end_s and 3 in i.requests)
    assert after.begin_s <= prefill.end_s + 1.0
    assert after.requests == (1, 2, 3, 4)


def test_prefill_scales_down_and_a_full_instance_scales_up(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(min_tokens_per_instance=10), {0: 40, 1: 40, 2: 40})
    cluster.submit(1, prompt=30, output=50)
    cluster.run()
    assert cluster.started(1).group == (0, 1, 2)
    groups = [i.group for i in cluster.log if i.kind == "decode"]
    assert groups == [(0,)] * 10 + [(0, 1)] * 39
    assert cluster.max_placement[1] == 2


@pytest.mark.parametrize("max_batch_tokens", [1, 1000])
def test_a_stream_of_prefills_starves_no_decode(make_cluster: type, max_batch_tokens: int) -> None:
    policy = LoongServePolicy(min_tokens_per_instance=5, max_batch_tokens=max_batch_tokens)
    cluster = make_cluster(policy, {0: 500, 1: 500, 2: 500}, prefill_s_per_token=0.2)
    for request in range(3):
        cluster.submit(request, prompt=450, output=20, at_s=0.0)
    for request in range(3, 60):
        cluster.submit(request, prompt=3 + request % 20, output=1, at_s=300.0 + 0.5 * request)
    cluster.run()
    prefills = [i for i in cluster.log if i.kind == "prefill"]
    for request in range(3):
        for before, after in zip(cluster.tokens[request], cluster.tokens[request][1:], strict=False):
            between = [i for i in prefills if before <= i.begin_s < after and i.begin_s > 290.0]
            by_instance = [sum(instance in i.group for i in between) for instance in range(3)]
            assert max(by_instance) <= 1, f"request {request} waits from {before} to {after} for {between}"


def test_a_stream_of_decodes_starves_no_prefill(make_cluster: type) -> None:
    cluster = make_cluster(LoongServePolicy(min_tokens_per_instance=10), {0: 200, 1: 200})
    for request in range(100):
        cluster.submit(request, prompt=1, output=10, at_s=0.9 * request)
    cluster.submit(1000, prompt=100, output=2, at_s=30.0)
    cluster.run()
    # What came before it is prefilled first; then two turns of at most an iteration each.
    assert cluster.started(1000).begin_s < 36.0


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_end_without_the_fallback(make_cluster: type, seed: int) -> None:
    rng = random.Random(seed)
    slots = {i: rng.randint(5, 60) for i in range(rng.randint(1, 4))}
    policy = LoongServePolicy(min_tokens_per_instance=rng.choice([1, 4, 16]), max_batch_tokens=rng.choice([1, 40]))
    cluster = make_cluster(policy, slots, prefill_s_per_token=rng.choice([0.05, 0.5]))
    for request in range(rng.randint(1, 14)):
        prompt = rng.randint(1, sum(slots.values()) if rng.random() < 0.3 else 5)
        cluster.submit(
            request,
            prompt=prompt,
            output=rng.randint(1, min(30, sum(slots.values()) - prompt + 1)),
            at_s=rng.choice([0.0, 60 * rng.random()]),
        )
    cluster.run()
    assert cluster.num_evictions == 0
