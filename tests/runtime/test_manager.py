"""The manager's dealings with clients and ranks: admission, tokens, ends, aborts, loss and status."""

import dataclasses
import math
from typing import Any

import pytest

from loongserve.policies.safe import SafePolicy
from loongserve.policies.static import StaticPolicy
from loongserve.runtime.manager import Manager
from loongserve.runtime.protocol import (
    Abort,
    Finished,
    Free,
    GetStatus,
    InstanceLost,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    Refused,
    SampledToken,
    SamplingParams,
    Status,
    StepTokens,
    Submit,
    Token,
)

GOOD = Submit(1, (1, 2, 3), 4)


@pytest.fixture
def safe(driver: Any) -> Any:
    """Two instances of 20 slots under the safe policy; vocabulary 100, model length 30."""
    return driver(SafePolicy().plan)


def sampling(**values: Any) -> Submit:
    return dataclasses.replace(GOOD, sampling=SamplingParams(**values))


@pytest.mark.parametrize(
    ("submit", "field", "limit"),
    [
        pytest.param(Submit(1, (), 4), "tokens", "at least 1", id="empty prompt"),
        pytest.param(Submit(1, (5, 100), 4), "tokens[1]", "100", id="id above the vocabulary"),
        pytest.param(Submit(1, (-1,), 4), "tokens[0]", "100", id="negative id"),
        pytest.param(Submit(1, (1, 2.0), 4), "tokens[1]", "integer", id="id of another type"),
        pytest.param(Submit(1, (1,) * 31, 1), "tokens", "30", id="longer than the model"),
        pytest.param(Submit(1, (1,) * 30, 1), "tokens", "30", id="no room for a new token"),
        pytest.param(Submit(1, (1,), 0), "max_new_tokens", "at least 1", id="nothing to generate"),
        pytest.param(Submit(1, (1,), -5), "max_new_tokens", "at least 1", id="negative max_new_tokens"),
        pytest.param(Submit(1, (1,), 1, stop_tokens=("x",)), "stop_tokens[0]", "token id", id="stop of another type"),
        pytest.param(sampling(temperature=math.nan), "temperature", "at least 0", id="NaN temperature"),
        pytest.param(sampling(temperature=-0.1), "temperature", "at least 0", id="negative temperature"),
        pytest.param(sampling(temperature=math.inf), "temperature", "finite", id="infinite temperature"),
        pytest.param(sampling(top_p=0.0), "top_p", "(0, 1]", id="top_p 0"),
        pytest.param(sampling(top_p=1.5), "top_p", "(0, 1]", id="top_p above 1"),
        pytest.param(sampling(top_p=math.nan), "top_p", "(0, 1]", id="NaN top_p"),
        pytest.param(sampling(top_k=-1), "top_k", "at least 0", id="negative top_k"),
        pytest.param(sampling(top_k=2**64), "top_k", "2**64", id="top_k beyond 64 bit"),
        pytest.param(sampling(temperature=10**400), "temperature", "finite", id="temperature beyond any float"),
        pytest.param(sampling(seed=2**64), "seed", "2**64", id="seed beyond 64 bit"),
        pytest.param(sampling(seed=-1), "seed", "2**64", id="seed that no random numbers can be made of"),
    ],
)
def test_bad_input_is_refused_by_field_and_a_good_request_is_served_after(
    safe: Any, submit: Submit, field: str, limit: str
) -> None:
    [refused] = safe.send(submit)
    assert isinstance(refused, Refused)
    assert refused.code == "INVALID_ARGUMENT"
    assert refused.message.startswith(f"{field}: ")
    assert limit in refused.message

    safe.send(GOOD)
    safe.run_all()
    assert safe.sent[-1] in (Free(seq, 0, 1, 1) for seq in range(20))
    assert [event.index for event in safe.sent if isinstance(event, Token)] == [0, 1, 2, 3]
    assert safe.manager.ledger.total_free == 40


def test_what_can_never_fit_is_refused_at_once_and_the_queue_moves(driver: Any) -> None:
    safe = driver(SafePolicy().plan, num_slots=(4, 6))
    safe.send(Submit(1, (1,) * 8, 3))
    # 8 + 4 - 1 tokens of KV are one more than there are slots.
    [refused] = safe.send(Submit(2, (1,) * 8, 4))
    assert isinstance(refused, Refused)
    assert refused.code == "INVALID_ARGUMENT"
    assert "11 KV slots" in refused.message
    assert "10 in all" in refused.message
    safe.run()
    safe.run()
    assert Finished(1, "length", 8, 3) in safe.sent + safe.run()


