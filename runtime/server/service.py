"""The service ``loongserve.v1.Loong``: validates, tokenises, submits, streams."""

import asyncio
import itertools
import uuid
from contextlib import suppress

import grpc
import grpc.aio
from grpc import StatusCode

from loongserve.runtime.client import ManagerClient, ManagerLost
from loongserve.runtime.detokenizer import IncrementalDetokenizer
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto import loongserve_pb2_grpc as pb_grpc
from loongserve.runtime.protocol import FinishReason, ServerInfo, Status, Submit
from loongserve.runtime.server.generation import Delta, Generation
from loongserve.runtime.server.text import TextCodec
from loongserve.runtime.server.validation import (
    RequestError,
    check_prompt,
    check_request,
    input_field,
    invalid,
    sampling_params,
)

REQUEST_ID_METADATA = "loong-request-id"

_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}

_GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class LoongService(pb_grpc.LoongServicer):
    """Front end of one manager. All methods run in one event loop."""

    def __init__(self, client: ManagerClient, codec: TextCodec) -> None:
        self._client = client
        self._codec = codec
        self._live: dict[str, Generation] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: _GenerateContext) -> None:
        """Stream a request's output. The call's cancellation aborts the request."""
        try:
            request_id, generation = self._admit(request)
        except RequestError as error:
            await context.abort(error.code, error.message)
        pump: asyncio.Task[None] | None = None
        try:
            await context.send_initial_metadata(((REQUEST_ID_METADATA, request_id),))
            submit = await self._prepare(request, generation.request)
            pump = asyncio.create_task(generation.run(submit))
            while True:
                delta = await generation.next()
                await context.write(_response(request_id, delta))
                if delta.reason is not None:
                    break
            if delta.reason == "error":
                raise RequestError(StatusCode.INTERNAL, delta.error or "the engine failed on this request")
        except RequestError as error:
            await context.abort(error.code, error.message)
        finally:
            generation.abort()
            if pump is not None and not generation.ended:
                # The manager's last event of the request is not waited for.
                pump.cancel()
            del self._live[request_id]
            if not self._live:
                self._idle.set()

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        """End a live request; others are ignored."""
        if not request.request_id:
            error = invalid("request_id", "at least 1 character", "an empty string")
            await context.abort(error.code, error.message)
        generation = self._live.get(request.request_id)
        if generation is not None:
            generation.abort()
        return pb.AbortResponse(found=generation is not None)

    async def GetCluster(
        self, request: pb.GetClusterRequest, context: grpc.aio.ServicerContext[pb.GetClusterRequest, pb.Cluster]
    ) -> pb.Cluster:
        """Answer what the cluster is and does."""
        try:
            status = await self._client.status()
        except ManagerLost as lost:
            await context.abort(StatusCode.UNAVAILABLE, f"the engine has stopped: {lost}")
        return _cluster(self._client.info, status)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let the live ones finish for ``grace_s`` seconds, then end the rest as UNAVAILABLE."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for generation in list(self._live.values()):
            generation.fail(RequestError(StatusCode.UNAVAILABLE, "the server is shutting down"))

    def _admit(self, request: pb.GenerateRequest) -> tuple[str, Generation]:
        """Check a request and make it live. Raises: RequestError."""
        if self._draining:
            raise RequestError(StatusCode.UNAVAILABLE, "the server is shutting down")
        if not self._client.healthy:
            raise RequestError(StatusCode.UNAVAILABLE, "the engine has stopped: restart loong-run")
        check_request(request, self._client.info, self._codec.max_token_characters)
        request_id = request.request_id if request.HasField("request_id") else uuid.uuid4().hex
        if request_id in self._live:
            raise RequestError(
                StatusCode.ALREADY_EXISTS, f"request_id: expected one of no live request, got {request_id}"
            )
        detokenizer = IncrementalDetokenizer(self._codec, tuple(request.stop))
        generation = Generation(self._client, next(self._numbers), detokenizer)
        self._live[request_id] = generation
        self._idle.clear()
        return request_id, generation

    async def _prepare(self, request: pb.GenerateRequest, number: int) -> Submit:
        """Tokenise a checked request. Raises: RequestError."""
        match request.WhichOneof("input"):
            case "token_ids":
                tokens = tuple(request.token_ids.ids)
            case "text":
                tokens = await self._codec.encode(request.text)
            case _:
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                try:
                    tokens = await self._codec.encode_chat(messages)
                except ValueError as error:
                    raise RequestError(StatusCode.INVALID_ARGUMENT, f"{input_field(request)}: {error}") from error
        max_new_tokens = check_prompt(request, len(tokens), self._client.info)
        stop_tokens = set(request.stop_token_ids)
        if not request.ignore_eos:
            stop_tokens |= set(self._client.info.eos_tokens)
        return Submit(number, tokens, max_new_tokens, sampling_params(request), tuple(sorted(stop_tokens)))


def _response(request_id: str, delta: Delta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=request_id, text=delta.text, token_ids=delta.tokens)
    if delta.reason is not None:
        response.finish_reason = _REASONS[delta.reason]
        response.usage.prompt_tokens = delta.prompt_tokens
        response.usage.output_tokens = delta.output_tokens
    return response


def _cluster(info: ServerInfo, status: Status) -> pb.Cluster:
    return pb.Cluster(
        model=info.model,
        policy=info.policy,
        dtype=info.dtype,
        device=info.device,
        max_model_len=info.max_model_len,
        total_slots=info.total_slots,
        instances=[
            pb.Instance(
                instance=instance.instance,
                num_slots=instance.num_slots,
                free_slots=instance.free_slots,
                state=instance.state,
                group=instance.group,
            )
            for instance in status.instances
        ],
        waiting=status.waiting,
        running=status.running,
        counters=status.counters,
        decisions=[
            pb.Decision(
                time_s=decision.time_s,
                kind=decision.kind,
                group=decision.group,
                requests=decision.requests,
                text=decision.text,
            )
            for decision in status.decisions
        ],
    )
