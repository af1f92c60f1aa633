"""When the manager asks the policy, what it shows it, how it carries plans out, and what it does with bad ones."""

from collections.abc import Callable
from typing import Any

import pytest

from loongserve.policies.base import ClusterView, Launch, Migrate, Plan, SegmentPlan
from loongserve.policies.safe import SafePolicy
from loongserve.runtime.iteration import StepClock
from loongserve.runtime.protocol import Abort, Finished, Free, GetStatus, Iteration, IterationDone, Submit, Token

Planner = Callable[[ClusterView], Plan]


def nothing(view: ClusterView) -> Plan:
    return Plan()


def launch(*segments: SegmentPlan, group: tuple[int, ...] = (0, 1), steps: int = 1, **plan: Any) -> Planner:
    pauses = plan.pop("pauses", ())
    return lambda view: Plan((Launch(group, segments, steps, pauses),), **plan)


@pytest.fixture
def decoding(driver: Any) -> Any:
    """Request 1 (prompt 3, 15 new) after its prefill on both instances, with KV on 0 and 1, decoding with master 1."""
    made = driver(launch(SegmentPlan(1, 3, ((0, 0, 1), (1, 1, 3)))), control_interval_s=0.05, max_steps=4)
    made.send(Submit(1, (1, 2, 3), 15))
    made.policy.function = launch(SegmentPlan(1, 1, ((1, 3, 4),), rotation=1))
    made.run()
    made.policy.function = nothing
    return made


def test_a_decode_group_is_renewed_without_asking(decoding: Any) -> None:
    asked = len(decoding.views)
    decoding.run()
    renewed = decoding.launched()
    assert len(decoding.views) == asked
    [segment] = renewed.segments
    assert (renewed.group, segment.begin, segment.tokens, segment.rotation) == ((0, 1), 4, (7,), 1)
    assert segment.resident == ((0, 0, 1), (1, 1, 4))
    assert segment.save == ((1, 4, 4 + renewed.steps),)
    assert decoding.counters["renewals"] == 1


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(0.001, 4), (0.0125, 4), (0.02, 2), (0.05, 1), (1.0, 1)],
)
def test_renewals_take_as_many_steps_as_the_control_interval_holds(decoding: Any, step_s: float, steps: int) -> None:
    decoding.run(elapsed_s=step_s)
    assert decoding.launched().steps == steps


def test_steps_stop_at_the_least_remaining_tokens(decoding: Any) -> None:
    steps = []
    for _ in range(5):
        decoding.run(elapsed_s=0.001)
        steps.append(decoding.launched().steps)
    assert Finished(1, "length", 3, 15) in decoding.sent
    # 14 tokens after the prefill's, the first of them by plan; after the last there is nothing to renew.
    assert steps == [4, 4, 4, 1, 1]
    assert decoding.manager.ledger.total_free == 40


def test_steps_stop_at_the_masters_slots_and_a_shortage_asks_the_policy(driver: Any) -> None:
    made = driver(launch(SegmentPlan(1, 3, ((0, 0, 3),)), group=(0,)), num_slots=(6, 20))
    made.send(Submit(1, (1, 2, 3), 15))
    made.policy.function = launch(SegmentPlan(1, 1, ((0, 3, 4),)), group=(0,))
    made.run()
    made.run(elapsed_s=0.001)
    assert made.launched().steps == 2
    # Scale-up: instance 1 joins as the new master, no KV moves.
    made.policy.function = launch(SegmentPlan(1, 1, ((1, 6, 7),), rotation=1))
    made.run(elapsed_s=0.001)
    scaled = made.launched()
    assert (scaled.group, scaled.segments[0].resident) == ((0, 1), ((0, 0, 6),))
    assert made.views[-1].decodes[0].master == 0
    assert made.counters["scale_ups"] == 1
    made.run()
    assert made.launched().segments[0].save[0][0] == 1


def test_step_clock_rises_at_once_and_falls_slowly() -> None:
    clock = StepClock(0.1, 10)
    one_master: dict[str, Any] = {"rows_of": {0: 2}, "free_of": {0: 100}, "remaining": 100}
    assert clock.steps(1, **one_master) == 1
    clock.observe(1, 5, 0.05)
    assert clock.steps(1, **one_master) == 10
    # Another group size is timed by itself.
    assert clock.steps(2, **one_master) == 1
    clock.observe(1, 1, 0.05)
    assert clock.steps(1, **one_master) == 2
    clock.observe(1, 1, 0.01)
    assert clock.steps(1, **one_master) == 2
    for _ in range(20):
        clock.observe(1, 1, 0.01)
    assert clock.steps(1, **one_master) > 5
    clock.observe(1, 1, 0.0)
    assert clock.steps(1, **one_master | {"free_of": {0: 7}}) == 3
    assert clock.steps(1, **one_master | {"free_of": {0: 1}}) == 0