def test_max_new_tokens_is_cut_to_the_models_length(safe: Any) -> None:
    safe.send(Submit(1, (1,) * 27, 1000))
    safe.run_all()
    assert Finished(1, "length", 27, 3) in safe.sent


def test_the_id_of_a_live_request_is_refused_and_the_first_is_untouched(safe: Any) -> None:
    safe.send(GOOD)
    prefill = safe.launched()
    assert [command.code for command in safe.send(GOOD)] == ["ALREADY_EXISTS"]
    safe.send(Abort(1))
    # Its KV still waits for the end of the iteration.
    assert [command.code for command in safe.send(GOOD)] == ["ALREADY_EXISTS"]
    safe.run(prefill)
    assert not any(isinstance(command, Refused) for command in safe.send(GOOD))


def test_requests_are_held_until_all_instances_are_ready(driver: Any) -> None:
    early = driver(SafePolicy().plan, ready=False)
    assert [early.send(event) for event in (GOOD, Submit(2, (), 1), Submit(3, (4,), 1), early.ready[1])] == [[]] * 4
    assert early.send(Abort(3)) == [Finished(3, "abort", 1, 0)]
    [status] = early.send(GetStatus(9))
    assert (status.waiting, status.running, len(status.instances)) == (2, 0, 1)
    refused, iteration = early.send(early.ready[0])
    assert refused.code == "INVALID_ARGUMENT"
    assert [segment.request for segment in iteration.segments] == [1]


def test_a_second_or_unknown_ready_changes_nothing(safe: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert safe.send(Ready(1, 99)) == safe.send(Ready(7, 99)) == []
    assert safe.manager.ledger.total_free == 40
    assert "instance 7" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"num_instances": 0}, {"vocab_size": 0}, {"max_model_len": 1}, {"control_interval_s": 0}, {"max_steps": 0}],
)
def test_constructor_names_what_is_out_of_range(options: dict[str, Any]) -> None:
    values = {"num_instances": 1, "vocab_size": 10, "max_model_len": 10} | options
    with pytest.raises(ValueError, match=next(iter(options))):
        Manager(SafePolicy(), SafePolicy(), **values)


def test_a_token_is_published_once_whoever_reports_it_again(safe: Any) -> None:
    safe.send(GOOD)
    prefill = safe.launched()
    [segment] = prefill.segments
    sampler = prefill.group[segment.sampler_member(2)]
    good = StepTokens(prefill.seq, 0, sampler, 0, (SampledToken(1, 3, 7, b"logits"),))
    for strange in (
        dataclasses.replace(good, epoch=1),
        dataclasses.replace(good, seq=99),
        dataclasses.replace(good, instance=1 - sampler),
        dataclasses.replace(good, tokens=(SampledToken(2, 3, 7),)),
        dataclasses.replace(good, tokens=(SampledToken(1, 2, 7), SampledToken(1, 4, 7))),
    ):
        assert safe.send(strange) == []
    assert safe.send(good) == [Token(1, 0, 7, b"logits")]
    assert safe.send(good) == []
    safe.end(prefill)
    assert safe.send(good) == []
    assert safe.launched().segments[0].tokens == (7,)


def test_members_may_end_in_any_order_and_report_twice(safe: Any) -> None:
    safe.send(GOOD)
    prefill = safe.launched()
    safe.sample(prefill)
    for instance, epoch in ((1, 1), (1, 0), (1, 0)):
        assert safe.send(IterationDone(prefill.seq, epoch, instance, 0.1)) == []
    [decode] = safe.send(IterationDone(prefill.seq, 0, 0, 0.1))
    assert isinstance(decode, Iteration)
    assert safe.send(IterationDone(prefill.seq, 0, 0, 0.1)) == []


def test_a_stop_token_is_published_and_ends_the_request_at_once(driver: Any) -> None:
    safe = driver(SafePolicy().plan, num_slots=(20, 20), control_interval_s=10.0)
    safe.send(Submit(1, (1, 2, 3), 20, stop_tokens=(50, 60)))
    safe.run()
    safe.run()
    decode = safe.launched()
    assert decode.steps == 8
    assert safe.sample(decode, 0, token=7) == [Token(1, 2, 7)]
    assert safe.sample(decode, 1, token=60) == [Token(1, 3, 60), Finished(1, "stop", 3, 4)]
    assert safe.sample(decode, 2, token=9) == []
    # Slots come back when no rank can write to them any more.
    assert safe.manager.ledger.total_free < 40
    assert all(isinstance(command, Free) for command in safe.end(decode))
    assert safe.manager.ledger.total_free == 40


