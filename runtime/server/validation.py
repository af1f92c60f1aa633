"""Checks of a ``GenerateRequest`` before the manager hears of it. Messages name the field, the limit and the value."""

import math
import secrets
from collections.abc import Iterable

from grpc import StatusCode

from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.protocol import SamplingParams, ServerInfo

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPERATURE = 1.0
MAX_REQUEST_ID_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
ROLES = ("system", "user", "assistant")

# Values in messages are cut to this many characters.
_SHOWN_CHARACTERS = 80


class RequestError(Exception):
    """A request that is not served, with the status code that its client gets."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(field: str, expected: str, got: object) -> RequestError:
    """Make the INVALID_ARGUMENT for a field."""
    shown = got if isinstance(got, str) else repr(got)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "..."
    return RequestError(StatusCode.INVALID_ARGUMENT, f"{field}: expected {expected}, got {shown}")


def check_request(request: pb.GenerateRequest, info: ServerInfo, max_token_characters: int) -> None:
    """Check all that can be told without tokenising.

    Args:
        request: as it came.
        info: the limits of what is served.
        max_token_characters: no token stands for more characters.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    if request.HasField("request_id"):
        _check_request_id(request.request_id)
    _check_input(request, info, info.max_model_len * max_token_characters)
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise invalid("max_tokens", "at least 1", request.max_tokens)
    if request.HasField("temperature") and not 0.0 <= request.temperature < math.inf:
        raise invalid("temperature", "a finite number, at least 0", request.temperature)
    if request.HasField("top_p") and not 0.0 < request.top_p <= 1.0:
        raise invalid("top_p", "a number above 0 and at most 1", request.top_p)
    if request.HasField("top_k") and request.top_k < 0:
        raise invalid("top_k", "0 (does not restrict) or more", request.top_k)
    if len(request.stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(request.stop)}")
    for index, string in enumerate(request.stop):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stop[{index}]", f"1 to {MAX_STOP_CHARACTERS} characters", f"{len(string)}")
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS} ids", f"{len(request.stop_token_ids)}")
    _check_ids("stop_token_ids", request.stop_token_ids, info.vocab_size)


def check_prompt(request: pb.GenerateRequest, num_tokens: int, info: ServerInfo) -> int:
    """Check the length of a tokenised prompt.

    Returns:
        The most tokens to generate.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    field = input_field(request)
    if num_tokens == 0:
        raise invalid(field, "at least 1 token", "none")
    _check_length(field, num_tokens, info)
    room = info.max_model_len - num_tokens
    # The last token of output takes no slot.
    pool_room = info.total_slots + 1 - num_tokens
    if not request.HasField("max_tokens"):
        return min(DEFAULT_MAX_TOKENS, room, pool_room)
    if request.max_tokens > room:
        expected = f"at most {room} after a prompt of {num_tokens} tokens (the model's length is {info.max_model_len})"
        raise invalid("max_tokens", expected, request.max_tokens)
    if request.max_tokens > pool_room:
        expected = f"at most {pool_room} after a prompt of {num_tokens} tokens (pools of {info.total_slots} slots)"
        raise invalid("max_tokens", expected, request.max_tokens)
    return request.max_tokens


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """Fill in the defaults of a checked request's sampling fields."""
    return SamplingParams(
        temperature=request.temperature if request.HasField("temperature") else DEFAULT_TEMPERATURE,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k if request.HasField("top_k") else 0,
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
    )


def input_field(request: pb.GenerateRequest) -> str:
    """Name the field that holds the prompt."""
    return request.WhichOneof("input") or "input"


def _check_request_id(request_id: str) -> None:
    """Refuse what the initial metadata can't carry back: HTTP/2 headers hold ASCII, without spaces at their ends."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise invalid("request_id", f"1 to {MAX_REQUEST_ID_CHARACTERS} characters", f"{len(request_id)}")
    if not all("!" <= character <= "~" for character in request_id):
        raise invalid("request_id", "printable ASCII characters other than spaces", ascii(request_id))


def _check_length(field: str, num_tokens: int, info: ServerInfo) -> None:
    if num_tokens >= info.max_model_len:
        expected = f"a prompt of at most {info.max_model_len - 1} tokens, which leaves room for one of output"
        raise invalid(field, expected, f"{num_tokens} tokens")
    if num_tokens > info.total_slots:
        raise invalid(field, f"at most {info.total_slots} tokens, the slots of all pools", f"{num_tokens} tokens")


def _check_input(request: pb.GenerateRequest, info: ServerInfo, max_characters: int) -> None:
    match request.WhichOneof("input"):
        case "text":
            if not request.text:
                raise invalid("text", "at least 1 character", "an empty string")
            _check_characters("text", len(request.text), max_characters)
        case "token_ids":
            if not request.token_ids.ids:
                raise invalid("token_ids", "at least 1 id", "none")
            _check_length("token_ids", len(request.token_ids.ids), info)
            _check_ids("token_ids", request.token_ids.ids, info.vocab_size)
        case "chat":
            if not request.chat.messages:
                raise invalid("chat", "at least 1 message", "none")
            # Empty messages too cost time, and tokens.
            if len(request.chat.messages) > info.max_model_len:
                expected = f"at most {info.max_model_len} messages, as more can't fit the model's length"
                raise invalid("chat", expected, f"{len(request.chat.messages)}")
            for index, message in enumerate(request.chat.messages):
                if message.role not in ROLES:
                    raise invalid(f"chat[{index}].role", "one of " + ", ".join(ROLES), repr(message.role))
            _check_characters("chat", sum(len(message.content) for message in request.chat.messages), max_characters)
        case _:
            raise invalid("input", "exactly one of text, token_ids and chat", "none")


def _check_characters(field: str, count: int, limit: int) -> None:
    """Refuse what is surely too long before time goes into tokenising it."""
    if count > limit:
        raise invalid(field, f"at most {limit} characters, as more can't fit the model's length", f"{count}")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for index, token in enumerate(ids):
        if token >= vocab_size:
            raise invalid(f"{field}[{index}]", f"an id below the vocabulary's size, {vocab_size}", token)