@pytest.mark.parametrize("drained", [0, 1])
def test_a_group_with_a_drained_instance_comes_to_rest(decoding: Any, drained: int) -> None:
    decoding.policy.function = lambda view: Plan(drains={drained: 2})
    decoding.send(Submit(2, (5,) * 4, 2))
    running = decoding.launched()
    decoding.policy.function = launch(SegmentPlan(2, 4, ((0, 0, 4),)), pauses=(1,))
    decoding.run(running)
    view = decoding.views[-1]
    assert view.instance(drained).drained_for == 2
    assert [segment.request for segment in decoding.launched().segments] == [2]
    assert decoding.counters["drains"] == decoding.counters["pauses"] == 1


def test_a_drained_instance_at_rest_waits_for_the_others(driver: Any) -> None:
    def alone(view: ClusterView) -> Plan:
        waiting = [r for r in view.prefills if not r.running]
        segments = [SegmentPlan(r.request, 2, ((r.request, 0, 2),)) for r in waiting]
        return Plan(tuple(Launch((segment.request,), (segment,)) for segment in segments))

    made = driver(alone)
    made.send(Submit(0, (1, 2), 9))
    first = made.launched()
    made.send(Submit(1, (3, 4), 9))
    second = made.launched()
    assert (first.group, second.group) == ((0,), (1,))
    made.policy.function = lambda view: Plan(drains={0: 2, 1: 2})
    made.send(Submit(2, (5,), 1))
    made.run(first)
    assert made.launched() is second
    [status] = made.send(GetStatus(0))
    assert [instance.state for instance in status.instances] == ["drained", "prefill"]
    made.policy.function = launch(SegmentPlan(2, 1, ((0, 0, 1),)), pauses=(0, 1))
    made.run(second)
    assert made.launched().group == (0, 1)


def test_an_arrival_asks_at_once_and_shows_numbers_from_before_the_running_iteration(decoding: Any) -> None:
    decoding.run(elapsed_s=0.001)
    running = decoding.launched()
    assert running.steps == 4
    decoding.sample(running, step=0)
    decoding.sample(running, step=1)
    decoding.now = 3.0
    decoding.send(Submit(2, (1,), 1))
    view = decoding.views[-1]
    [row] = view.decodes
    assert (row.running, row.computed_tokens, row.known_tokens, row.output_tokens) == (True, 4, 5, 2)
    assert row.placement == ((0, 0, 1), (1, 1, 4))
    assert (row.master, row.max_kv_tokens) == (1, 17)
    # Free slots are net of what the running steps may still fill.
    assert [instance.free_slots for instance in view.instances] == [19, 20 - 3 - 4]
    assert [instance.running for instance in view.instances] == ["decode", "decode"]
    [waiting] = view.prefills
    assert (waiting.request, waiting.arrival_s, waiting.pending_tokens, waiting.master) == (2, 3.0, 1, None)


def test_chunks_of_a_prefill_sample_only_at_the_end(driver: Any) -> None:
    made = driver(launch(SegmentPlan(1, 2, ((1, 0, 2),), rotation=1)))
    made.send(Submit(1, (1, 2, 3, 4, 5), 2))
    first = made.launched()
    assert first.segments[0].sampling is None
    made.policy.function = launch(SegmentPlan(1, 3, ((0, 2, 3), (1, 3, 5))))
    made.end(first)
    [waiting] = made.views[-1].prefills
    assert (waiting.computed_tokens, waiting.pending_tokens, waiting.placement) == (2, 3, ((1, 0, 2),))
    [segment] = made.launched().segments
    assert (segment.begin, segment.tokens, segment.resident) == (2, (3, 4, 5), ((1, 0, 2),))
    assert segment.sampling is not None
    assert made.counters["prefills"] == 2
    assert made.counters["prefill_tokens"] == 5
    assert made.counters["scale_downs"] == 0


def test_a_prefill_that_leaves_its_kv_on_fewer_instances_is_a_scale_down(driver: Any) -> None:
    made = driver(launch(SegmentPlan(1, 3, ((1, 0, 3),))))
    made.send(Submit(1, (1, 2, 3), 2))
    assert made.counters["scale_downs"] == 1
    [status] = made.send(GetStatus(0))
    assert "[1]" in next(decision.text for decision in status.decisions if decision.kind == "scale_down")


def test_saves_are_sent_in_order_and_joined(driver: Any) -> None:
    made = driver(launch(SegmentPlan(1, 4, ((0, 3, 4), (1, 0, 1), (0, 4, 4), (1, 1, 3)))))
    made.send(Submit(1, (1, 2, 3, 4), 1))
    assert made.launched().segments[0].save == ((1, 0, 3), (0, 3, 4))


