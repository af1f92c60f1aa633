"""loong-ask as a process, against a real gRPC server that answers from a script."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from click.testing import CliRunner
from grpc import StatusCode

from loongserve.cli.ask import main
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto import loongserve_pb2_grpc as pb_grpc

pytestmark = pytest.mark.timeout(60)


class _Service(pb_grpc.LoongServicer):
    """Answers in four pieces; holds on after the first where ``hold`` is set."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.hold = False
        self.cancelled = asyncio.Event()
        self.refusal = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        if self.refusal:
            await context.abort(StatusCode.INVALID_ARGUMENT, self.refusal)
        try:
            for index, text in enumerate(("Hi", " 龙", " 🐉")):
                await context.write(pb.GenerateResponse(text=text, token_ids=[index]))
                if self.hold:
                    await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        usage = pb.Usage(prompt_tokens=9, output_tokens=3)
        await context.write(pb.GenerateResponse(text=".", finish_reason=pb.FINISH_REASON_STOP, usage=usage))


async def _start(address: str, *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    code = "from loongserve.cli.ask import main; main(prog_name='loong-ask')"
    command = (sys.executable, "-P", "-c", code, *arguments, "--address", address)
    # As in a terminal: a shell's background job, which a CI run may be, ignores SIGINT and hands that down.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=interruptible
    )


async def _ask(address: str, *arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await _start(address, *arguments)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
    return process.returncode, out.decode(), err.decode()


def _with_server(body: Callable[[_Service, str], Awaitable[None]]) -> None:
    async def run() -> None:
        server, service = grpc.aio.server(), _Service()
        pb_grpc.add_LoongServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await body(service, f"127.0.0.1:{port}")
        finally:
            await server.stop(0)

    asyncio.run(run())


def test_answer_and_usage() -> None:
    async def body(service: _Service, address: str) -> None:
        code, out, err = await _ask(address, "你好", "--max-tokens", "7", "--seed", "0", "--stop", "x")
        assert (code, out) == (0, "Hi 龙 🐉.\n")
        assert err.startswith("[9 prompt tokens, 3 output tokens (stop); first token after ")
        assert err.endswith(" ms a token]\n")
        (request,) = service.requests
        assert [(m.role, m.content) for m in request.chat.messages] == [("user", "你好")]
        assert (request.max_tokens, request.seed, list(request.stop)) == (7, 0, ["x"])
        # Greedy unless said, by a value that is set; what was not given is not set.
        assert request.HasField("temperature")
        assert request.temperature == 0.0
        assert not request.HasField("top_p")
        assert not request.HasField("top_k")

    _with_server(body)


def test_raw_text_from_stdin() -> None:
    async def body(service: _Service, address: str) -> None:
        code, _, err = await _ask(address, "-", "--raw", "--temperature", "0.5", "--quiet", stdin="once\nupon")
        assert (code, err) == (0, "")
        assert service.requests[0].text == "once\nupon"
        assert service.requests[0].temperature == 0.5

    _with_server(body)


def test_question_about_a_file(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A long text. 龙", encoding="utf-8")

    async def body(service: _Service, address: str) -> None:
        for arguments in (["--question", "Why?"], ["Why?"], []):
            code, _, err = await _ask(address, "--file", str(document), *arguments)
            assert code == 0, err
        contents = [request.chat.messages[0].content for request in service.requests]
        assert contents == ["A long text. 龙\n\nWhy?"] * 2 + ["A long text. 龙"]

    _with_server(body)


def test_refusal_is_shown() -> None:
    async def body(service: _Service, address: str) -> None:
        service.refusal = "max_tokens: expected at most 5, got 7"
        code, out, err = await _ask(address, "a")
        assert (code, out) == (1, "")
        assert "INVALID_ARGUMENT" in err
        assert service.refusal in err

    _with_server(body)


def test_interrupt_aborts_the_request() -> None:
    async def body(service: _Service, address: str) -> None:
        service.hold = True
        process = await _start(address, "a")
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"Hi"
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(service.cancelled.wait(), 20)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 130
        assert err.decode() == "\nAborted.\n"

    _with_server(body)


def test_no_server() -> None:
    # Port 1 has no server for anyone but root, and none there.
    code, out, err = asyncio.run(_ask("127.0.0.1:1", "a"))
    assert (code, out) == (1, "")
    assert "127.0.0.1:1 does not answer" in err
    assert "loong-run" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "nothing to ask"),
        ([""], "nothing to ask"),
        (["a", "--question", "b"], "the question once"),
        (["--question", "b"], "--file"),
        (["a", "--max-tokens", "0"], "--max-tokens"),
        (["a", "--max-tokens", "2147483648"], "--max-tokens"),
        (["a", "--top-k", "2147483648"], "--top-k"),
        (["a", "--seed", "-1"], "--seed"),
        (["--file", "/no/such/file"], "/no/such/file"),
    ],
    ids=[
        "nothing",
        "empty",
        "two-questions",
        "question-alone",
        "max-tokens",
        "max-tokens-huge",
        "top-k-huge",
        "seed",
        "no-file",
    ],
)
def test_bad_usage(arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert part in result.output


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(main, ["--file", str(tmp_path / "binary")])
    assert result.exit_code == 1
    assert "UTF-8" in result.output


@pytest.mark.parametrize("arguments", [["\udcff"], ["a", "--stop", "\udcff"]], ids=["prompt", "stop"])
def test_bytes_that_are_no_text(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "UTF-8" in result.output
