"""The front end's end of the manager's socket: streams, aborts, queries, and a manager that dies."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from loongserve.runtime import wire
from loongserve.runtime.client import ManagerLost, SocketManagerClient
from loongserve.runtime.protocol import (
    Abort,
    Finished,
    GetStatus,
    IterationDone,
    Refused,
    ServerInfo,
    Status,
    Submit,
    Token,
)

pytestmark = pytest.mark.timeout(60)

INFO = ServerInfo("m", 100, 50, 300, 3, "elastic", "float32", "cpu", (2,))


class _Peer:
    """The manager's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def receive(self) -> Any:
        (size,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
        return wire.decode(await self._reader.readexactly(size))

    def send(self, *messages: Any) -> None:
        self.writer.write(b"".join(wire.frame(message) for message in messages))


def _run(body: Callable[[SocketManagerClient, _Peer], Awaitable[None]]) -> None:
    async def connected() -> None:
        ours, theirs = socket.socketpair()
        client = await SocketManagerClient.open(ours, INFO)
        peer = _Peer(*await asyncio.open_connection(sock=theirs))
        try:
            async with asyncio.timeout(20):
                await body(client, peer)
        finally:
            await client.close()
            peer.writer.close()

    asyncio.run(connected())


async def _all(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


def test_streams_are_told_apart() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        assert client.info == INFO
        first, second = Submit(1, (5, 6), 4), Submit(2, (7,), 4)
        streams = [await client.submit(first), await client.submit(second)]
        assert [await peer.receive(), await peer.receive()] == [first, second]
        events = {1: [Token(1, 0, 9), Token(1, 1, 2), Finished(1, "stop", 2, 2)], 2: [Refused(2, "INTERNAL", "no")]}
        peer.send(Token(99, 0, 0), events[1][0], events[2][0], *events[1][1:], Finished(99, "stop", 1, 1))
        assert await _all(streams[0]) == events[1]
        assert await _all(streams[1]) == events[2]
        # An ended stream stays ended.
        assert await _all(streams[0]) == []

    _run(body)


def test_number_in_use_is_refused() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        await client.submit(Submit(1, (5,), 4))
        with pytest.raises(ValueError, match="got 1"):
            await client.submit(Submit(1, (6,), 4))

    _run(body)


def test_abort_reaches_only_live_requests() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        client.abort(7)
        events = await client.submit(Submit(1, (5,), 4))
        client.abort(1)
        assert [await peer.receive(), await peer.receive()] == [Submit(1, (5,), 4), Abort(1)]
        peer.send(Finished(1, "abort", 1, 0))
        assert await _all(events) == [Finished(1, "abort", 1, 0)]

    _run(body)


def test_status_answers_its_own_query() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        asked = [asyncio.create_task(client.status()) for _ in range(2)]
        queries = [await peer.receive(), await peer.receive()]
        assert all(isinstance(query, GetStatus) for query in queries)
        for query in reversed(queries):
            peer.send(Status(query.query, (), query.query, 0, {"prefills": 1}, ()))
        for task, query in zip(asked, queries, strict=True):
            assert (await task).waiting == query.query
        # An answer to a query that was given up is dropped.
        peer.send(Status(77, (), 0, 0, {}, ()))
        given_up = asyncio.create_task(client.status())
        late = await peer.receive()
        given_up.cancel()
        await asyncio.sleep(0)
        peer.send(Status(late.query, (), 0, 0, {}, ()))
        await asyncio.sleep(0.05)
        assert client.healthy

    _run(body)


def test_lost_manager_ends_everything() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        events = await client.submit(Submit(1, (5,), 4))
        asked = asyncio.create_task(client.status())
        await peer.receive()
        await peer.receive()
        peer.send(Token(1, 0, 9))
        peer.writer.close()
        assert await anext(events) == Token(1, 0, 9)
        with pytest.raises(ManagerLost):
            await anext(events)
        with pytest.raises(ManagerLost):
            await asked
        await client.closed()
        assert not client.healthy
        client.abort(1)
        with pytest.raises(ManagerLost):
            await client.submit(Submit(2, (5,), 4))
        with pytest.raises(ManagerLost):
            await client.status()

    _run(body)


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff",
        wire.HEADER.pack(3) + b"\x00\x01\x02",
        wire.HEADER.pack(2) + b"\x01\xc1",
        wire.frame(IterationDone(1, 1, 0, 0.5)),
        wire.frame([1, 2, 3]),
    ],
    ids=["huge-frame", "other-version", "no-msgpack", "rank-event", "plain-value"],
)
def test_junk_is_a_lost_manager(junk: bytes) -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        events = await client.submit(Submit(1, (5,), 4))
        peer.writer.write(junk)
        with pytest.raises(ManagerLost, match="broke"):
            await anext(events)

    _run(body)


def test_close_is_seen_by_the_manager() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        events = await client.submit(Submit(1, (5,), 4))
        await peer.receive()
        await client.close()
        with pytest.raises(asyncio.IncompleteReadError):
            await peer.receive()
        with pytest.raises(ManagerLost):
            await anext(events)

    _run(body)


def test_long_prompt_goes_through() -> None:
    async def body(client: SocketManagerClient, peer: _Peer) -> None:
        submit = Submit(1, tuple(range(500_000)), 4)
        task = asyncio.create_task(client.submit(submit))
        assert await peer.receive() == submit
        await task

    _run(body)
