"""Bad input at Generate: the right code, with field, limit and value; nothing reaches the manager; the server lives."""

import asyncio
import dataclasses
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from loongserve.runtime.proto import loongserve_pb2 as pb

pytestmark = pytest.mark.timeout(60)


def _chat(*messages: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


# name: (fields, what the message holds)
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no-input": ({}, ("input", "text, token_ids and chat", "none")),
    "empty-text": ({"text": ""}, ("text", "at least 1")),
    "empty-ids": ({"token_ids": pb.TokenIds()}, ("token_ids", "at least 1")),
    "empty-chat": ({"chat": _chat()}, ("chat", "at least 1")),
    "bad-role": (
        {"chat": _chat(("user", "a"), ("wizard", "b"))},
        ("chat[1].role", "system, user, assistant", "wizard"),
    ),
    "long-text": ({"text": "x" * 1000}, ("text", "999", "1000 tokens")),
    "huge-text": ({"text": "x" * 50_000_000}, ("text", "characters", "50000000")),
    "long-ids": ({"token_ids": pb.TokenIds(ids=[1] * 1000)}, ("token_ids", "999", "1000 tokens")),
    "long-chat": ({"chat": _chat(("user", "x" * 990))}, ("chat", "999")),
    # The length is refused before time goes into ids or messages.
    "huge-ids": ({"token_ids": pb.TokenIds(ids=[999] * 1_000_000)}, ("token_ids", "999", "1000000 tokens")),
    "many-messages": ({"chat": _chat(*[("user", "")] * 1001)}, ("chat", "1000 messages", "got 1001")),
    "id-out-of-vocabulary": ({"token_ids": pb.TokenIds(ids=[1, 258])}, ("token_ids[1]", "258", "vocabulary")),
    "max-tokens-zero": ({"text": "a", "max_tokens": 0}, ("max_tokens", "at least 1", "got 0")),
    "max-tokens-negative": ({"text": "a", "max_tokens": -5}, ("max_tokens", "at least 1", "-5")),
    "max-tokens-too-many": ({"text": "aaaa", "max_tokens": 997}, ("max_tokens", "996", "1000", "997")),
    "temperature-nan": ({"text": "a", "temperature": float("nan")}, ("temperature", "at least 0", "nan")),
    "temperature-inf": ({"text": "a", "temperature": float("inf")}, ("temperature", "finite", "inf")),
    "temperature-negative": ({"text": "a", "temperature": -0.5}, ("temperature", "at least 0", "-0.5")),
    "top-p-zero": ({"text": "a", "top_p": 0.0}, ("top_p", "above 0", "0.0")),
    "top-p-above-one": ({"text": "a", "top_p": 1.5}, ("top_p", "at most 1", "1.5")),
    "top-p-nan": ({"text": "a", "top_p": float("nan")}, ("top_p", "nan")),
    "top-k-negative": ({"text": "a", "top_k": -1}, ("top_k", "0", "-1")),
    "stop-empty": ({"text": "a", "stop": ["b", ""]}, ("stop[1]", "1 to 256", "got 0")),
    "stop-long": ({"text": "a", "stop": ["b" * 257]}, ("stop[0]", "256", "257")),
    "stop-many": ({"text": "a", "stop": ["b"] * 17}, ("stop", "16", "17")),
    "stop-ids-many": ({"text": "a", "stop_token_ids": [1] * 65}, ("stop_token_ids", "64", "65")),
    "stop-id-out-of-vocabulary": ({"text": "a", "stop_token_ids": [2**32 - 1]}, ("stop_token_ids[0]", "258")),
    "request-id-empty": ({"text": "a", "request_id": ""}, ("request_id", "1 to 256", "0")),
    "request-id-nul": ({"text": "a", "request_id": "a\x00"}, ("request_id", "ASCII", r"'a\x00'")),
    "request-id-two-lines": ({"text": "a", "request_id": "a\nb"}, ("request_id", "ASCII", r"'a\nb'")),
    "request-id-space": ({"text": "a", "request_id": " a"}, ("request_id", "ASCII", "' a'")),
    "request-id-not-ascii": ({"text": "a", "request_id": "龙"}, ("request_id", "ASCII", r"'\u9f99'")),
    "request-id-long": ({"text": "a", "request_id": "i" * 257}, ("request_id", "256", "257")),
}


