"""How the front end talks to the manager: ``ManagerClient``, and the one over a socket."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol, Self

from loongserve.runtime.protocol import Abort, Finished, GetStatus, Refused, ServerInfo, Status, Submit, Token
from loongserve.runtime.wire import HEADER, MAX_FRAME_BYTES, WireError, decode, frame

RequestEvent = Token | Finished | Refused


class ManagerLost(ConnectionError):
    """The manager has ended or cannot be reached; none of its requests goes on."""


class ManagerClient(Protocol):
    """What the front end needs of a manager. Used from one event loop."""

    @property
    def info(self) -> ServerInfo:
        """What was started."""
        ...

    @property
    def healthy(self) -> bool:
        """False once the manager is lost."""
        ...

    async def submit(self, submit: Submit) -> AsyncIterator[RequestEvent]:
        """Hand a request in.

        Returns:
            Its events: tokens, then one ``Finished``; or one ``Refused``. They come also while nobody reads them;
            whoever stops reading before the last one calls ``abort``. Raises ``ManagerLost`` in place of the rest.

        Raises:
            ManagerLost: the manager is gone.
        """
        ...

    def abort(self, request: int) -> None:
        """End a request, which then gets its ``Finished``. Unknown and finished ones are ignored. Never waits."""
        ...

    async def status(self) -> Status:
        """Ask what the cluster does. Raises: ManagerLost."""
        ...

    async def closed(self) -> None:
        """Return when the manager is lost."""
        ...


class _Events:
    """The events of one request, in order; ends after the last one."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[RequestEvent | ManagerLost] = asyncio.Queue()
        self._ended = False

    def put(self, event: RequestEvent | ManagerLost) -> None:
        self._queue.put_nowait(event)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._queue.get()
        self._ended = not isinstance(event, Token)
        if isinstance(event, ManagerLost):
            raise event
        return event


class SocketManagerClient:
    """A ``ManagerClient`` that speaks ``wire.py``'s frames over a connected stream.

    Make it inside the running event loop; it reads until the stream ends or ``close``.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, info: ServerInfo) -> None:
        self._reader = reader
        self._writer = writer
        self._info = info
        self._requests: dict[int, _Events] = {}
        self._queries: dict[int, asyncio.Future[Status]] = {}
        self._numbers = itertools.count(1)
        self._lost: ManagerLost | None = None
        self._task = asyncio.create_task(self._read(), name="manager-client")

    @classmethod
    async def open(cls, sock: socket.socket, info: ServerInfo) -> Self:
        """Make a client of a connected socket, which it then owns."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, info)

    @property
    def info(self) -> ServerInfo:
        """What was started."""
        return self._info

    @property
    def healthy(self) -> bool:
        """False once the stream has ended."""
        return self._lost is None

    async def submit(self, submit: Submit) -> AsyncIterator[RequestEvent]:
        """Hand a request in. Raises: ManagerLost; ValueError where its number is that of a live request."""
        if submit.request in self._requests:
            raise ValueError(f"request: expected a number that is not in use, got {submit.request}")
        events = _Events()
        self._requests[submit.request] = events
        try:
            self._send(submit)
            # A manager that does not keep up slows down those who submit, and nobody else.
            await self._writer.drain()
        except ConnectionError as error:
            self._requests.pop(submit.request, None)
            raise self._lost or ManagerLost(str(error)) from error
        except asyncio.CancelledError:
            self.abort(submit.request)
            raise
        return events

    def abort(self, request: int) -> None:
        """End a request."""
        if request in self._requests and self._lost is None:
            self._send(Abort(request))

    async def status(self) -> Status:
        """Ask what the cluster does. Raises: ManagerLost."""
        query = next(self._numbers)
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            self._send(GetStatus(query))
            return await answer
        finally:
            del self._queries[query]

    async def closed(self) -> None:
        """Return when the stream has ended."""
        await asyncio.wait([self._task])

    async def close(self) -> None:
        """End the stream, on which the manager ends itself and the instances."""
        self._task.cancel()
        await self.closed()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def _send(self, message: Any) -> None:
        if self._lost is not None:
            raise self._lost
        self._writer.write(frame(message))

    async def _read(self) -> None:
        reason = "the manager has ended"
        try:
            while True:
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_FRAME_BYTES:
                    raise WireError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got one of {size}")
                self._deliver(decode(await self._reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            pass
        except asyncio.CancelledError:
            reason = "the connection to the manager was closed"
        except (OSError, WireError) as error:
            reason = f"the connection to the manager broke: {error}"
        finally:
            self._lose(ManagerLost(reason))

    def _deliver(self, message: Any) -> None:
        match message:
            case Token():
                if message.request in self._requests:
                    self._requests[message.request].put(message)
            case Finished() | Refused():
                events = self._requests.pop(message.request, None)
                if events is not None:
                    events.put(message)
            case Status():
                answer = self._queries.get(message.query)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                raise WireError(f"expected a client event, got {type(message).__name__}")

    def _lose(self, lost: ManagerLost) -> None:
        self._lost = lost
        for events in self._requests.values():
            events.put(lost)
        self._requests.clear()
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(lost)