def test_an_evicted_request_is_computed_again_and_repeats_no_token(decoding: Any) -> None:
    decoding.run(token=8)
    decoding.policy.function = lambda view: Plan(drains={0: 1})
    decoding.send(Submit(2, (5,), 1))
    everything = SegmentPlan(1, 3 + 2 + decoding.launched().steps, ((0, 0, 3 + 2 + decoding.launched().steps),))
    decoding.policy.function = launch(everything, evictions=(1,))
    commands = decoding.run(token=9)
    frees = [command for command in commands if isinstance(command, Free)]
    assert [(free.instance, free.request) for free in frees] == [(0, 1), (1, 1)]
    again = decoding.launched()
    assert again.seq > frees[-1].seq
    [segment] = again.segments
    assert (segment.begin, segment.resident, segment.tokens[:5]) == (0, (), (1, 2, 3, 7, 8))
    decoding.policy.function = SafePolicy().plan
    decoding.run_all()
    assert [event.index for event in decoding.sent if isinstance(event, Token) and event.request == 1] == [*range(15)]
    assert decoding.counters["evictions"] == 1
    assert decoding.manager.ledger.total_free == 40


def test_abort_of_a_paused_request_frees_it_at_once_and_asks(decoding: Any) -> None:
    decoding.policy.function = lambda view: Plan(drains={0: 2})
    decoding.send(Submit(2, (5,) * 4, 2))
    decoding.policy.function = launch(SegmentPlan(2, 4, ((0, 0, 4),)), pauses=(1,))
    decoding.run()
    assert decoding.views[-1].decodes[0].paused is False
    decoding.policy.function = nothing
    asked = len(decoding.views)
    commands = decoding.send(Abort(1))
    assert [(type(c), c.request) for c in commands] == [(Free, 1), (Free, 1), (Finished, 1)]
    assert len(decoding.views) == asked + 1


def test_a_drain_for_a_request_that_is_aborted_is_planned_anew(decoding: Any) -> None:
    decoding.policy.function = lambda view: Plan(drains={0: 2})
    decoding.send(Submit(2, (5,) * 4, 2))
    decoding.policy.function = nothing
    decoding.send(Abort(2))
    assert decoding.views[-1].instance(0).drained_for is None
    asked = len(decoding.views)
    decoding.run()
    assert len(decoding.views) == asked
    assert decoding.counters["renewals"] == 1


def test_mean_decode_time_is_of_finished_requests(decoding: Any) -> None:
    assert decoding.views[-1].mean_decode_s == 0
    decoding.now = 6.0
    decoding.run_all()
    decoding.send(Submit(2, (1,), 1))
    assert decoding.views[-1].mean_decode_s == 6.0


def wrong_capacity(view: ClusterView) -> Plan:
    return Plan((Launch((0, 1), (SegmentPlan(1, 3, ((1, 0, 2),)),)),))


def raising(view: ClusterView) -> Plan:
    raise KeyError("no such instance")


def migrating(view: ClusterView) -> Plan:
    return Plan(migrations=(Migrate(1, 0, 1, 0, 1),))


@pytest.mark.parametrize(
    ("plan", "named", "violations"),
    [
        pytest.param(wrong_capacity, "save-cover", 1, id="violation"),
        pytest.param(migrating, "no-migration-yet", 1, id="migration"),
        pytest.param(raising, "KeyError('no such instance')", 0, id="exception"),
        pytest.param(lambda view: None, "AttributeError", 0, id="no plan"),
        pytest.param(nothing, "stall", 0, id="stall"),
    ],
)
def test_the_fallback_plans_where_the_policy_fails_and_each_fault_is_logged_once(
    driver: Any, plan: Planner, named: str, violations: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = driver(plan)
    for request in (1, 2):
        made.send(Submit(request, (1, 2, 3), 2))
        made.run_all()
        assert Finished(request, "length", 3, 2) in made.sent
    assert made.counters["plan_violations"] >= 2 * violations
    assert made.counters["fallback_plans"] >= 2
    assert len([record for record in caplog.records if named in record.getMessage()]) == 1
    [status] = made.send(GetStatus(0))
    assert [named in decision.text for decision in status.decisions if decision.kind == "violation"].count(True) == 1


def test_what_not_even_the_fallback_can_run_ends_with_an_error(driver: Any) -> None:
    made = driver(nothing, fallback=nothing)
    commands = made.send(Submit(1, (1, 2, 3), 2))
    assert [(command.reason, command.message) for command in commands] == [("error", "no policy finds a way to run it")]
    made.policy.function = SafePolicy().plan
    assert isinstance(made.send(Submit(2, (1,), 1))[0], Iteration)


def test_a_policy_is_not_asked_about_an_empty_cluster(driver: Any) -> None:
    made = driver(SafePolicy().plan)
    made.send(Submit(1, (1,), 1))
    asked = len(made.views)
    made.run()
    assert len(made.views) == asked
    assert made.send(IterationDone(made.launched().seq, 0, 0, 0.1)) == []


def test_reasons_become_decisions_when_they_change(driver: Any) -> None:
    made = driver(lambda view: Plan(reasons=("because",)), fallback=SafePolicy().plan)
    made.send(Submit(1, (1, 2), 3))
    made.send(Submit(2, (1, 2), 3))
    made.send(Submit(3, (1, 2), 3))
    [status] = made.send(GetStatus(0))
    texts = [decision.text for decision in status.decisions if decision.kind == "policy"]
    assert texts.count("because") == 1