def test_bad_input_is_named_and_harmless(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            for name, (fields, parts) in BAD.items():
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in served.stub.Generate(pb.GenerateRequest(**fields)):
                        pass
                assert caught.value.code() == StatusCode.INVALID_ARGUMENT, name
                details = caught.value.details() or ""
                assert all(part in details for part in parts), (name, details)
                assert len(details) < 400, name
                assert served.manager.submitted == [], name
                # The same id is free: the refused request has left nothing behind.
                good = pb.GenerateRequest(text="a", request_id="good")
                assert [response async for response in served.stub.Generate(good)][-1].HasField("usage"), name
                served.manager.submitted.clear()

    asyncio.run(body())


def test_limits_themselves_are_allowed(serving: Any) -> None:
    good: list[dict[str, Any]] = [
        {"text": "x" * 999, "max_tokens": 1},
        {"text": "aaaa", "max_tokens": 996},
        {"token_ids": pb.TokenIds(ids=[257])},
        {"text": "a", "top_p": 1.0, "top_k": 2**31 - 1, "temperature": 1e30, "seed": 2**64 - 1},
        {"text": "a", "top_p": 1e-30},
        {"text": "a", "stop": ["b" * 256] * 16, "stop_token_ids": list(range(64))},
        {"text": "a", "request_id": "i" * 256},
        {"text": "a", "request_id": "".join(map(chr, range(0x21, 0x7F)))},
        {"chat": _chat(("user", ""))},
        {"text": "\x00\u200b"},
    ]

    async def body() -> None:
        async with serving() as served:
            for fields in good:
                responses = [r async for r in served.stub.Generate(pb.GenerateRequest(**fields))]
                assert responses[-1].HasField("usage"), fields

    asyncio.run(body())


def test_pools_smaller_than_the_models_length(serving: Any) -> None:
    def ids(count: int) -> pb.TokenIds:
        return pb.TokenIds(ids=[1] * count)

    bad: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"token_ids": ids(301)}, ("token_ids", "at most 300 tokens", "pools", "301")),
        ({"text": "a" * 301, "max_tokens": 1}, ("text", "at most 300 tokens", "pools", "301")),
        ({"token_ids": ids(300), "max_tokens": 2}, ("max_tokens", "at most 1 ", "300 slots", "got 2")),
        ({"token_ids": ids(1), "max_tokens": 301}, ("max_tokens", "at most 300 ", "300 slots", "got 301")),
    ]
    good: list[tuple[dict[str, Any], int]] = [
        ({"token_ids": ids(300)}, 1),
        ({"token_ids": ids(300), "max_tokens": 1}, 1),
        ({"token_ids": ids(299)}, 2),
        ({"token_ids": ids(1), "max_tokens": 300}, 300),
        ({"token_ids": ids(1)}, 256),
    ]

    async def body() -> None:
        async with serving() as served:
            served.manager.info = dataclasses.replace(served.manager.info, total_slots=300)
            for fields, parts in bad:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in served.stub.Generate(pb.GenerateRequest(**fields)):
                        pass
                assert caught.value.code() == StatusCode.INVALID_ARGUMENT
                assert all(part in (caught.value.details() or "") for part in parts), caught.value.details()
            assert served.manager.submitted == []
            for fields, max_new_tokens in good:
                async for _ in served.stub.Generate(pb.GenerateRequest(**fields)):
                    pass
                assert served.manager.submitted[-1].max_new_tokens == max_new_tokens

    asyncio.run(body())
