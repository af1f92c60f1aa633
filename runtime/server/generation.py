"""One live request in the front end: takes the manager's events as they come, whatever the client's pace."""

import asyncio
from dataclasses import dataclass

from grpc import StatusCode

from loongserve.runtime.client import ManagerClient, ManagerLost, RequestEvent
from loongserve.runtime.detokenizer import IncrementalDetokenizer
from loongserve.runtime.protocol import Finished, FinishReason, Refused, Submit, Token
from loongserve.runtime.server.validation import RequestError


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come since the last delta. With ``reason`` it is the last; ``error`` then says what went wrong."""

    text: str
    tokens: tuple[int, ...]
    reason: FinishReason | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Generation:
    """A request from its submission to its last event.

    ``run`` detokenises at the manager's pace, so that a stop string ends the request at once although its client reads
    slowly; ``next`` gives the client all that has come meanwhile in one piece. What waits is bounded by the request's
    own output.
    """

    def __init__(self, client: ManagerClient, request: int, detokenizer: IncrementalDetokenizer) -> None:
        self._client = client
        self.request = request
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._num_tokens = 0
        self._end: Finished | None = None
        self._error: RequestError | None = None
        self._changed = asyncio.Event()
        self._submitted = False
        self.aborted = False

    @property
    def ended(self) -> bool:
        """Whether the last event has come."""
        return self._end is not None or self._error is not None

    def abort(self) -> None:
        """End the request, if it has not ended; its last delta then says so."""
        if self.ended:
            return
        self.aborted = True
        if self._submitted:
            self._client.abort(self.request)

    def fail(self, error: RequestError) -> None:
        """End the request here and at the manager; ``next`` raises ``error`` after what has come."""
        if self.ended:
            return
        self.abort()
        self._error = error
        self._changed.set()

    async def run(self, submit: Submit) -> None:
        """Submit the request and take its events until the last one."""
        if self.aborted:
            self._finish(Finished(self.request, "abort", len(submit.tokens), 0))
            self._changed.set()
            return
        self._submitted = True
        try:
            events = await self._client.submit(submit)
            async for event in events:
                if not self.ended:
                    self._take(event, submit)
                    self._changed.set()
                if self.ended:
                    return
        except ManagerLost as lost:
            self.fail(RequestError(StatusCode.UNAVAILABLE, f"the engine has stopped: {lost}"))
        except Exception as error:
            # A fault of this program ends the stream, and is then reported by the event loop.
            self.fail(RequestError(StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))
            raise

    async def next(self) -> Delta:
        """Wait for something new.

        Raises:
            RequestError: the request was refused, or it can't go on.
        """
        await self._changed.wait()
        self._changed.clear()
        end = self._end
        delta = Delta(
            "".join(self._text),
            tuple(self._tokens),
            end.reason if end else None,
            end.prompt_tokens if end else 0,
            end.output_tokens if end else 0,
            end.message if end else "",
        )
        self._text, self._tokens = [], []
        if self._error is not None and not delta.tokens:
            raise self._error
        if self._error is not None:
            self._changed.set()
        return delta

    def _take(self, event: RequestEvent, submit: Submit) -> None:
        match event:
            case Token():
                self._take_token(event.token, submit)
            case Finished():
                self._finish(event)
            case Refused():
                code = getattr(StatusCode, event.code, StatusCode.INTERNAL)
                self._error = RequestError(code, event.message)

    def _take_token(self, token: int, submit: Submit) -> None:
        self._tokens.append(token)
        self._num_tokens += 1
        # A stop token is the last one, and no part of the text.
        if token not in submit.stop_tokens:
            self._text.append(self._detokenizer.push(token))
        if self._detokenizer.stopped is not None:
            self._client.abort(self.request)
            self._end = Finished(self.request, "stop", len(submit.tokens), self._num_tokens)

    def _finish(self, finished: Finished) -> None:
        self._text.append(self._detokenizer.finish())
        if self._detokenizer.stopped is not None:
            finished = Finished(self.request, "stop", finished.prompt_tokens, finished.output_tokens)
        self._end = finished
