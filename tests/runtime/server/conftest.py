"""A real gRPC server over a scripted manager: no model, no other process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loongserve.runtime.client import ManagerLost, RequestEvent
from loongserve.runtime.proto.loongserve_pb2_grpc import LoongStub
from loongserve.runtime.protocol import (
    Decision,
    Finished,
    InstanceStatus,
    Refused,
    ServerInfo,
    Status,
    Submit,
    Token,
)
from loongserve.runtime.server.server import LoongServer
from loongserve.runtime.server.text import TextCodec

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system goes first') }}{% endif %}"
    "{{ '<|start|>' + m['role'] + ':' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, and two special ones."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


class ScriptedManager:
    """A ``ManagerClient`` that answers each request with ``answer``, at once or up to ``pause_after`` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.info = ServerInfo("scripted", len(tokenizer), 1000, 3000, 3, "elastic", "float32", "cpu", (end,))
        self.healthy = True
        self.answers_status = True
        self.state = "prefill"
        self.waiting, self.running = 4, 2
        self.counters = {"prefills": 3, "scale_downs": 1}
        self.answer: list[int] = [*self.encode("Hello, 龙!"), end]
        self.pause_after: int | None = None
        self.refusal: tuple[str, str] | None = None
        self.error = ""
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.live: dict[int, asyncio.Queue[RequestEvent | ManagerLost]] = {}
        self._lost = asyncio.Event()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    async def submit(self, submit: Submit) -> AsyncIterator[RequestEvent]:
        if not self.healthy:
            raise ManagerLost("it was killed")
        self.submitted.append(submit)
        queue = self.live[submit.request] = asyncio.Queue()
        for event in self._script(submit):
            queue.put_nowait(event)
        return self._events(submit.request, queue)

    def _script(self, submit: Submit) -> list[RequestEvent]:
        if self.refusal is not None:
            return [Refused(submit.request, *self.refusal)]
        tokens = self.answer[: submit.max_new_tokens][: self.pause_after]
        reason = "length"
        for i, token in enumerate(tokens):
            if token in submit.stop_tokens:
                tokens, reason = tokens[: i + 1], "stop"
                break
        events: list[RequestEvent] = [Token(submit.request, i, token) for i, token in enumerate(tokens)]
        if self.pause_after is not None:
            return events
        reason = "error" if self.error else reason
        return [*events, Finished(submit.request, reason, len(submit.tokens), len(tokens), self.error)]

    async def _events(
        self, request: int, queue: "asyncio.Queue[RequestEvent | ManagerLost]"
    ) -> AsyncIterator[RequestEvent]:
        while True:
            event = await queue.get()
            if isinstance(event, ManagerLost):
                raise event
            if not isinstance(event, Token):
                self.live.pop(request, None)
            yield event

    def abort(self, request: int) -> None:
        self.aborted.append(request)
        if request in self.live:
            submit = next(s for s in self.submitted if s.request == request)
            self.live[request].put_nowait(Finished(request, "abort", len(submit.tokens), self.pause_after or 0))

    async def status(self) -> Status:
        if not self.healthy:
            raise ManagerLost("it was killed")
        while not self.answers_status:
            await asyncio.sleep(0.01)
        instances = (InstanceStatus(0, 1000, 900, "prefill", (0, 1)), InstanceStatus(1, 1000, 1000, self.state, (0, 1)))
        decision = Decision(1.5, "scale_down", (1,), (7,), "request 7: DoP 2 to 1")
        return Status(1, instances, self.waiting, self.running, dict(self.counters), (decision,))

    async def closed(self) -> None:
        await self._lost.wait()

    def kill(self) -> None:
        self.healthy = False
        self._lost.set()
        for queue in self.live.values():
            queue.put_nowait(ManagerLost("it was killed"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokeniser with a chat template."""
    return make_tokenizer()


@pytest.fixture
def serving(tokenizer: PreTrainedTokenizerFast) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """``async with serving() as served``: ``.manager``, ``.server``, ``.channel``, ``.stub``."""

    @asynccontextmanager
    async def serve(template: str | None = TEMPLATE) -> AsyncIterator[SimpleNamespace]:
        own = tokenizer if template == TEMPLATE else make_tokenizer(template)
        manager = ScriptedManager(own)
        codec = TextCodec(own)
        server = LoongServer(manager, codec)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield SimpleNamespace(manager=manager, server=server, channel=channel, stub=LoongStub(channel))
        finally:
            await server.stop(0.0)
            codec.close()

    return serve
