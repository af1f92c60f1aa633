"""What a caller of the library reads of one request."""

import pytest

from loongserve.runtime.engine import RequestRefused, Stream
from loongserve.runtime.protocol import Finished, Refused, Token

pytestmark = pytest.mark.timeout(20)


def stream_of(*events: Token | Finished | Refused) -> Stream:
    stream = Stream(1)
    for event in events:
        stream._events.put(event)
    return stream


def test_tokens_then_the_end() -> None:
    tokens, end = [Token(1, 0, 5), Token(1, 1, 6)], Finished(1, "length", 3, 2)
    stream = stream_of(*tokens, end)
    assert list(stream) == tokens
    assert stream.finished == end
    assert list(stream) == []


def test_a_refused_request_is_read_again_without_waiting() -> None:
    """Reading once more waited for ever for events that never come."""
    stream = stream_of(Refused(1, "INVALID_ARGUMENT", "tokens: the prompt is empty"))
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        list(stream)
    assert list(stream) == []
    assert stream.finished is not None
    assert stream.finished.reason == "error"