def test_a_sampler_that_keeps_its_token_ends_that_request_alone(safe: Any) -> None:
    safe.send(GOOD)
    safe.send(Submit(2, (9,), 1))
    [finished] = [command for command in safe.end(safe.launched()) if isinstance(command, Finished)]
    assert (finished.request, finished.reason) == (1, "error")
    assert "without its token" in finished.message
    safe.run()
    assert Finished(2, "length", 1, 1) in safe.sent
    assert safe.manager.ledger.total_free == 40


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_abort_ends_a_request_once_and_gives_everything_back(safe: Any, state: str) -> None:
    if state == "waiting":
        safe.send(Submit(5, (1,), 5))
    safe.send(GOOD)
    if state == "decode":
        safe.run()
    first = safe.send(Abort(1))
    assert [command for command in first if isinstance(command, Finished)] == [
        Finished(1, "abort", 3, 1 if state == "decode" else 0)
    ]
    assert safe.send(Abort(1)) == []
    assert safe.send(Abort(99)) == []
    running = safe.launched()
    late = safe.run(running)
    assert all(command.request != 1 for command in late if isinstance(command, Token))
    safe.send(Abort(5))
    safe.run()
    assert safe.manager.ledger.total_free == 40
    assert safe.counters["aborted"] == (2 if state == "waiting" else 1)


def test_abort_of_one_row_leaves_its_neighbour_alone(driver: Any) -> None:
    static = driver(StaticPolicy().plan)
    static.send(Submit(1, (1, 2, 3), 15))
    static.send(Submit(2, (4, 5), 15))
    for _ in range(10):
        static.run()
        if len(static.launched().segments) == 2:
            break
    assert static.send(Abort(1))[-1].reason == "abort"
    static.run_all()
    assert [event.index for event in static.sent if isinstance(event, Token) and event.request == 2] == [*range(15)]
    assert [event.reason for event in static.sent if isinstance(event, Finished)] == ["abort", "length"]


@pytest.mark.parametrize("failure", ["lost", "failed"])
def test_loss_of_an_instance_ends_every_request_and_refuses_new_ones(safe: Any, failure: str) -> None:
    safe.send(GOOD)
    safe.run()
    safe.send(Submit(2, (1,), 1))
    running = safe.launched()
    event = InstanceLost(1, "gone") if failure == "lost" else IterationFailed(running.seq, 0, 1, "out of memory")
    commands = safe.send(event)
    assert [(command.request, command.reason) for command in commands] == [(1, "error"), (2, "error")]
    assert all("instance 1" in command.message for command in commands)
    assert safe.send(event) == []
    assert safe.run(running) == []
    [refused] = safe.send(Submit(3, (1,), 1))
    assert refused.code == "UNAVAILABLE"
    assert "instance 1" in refused.message
    assert safe.send(Abort(1)) == []
    [status] = safe.send(GetStatus(1))
    assert [instance.state for instance in status.instances] == ["idle", "lost"]
    assert (status.waiting, status.running) == (0, 0)


def test_loss_before_all_are_ready_refuses_what_was_held(driver: Any) -> None:
    early = driver(SafePolicy().plan, ready=False)
    early.send(GOOD)
    [refused] = early.send(InstanceLost(0, "no weights"))
    assert (refused.request, refused.code) == (1, "UNAVAILABLE")
    assert early.send(early.ready[0]) == early.send(early.ready[1]) == []
    assert [command.code for command in early.send(GOOD)] == ["UNAVAILABLE"]


def test_status_shows_instances_groups_and_decisions(safe: Any) -> None:
    safe.send(GOOD)
    safe.send(Submit(2, (1,), 1))
    [status] = safe.send(GetStatus(5))
    assert isinstance(status, Status)
    assert status.query == 5
    assert [(i.state, i.group, i.free_slots) for i in status.instances] == [
        ("prefill", (0, 1), 19),
        ("prefill", (0, 1), 18),
    ]
    assert (status.waiting, status.running) == (1, 1)
    assert status.counters["prefills"] == 1
    assert status.counters["prefill_tokens"] == 3
    assert status.counters["drains"] == 2
    kinds = [decision.kind for decision in status.decisions]
    assert kinds.count("prefill") == 1
    assert kinds.count("drain") == 2


def test_every_command_has_its_own_rising_seq(safe: Any) -> None:
    for request in range(3):
        safe.send(Submit(request, (1, 2), 3))
    safe.run_all()
    seqs = [command.seq for command in safe.sent if isinstance(command, Iteration | Free)]
    assert seqs == sorted(set(seqs))
