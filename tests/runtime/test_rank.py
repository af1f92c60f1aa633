"""A rank's process ends whatever becomes of the socket that commands it."""

import socket
import struct

import pytest

from loongserve.runtime import wire
from loongserve.runtime.process_executor import spawn_module

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(struct.pack(">I", 1000) + b"half", id="half-a-frame"),
        pytest.param(struct.pack(">I", 2) + bytes([wire.WIRE_VERSION + 1, 0]), id="another-version"),
    ],
)
def test_rank_ends_with_its_socket(sent: bytes) -> None:
    """A manager killed while it sent a long prompt left ranks behind: half a frame ended the reading thread alone."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = spawn_module("loongserve.runtime.rank", theirs)
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
