"""Messages of ``protocol.py`` as bytes: msgpack, each dataclass as an extension type, in frames on a stream socket.

A frame is a 4-byte big-endian length and that many bytes of payload; a payload is one version byte and one msgpack
value. Sequences come back as tuples. A peer of another version, a frame cut short or a message of the wrong shape
raises ``WireError``; nothing is ever unpickled.
"""

import dataclasses
import socket
import struct
from typing import Any

import msgpack

from loongserve.runtime import protocol

WIRE_VERSION = 1
# Far above any real message (a prompt of 10 million tokens is 50 MB), far below what would exhaust the memory.
MAX_FRAME_BYTES = 1 << 30

HEADER = struct.Struct(">I")

# The position in this tuple is the extension type's code: append only, and count WIRE_VERSION up when a class changes.
MESSAGES: tuple[type, ...] = (
    protocol.SamplingParams,
    protocol.Submit,
    protocol.Abort,
    protocol.GetStatus,
    protocol.Token,
    protocol.Finished,
    protocol.Refused,
    protocol.InstanceStatus,
    protocol.Decision,
    protocol.Status,
    protocol.Segment,
    protocol.Iteration,
    protocol.Free,
    protocol.Shutdown,
    protocol.Ready,
    protocol.SampledToken,
    protocol.StepTokens,
    protocol.IterationDone,
    protocol.IterationFailed,
    protocol.InstanceLost,
    protocol.ServerInfo,
    protocol.StartupFailed,
)
_CODES = {message: code for code, message in enumerate(MESSAGES)}
_FIELDS = {message: tuple(f.name for f in dataclasses.fields(message)) for message in MESSAGES}


class WireError(RuntimeError):
    """What came over a socket is not a message of this version."""


def encode(message: Any) -> bytes:
    """Turn a message (or a plain value of msgpack's types) into a payload.

    Raises:
        TypeError: the message, or something in it, is of no type of ``MESSAGES``.
    """
    packed: bytes = msgpack.packb(message, default=_to_extension, use_bin_type=True)
    return bytes((WIRE_VERSION,)) + packed


def decode(payload: bytes | bytearray | memoryview) -> Any:
    """Turn a payload back into the message.

    Raises:
        WireError: another version, no valid msgpack, or a message with the wrong number of fields.
    """
    if len(payload) == 0 or payload[0] != WIRE_VERSION:
        got = payload[0] if len(payload) else "an empty payload"
        raise WireError(f"expected wire version {WIRE_VERSION}, got {got}: both ends must be of one loongserve version")
    try:
        return msgpack.unpackb(payload[1:], ext_hook=_from_extension, use_list=False, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a message: {error}") from error


def frame(message: Any) -> bytes:
    """Return the frame of a message: length, version, msgpack."""
    payload = encode(message)
    return HEADER.pack(len(payload)) + payload


def send_message(sock: socket.socket, message: Any) -> None:
    """Send one message on a blocking socket. Raises: OSError when the peer is gone."""
    sock.sendall(frame(message))


def receive_message(sock: socket.socket) -> Any | None:
    """Receive one message from a blocking socket; None when the peer has closed its end between two messages.

    Raises:
        WireError: the stream ended within a frame, or a frame is no message.
    """
    header = _receive_exactly(sock, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise WireError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got one of {size}")
    payload = _receive_exactly(sock, size)
    if payload is None:
        raise WireError("the stream ended after a frame's header")
    return decode(payload)


def _to_extension(value: Any) -> msgpack.ExtType:
    code = _CODES.get(type(value))
    if code is None:
        raise TypeError(f"expected a message of loongserve.runtime.wire.MESSAGES, got {type(value).__name__}")
    fields = [getattr(value, name) for name in _FIELDS[type(value)]]
    return msgpack.ExtType(code, msgpack.packb(fields, default=_to_extension, use_bin_type=True))


def _from_extension(code: int, data: bytes) -> Any:
    if not 0 <= code < len(MESSAGES):
        raise ValueError(f"unknown message code {code}")
    message = MESSAGES[code]
    fields = msgpack.unpackb(data, ext_hook=_from_extension, use_list=False, strict_map_key=False)
    expected = len(_FIELDS[message])
    if not isinstance(fields, tuple) or len(fields) != expected:
        raise ValueError(f"{message.__name__} has {expected} fields, got {fields!r:.80}")
    return message(*fields)


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = sock.recv_into(view[done:])
        if count == 0:
            if done == 0:
                return None
            raise WireError(f"the stream ended after {done} of {size} bytes")
        done += count
    return data
