"""Generate and Abort over a real connection: text, tokens, ends, aborts, faults."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from loongserve.runtime.detokenizer import IncrementalDetokenizer
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.protocol import Finished, Token
from loongserve.runtime.server import server as server_module

pytestmark = pytest.mark.timeout(60)


async def _collect(call: Any) -> tuple[str, list[int], pb.GenerateResponse]:
    """The whole text, all tokens and the last response of a stream."""
    responses: list[pb.GenerateResponse] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    text = "".join(response.text for response in responses)
    tokens = [token for response in responses for token in response.token_ids]
    assert all(response.finish_reason == 0 and not response.HasField("usage") for response in responses[:-1])
    return text, tokens, responses[-1]


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def _fails(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _collect(call)
    return caught.value


def test_text_streams_to_its_end(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            call = served.stub.Generate(pb.GenerateRequest(text="héllo", temperature=0.0))
            text, tokens, last = await _collect(call)
            assert text == "Hello, 龙!"
            assert tokens == served.manager.answer
            assert last.finish_reason == pb.FINISH_REASON_STOP
            assert (last.usage.prompt_tokens, last.usage.output_tokens) == (6, len(tokens))
            (submit,) = served.manager.submitted
            assert list(submit.tokens) == served.manager.encode("héllo")
            metadata = dict(await call.initial_metadata())
            assert metadata["loong-request-id"] == last.request_id

    asyncio.run(body())


def test_defaults_of_fields_that_are_not_set(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            await _collect(served.stub.Generate(pb.GenerateRequest(text="a")))
            await _collect(served.stub.Generate(pb.GenerateRequest(text="a")))
            first, second = (submit.sampling for submit in manager.submitted)
            assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
            assert first.seed != second.seed
            assert manager.submitted[0].max_new_tokens == 256
            assert manager.submitted[0].stop_tokens == manager.info.eos_tokens
            # A zero is a value.
            zeros = pb.GenerateRequest(text="a", temperature=0.0, top_k=0, seed=0, ignore_eos=True)
            await _collect(served.stub.Generate(zeros))
            sampling = manager.submitted[2].sampling
            assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 0, 0)
            assert manager.submitted[2].stop_tokens == ()
            # Near the model's length, the default is what is left.
            await _collect(served.stub.Generate(pb.GenerateRequest(text="x" * 990)))
            assert manager.submitted[3].max_new_tokens == 10

    asyncio.run(body())


def test_token_ids_and_length(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), max_tokens=4)
            text, tokens, last = await _collect(served.stub.Generate(request))
            assert served.manager.submitted[0].tokens == (5, 6, 7)
            assert text == "Hell"
            assert len(tokens) == 4
            assert last.finish_reason == pb.FINISH_REASON_LENGTH

    asyncio.run(body())


def test_chat_goes_through_the_template(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            messages = [pb.ChatMessage(role="system", content="be kind"), pb.ChatMessage(role="user", content="你好")]
            await _collect(served.stub.Generate(pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))))
            expected = "<|start|>system:be kind<|end|><|start|>user:你好<|end|><|start|>assistant:"
            assert list(served.manager.submitted[0].tokens) == served.manager.encode(expected)

    asyncio.run(body())


def test_chat_that_the_template_refuses(serving: Any) -> None:
    async def body() -> None:
        late = [pb.ChatMessage(role="user", content="a"), pb.ChatMessage(role="system", content="b")]
        request = pb.GenerateRequest(chat=pb.ChatMessages(messages=late))
        async with serving() as served:
            error = await _fails(served.stub.Generate(request))
            assert error.code() == StatusCode.INVALID_ARGUMENT
            assert "system goes first" in error.details()
        async with serving(template=None) as served:
            error = await _fails(served.stub.Generate(request))
            assert error.code() == StatusCode.INVALID_ARGUMENT
            assert "no chat template" in error.details()

    asyncio.run(body())


def test_a_character_is_never_split(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            manager.answer = manager.encode("👩‍👩‍👧‍👦 龙 é")
            manager.pause_after = 0
            call = served.stub.Generate(pb.GenerateRequest(text="a", ignore_eos=True))
            await _until(lambda: manager.live)
            queue = manager.live[1]
            reader = asyncio.create_task(_collect(call))
            for index, token in enumerate(manager.answer):
                queue.put_nowait(Token(1, index, token))
                await asyncio.sleep(0.002)
            queue.put_nowait(Finished(1, "length", 1, len(manager.answer)))
            text, tokens, _ = await reader
            assert text == "👩‍👩‍👧‍👦 龙 é"
            assert tokens == manager.answer

    asyncio.run(body())


def test_half_a_character_at_the_end(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.answer = served.manager.encode("a龙")[:-1]
            text, _, last = await _collect(served.stub.Generate(pb.GenerateRequest(text="a")))
            assert text == "a\ufffd"
            assert last.finish_reason == pb.FINISH_REASON_LENGTH

    asyncio.run(body())


def test_stop_string_ends_the_request_at_the_manager(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            manager.answer = manager.encode("one two END three")
            manager.pause_after = len(manager.answer)
            request = pb.GenerateRequest(text="a", stop=["nothing", "END"])
            text, tokens, last = await _collect(served.stub.Generate(request))
            assert text == "one two "
            assert tokens == manager.encode("one two END")
            assert last.finish_reason == pb.FINISH_REASON_STOP
            assert last.usage.output_tokens == 11
            assert manager.aborted == [1]

    asyncio.run(body())


def test_text_that_only_began_a_stop_string_is_given_at_the_end(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.answer = served.manager.encode("one EN")
            text, _, last = await _collect(served.stub.Generate(pb.GenerateRequest(text="a", stop=["END"])))
            assert text == "one EN"
            assert last.finish_reason == pb.FINISH_REASON_LENGTH

    asyncio.run(body())


def test_stop_token_is_no_part_of_the_text(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            (comma,) = manager.encode(",")
            text, tokens, last = await _collect(
                served.stub.Generate(pb.GenerateRequest(text="a", stop_token_ids=[comma]))
            )
            assert text == "Hello"
            assert tokens[-1] == comma
            assert last.finish_reason == pb.FINISH_REASON_STOP

    asyncio.run(body())


def test_cancelled_call_aborts_the_request(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.pause_after = 2
            call = served.stub.Generate(pb.GenerateRequest(text="a", request_id="mine"))
            await call.read()
            call.cancel()
            await _until(lambda: served.manager.aborted == [1])
            # The id is free again, and the server serves.
            served.manager.pause_after = None
            text, _, _ = await _collect(served.stub.Generate(pb.GenerateRequest(text="a", request_id="mine")))
            assert text == "Hello, 龙!"

    asyncio.run(body())


def test_lost_connection_aborts_the_request(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.pause_after = 2
            other = grpc.aio.insecure_channel(served.server.address)
            call = type(served.stub)(other).Generate(pb.GenerateRequest(text="a"))
            await call.read()
            await other.close()
            await _until(lambda: served.manager.aborted == [1])

    asyncio.run(body())


def test_abort_by_id(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.pause_after = 3
            call = served.stub.Generate(pb.GenerateRequest(text="a", request_id="mine"))
            await _until(lambda: served.manager.live)
            assert (await served.stub.Abort(pb.AbortRequest(request_id="mine"))).found
            text, _, last = await _collect(call)
            assert text == "Hel"
            assert last.finish_reason == pb.FINISH_REASON_ABORT
            # Again, and one that never was: nothing happens.
            assert not (await served.stub.Abort(pb.AbortRequest(request_id="mine"))).found
            assert not (await served.stub.Abort(pb.AbortRequest(request_id="other"))).found
            assert served.manager.aborted == [1]
            with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
                await served.stub.Abort(pb.AbortRequest())

    asyncio.run(body())


def test_duplicate_id_leaves_the_first_alone(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            manager.pause_after = 3
            first = served.stub.Generate(pb.GenerateRequest(text="a", request_id="mine"))
            await first.read()
            error = await _fails(served.stub.Generate(pb.GenerateRequest(text="b", request_id="mine")))
            assert error.code() == StatusCode.ALREADY_EXISTS
            assert "mine" in error.details()
            assert len(manager.submitted) == 1
            assert manager.aborted == []
            manager.abort(1)
            _, _, last = await _collect(first)
            assert last.finish_reason == pb.FINISH_REASON_ABORT

    asyncio.run(body())


def test_refusal_has_the_managers_code(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.refusal = ("RESOURCE_EXHAUSTED", "tokens: needs 5000 slots, all pools have 3000")
            error = await _fails(served.stub.Generate(pb.GenerateRequest(text="a")))
            assert error.code() == StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "tokens: needs 5000 slots, all pools have 3000"

    asyncio.run(body())


def test_engine_error_ends_with_internal(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.error = "instance 2 is lost"
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            response = await call.read()
            assert response.finish_reason == pb.FINISH_REASON_ERROR
            assert response.usage.output_tokens == len(response.token_ids) > 0
            error = await _fails(call)
            assert error.code() == StatusCode.INTERNAL
            assert error.details() == "instance 2 is lost"


def test_fault_in_the_front_end_ends_the_stream(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with serving() as served:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            monkeypatch.setattr(IncrementalDetokenizer, "push", lambda detokenizer, token: 1 // 0)
            error = await _fails(served.stub.Generate(pb.GenerateRequest(text="a")))
            assert error.code() == StatusCode.INTERNAL
            assert "ZeroDivisionError" in error.details()
            assert served.manager.aborted == [1]

    asyncio.run(body())


def test_slow_reader_holds_up_nobody(serving: Any) -> None:
    """The engine goes on, a stop string still ends the request at once, and others are served meanwhile."""

    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            long_text = "0123456789" * 20_000
            manager.answer = manager.encode(long_text + "END")
            manager.info = type(manager.info)(
                "scripted", manager.info.vocab_size, 10**6, 10**6, 3, "elastic", "float32", "cpu", (256,)
            )
            manager.pause_after = len(manager.answer)
            slow = served.stub.Generate(pb.GenerateRequest(text="a", stop=["END"], max_tokens=300_000))
            await _until(lambda: manager.aborted == [1])
            manager.answer, manager.pause_after = manager.encode("quick"), None
            text, _, _ = await _collect(served.stub.Generate(pb.GenerateRequest(text="a")))
            assert text == "quick"
            text, _, last = await _collect(slow)
            assert text == long_text
            assert last.finish_reason == pb.FINISH_REASON_STOP

    asyncio.run(body())


def test_many_at_once(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            calls = [served.stub.Generate(pb.GenerateRequest(text="a" * (i + 1))) for i in range(40)]
            answers = await asyncio.gather(*(_collect(call) for call in calls))
            assert {text for text, _, _ in answers} == {"Hello, 龙!"}
            assert [last.usage.prompt_tokens for _, _, last in answers] == list(range(1, 41))
            assert len({last.request_id for _, _, last in answers}) == 40

    asyncio.run(body())


def test_lost_manager_ends_streams_and_refuses_new_ones(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.pause_after = 2
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            await call.read()
            served.manager.kill()
            for error in (
                await _fails(call),
                await _fails(served.stub.Generate(pb.GenerateRequest(text="a"))),
            ):
                assert error.code() == StatusCode.UNAVAILABLE
                assert "engine has stopped" in error.details()
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await served.stub.GetCluster(pb.GetClusterRequest())

    asyncio.run(body())


def test_stop_lets_streams_finish_in_the_grace_period(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            manager = served.manager
            manager.pause_after = 2
            ends = served.stub.Generate(pb.GenerateRequest(text="a"))
            await ends.read()
            stop = asyncio.create_task(served.server.stop(5.0))
            await asyncio.sleep(0.05)
            assert not stop.done()
            error = await _fails(served.stub.Generate(pb.GenerateRequest(text="b")))
            assert error.code() == StatusCode.UNAVAILABLE
            manager.live[1].put_nowait(Finished(1, "length", 1, 2))
            _, _, last = await _collect(ends)
            assert last.finish_reason == pb.FINISH_REASON_LENGTH
            await stop

    asyncio.run(body())


def test_stop_ends_what_is_left_as_unavailable(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            served.manager.pause_after = 2
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            await call.read()
            await served.server.stop(0.05)
            error = await _fails(call)
            assert error.code() == StatusCode.UNAVAILABLE
            assert "shutting down" in error.details()
            assert served.manager.aborted == [1]

    asyncio.run(body())


def test_port_in_use_is_an_error(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            port = int(served.server.address.rsplit(":", 1)[1])
            second = server_module.LoongServer(served.manager, served.server._service._codec, port=port)
            with pytest.raises(OSError, match="grpc-port"):
                await second.start()

    asyncio.run(body())
