"""loong-run: its options, and its life from start to signal, with the manager's process scripted."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import click
import grpc.aio
import pytest
from click.testing import CliRunner
from grpc import StatusCode
from transformers import PreTrainedTokenizerFast

from loongserve.cli import run as run_module
from loongserve.cli.options import engine_options, read_config
from loongserve.cli.run import main
from loongserve.runtime import launch
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.process_executor import StartupError
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto.loongserve_pb2_grpc import LoongStub
from loongserve.runtime.protocol import ServerInfo
from loongserve.runtime.server.text import TextCodec

pytestmark = pytest.mark.timeout(60)

INFO = ServerInfo("scripted", 300, 1000, 3000, 3, "elastic", "float32", "cpu", (2,))

# A manager that takes requests and answers one token to each, then nothing, until its socket closes.
MANAGER = """
import socket, sys
from loongserve.runtime import wire
from loongserve.runtime.protocol import GetStatus, Status, Submit, Token
sock = socket.socket(fileno=int(sys.argv[1]))
while (message := wire.receive_message(sock)) is not None:
    if isinstance(message, Submit):
        wire.send_message(sock, Token(message.request, 0, 65))
    elif isinstance(message, GetStatus):
        wire.send_message(sock, Status(message.query, (), 0, 0, {}, ()))
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scripted managers in place of the real one; yields those started, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    async def start_manager(config: EngineConfig) -> tuple[socket.socket, ServerInfo, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", MANAGER, str(theirs.fileno())]
            started.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        return ours, INFO, started[-1]

    monkeypatch.setattr(launch, "start_manager", start_manager)
    monkeypatch.setattr(run_module, "_load_codec", lambda model: _codec())
    monkeypatch.setattr(run_module, "_GRACE_S", 0.1)
    yield started
    for process in started:
        process.kill()
        process.wait()


def _codec() -> TextCodec:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


async def _address(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Wait for the banner; return it and the address in it."""
    banner = ""
    async with asyncio.timeout(30):
        while "Ready" not in banner:
            await asyncio.sleep(0.02)
            banner += capsys.readouterr().out
    address = next(line.split()[1] for line in banner.splitlines() if line.strip().startswith("address"))
    return banner, address


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(
    processes: "list[subprocess.Popen[bytes]]", capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    async def body() -> None:
        run = asyncio.create_task(run_module._run(EngineConfig(instances=3), "127.0.0.1", 0))
        banner, address = await _address(capsys)
        for part in ("scripted", "float32", "3, of 1000 KV slots each (3000 in all)", "1000 tokens", "elastic"):
            assert part in banner
        async with grpc.aio.insecure_channel(address) as channel:
            call = LoongStub(channel).Generate(pb.GenerateRequest(text="a"))
            assert list((await call.read()).token_ids) == [65]
            os.kill(os.getpid(), number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == StatusCode.UNAVAILABLE
        assert await run == 0
        assert [process.returncode for process in processes] == [0]

    asyncio.run(body())


def test_lost_manager_is_an_error(
    processes: "list[subprocess.Popen[bytes]]", capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        run = asyncio.create_task(run_module._run(EngineConfig(), "127.0.0.1", 0))
        await _address(capsys)
        processes[0].kill()
        assert await asyncio.wait_for(run, 20) == 1
        assert "engine has stopped" in capsys.readouterr().err

    asyncio.run(body())


def test_signal_during_the_start(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []

    async def never(config: EngineConfig) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    monkeypatch.setattr(launch, "start_manager", never)

    async def body() -> None:
        run = asyncio.create_task(run_module._run(EngineConfig(), "127.0.0.1", 0))
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(run, 20) == 0
        assert cancelled == [True]

    asyncio.run(body())


def test_failed_start_is_explained(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(config: EngineConfig) -> Any:
        raise StartupError("instance 1: out of memory")

    monkeypatch.setattr(launch, "start_manager", fails)
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1
    assert "Error: instance 1: out of memory" in result.output


def test_bad_tokenizer_leaves_no_manager(processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: str | None) -> TextCodec:
        raise ValueError("no tokenizer can be loaded")

    monkeypatch.setattr(run_module, "_load_codec", fails)
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1
    assert "no tokenizer" in result.output
    assert [process.poll() is not None for process in processes] == [True]


def test_port_in_use(processes: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(main, ["--grpc-port", str(taken.getsockname()[1])])
    assert result.exit_code == 1
    assert "cannot listen on 127.0.0.1" in result.output
    assert [process.returncode for process in processes] == [0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tp", "2"], ("--tp", "does not work yet")),
        (["--instances", "0"], ("--instances", "at least 1")),
        (["--instances", "two"], ("--instances", "two")),
        (["--kv-tokens", "0"], ("--kv-tokens", "at least 1")),
        (["--device", "tpu"], ("--device", "tpu")),
        (["--dtype", "int4"], ("--dtype", "int4")),
        (["--transport", "tcp"], ("--transport", "tcp")),
        (["--policy", "elastc"], ("--policy", "elastc", "elastic", "static")),
        (["--policy", "static", "--policy-option", "dop=1.5"], ("--policy", "dop", "int", "1.5")),
        (["--policy-option", "alone"], ("--policy-option", "KEY=VALUE", "alone")),
        (["--grpc-port", "70000"], ("--grpc-port", "70000")),
        (["/no/such/model"], ("MODEL", "/no/such/model")),
        (["--bogus"], ("--bogus",)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options(arguments: list[str], parts: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert all(part in result.output for part in parts), result.output


def test_options_make_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def record(config: EngineConfig, host: str, port: int) -> int:
        seen.append((config, host, port))
        return 0

    monkeypatch.setattr(run_module, "_run", record)
    arguments = "--instances 4 --policy elastic --policy-option max-batch-tokens=2 --kv-tokens 500 "
    arguments += "--max-model-len 900 --device cpu --dtype bfloat16 --transport gloo"
    arguments += " --control-interval-ms 20 --host ::1 --grpc-port 0"
    assert CliRunner().invoke(main, [os.getcwd(), *arguments.split()]).exit_code == 0
    assert CliRunner().invoke(main, []).exit_code == 0
    options = (("max_batch_tokens", 2),)
    expected = EngineConfig(os.getcwd(), 4, 1, "elastic", options, 500, 900, "cpu", "bfloat16", "gloo", 20)
    assert seen == [(expected, "::1", 0), (EngineConfig(), "127.0.0.1", 50051)]


@pytest.mark.parametrize(("text", "value"), [("2", 2), ("0.5", 0.5), ("true", True), ("False", False), ("x", "x")])
def test_policy_options_are_read_as_what_they_look_like(text: str, value: object) -> None:
    @click.command()
    @engine_options
    def command(**values: Any) -> None:
        (option,) = values["policy_options"]
        assert option == ("some_name", value)
        assert type(option[1]) is type(value)

    result = CliRunner().invoke(command, ["--policy-option", f"some-name={text}"], catch_exceptions=False)
    assert result.exit_code == 0


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(click.UsageError, match="bogus"):
        read_config({"bogus": 1})


@pytest.mark.parametrize("command", ["run", "ask"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        f"import sys\nfrom loongserve.cli.{command} import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
