"""Messages as bytes: every type comes back equal; anything else is a named error."""

import socket

import pytest

from loongserve.runtime import wire
from loongserve.runtime.protocol import (
    Decision,
    Free,
    InstanceStatus,
    Iteration,
    SampledToken,
    SamplingParams,
    Segment,
    Status,
    StepTokens,
    Submit,
)
from loongserve.runtime.wire import WireError

SEGMENT = Segment(7, 3, (5, 6), ((0, 0, 3),), ((1, 3, 5),), 1, SamplingParams(0.5, 0.9, 40, 2**64 - 1), True)
MESSAGES = [
    Submit(1, (1, 2, 3), 5, stop_tokens=(2,)),
    Iteration(9, 0, (0, 1), (SEGMENT,), steps=2),
    Free(10, 0, 1, 7),
    StepTokens(9, 0, 1, 0, (SampledToken(7, 5, 11, b"\x00\x01"),)),
    Status(
        1, (InstanceStatus(0, 8, 5, "idle"),), 0, 1, {"prefills": 2}, (Decision(0.5, "prefill", (0,), (7,), "text"),)
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    assert wire.decode(wire.encode(message)) == message


def test_another_version_is_named():
    payload = bytes((wire.WIRE_VERSION + 1,)) + wire.encode(MESSAGES[0])[1:]
    with pytest.raises(WireError, match="expected wire version"):
        wire.decode(payload)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x01", b"\x01\xc1", wire.encode(MESSAGES[1])[:-1], b"\x01" + b"\xd4\x7f\x90", b"\x01" + b"\xd4\x01\x90"],
    ids=["empty", "only version", "no msgpack", "cut", "unknown code", "no fields"],
)
def test_junk_is_an_error(payload):
    with pytest.raises(WireError):
        wire.decode(payload)


def test_a_value_of_another_type_is_refused():
    with pytest.raises(TypeError, match="expected a message"):
        wire.encode(object())


def test_frames_on_a_socket():
    left, right = socket.socketpair()
    with left, right:
        for message in MESSAGES:
            wire.send_message(left, message)
        assert [wire.receive_message(right) for _ in MESSAGES] == MESSAGES
        left.sendall(wire.frame(MESSAGES[0])[:7])
        left.close()
        with pytest.raises(WireError, match="ended"):
            wire.receive_message(right)


def test_a_closed_peer_is_none():
    left, right = socket.socketpair()
    with right:
        left.close()
        assert wire.receive_message(right) is None
