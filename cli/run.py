"""``loong-run``: start the cluster and serve it by gRPC until a signal comes."""

import asyncio
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

import loongserve
from loongserve.cli.options import engine_options, read_config
from loongserve.runtime.config import EngineConfig

if TYPE_CHECKING:
    from loongserve.runtime.client import SocketManagerClient
    from loongserve.runtime.protocol import ServerInfo
    from loongserve.runtime.server.text import TextCodec

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051

# How long streams may go on after a signal.
_GRACE_S = 3.0
# How long the manager may take to end itself and the instances, before it is killed.
_END_S = 10.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@engine_options
@click.option(
    "--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on; there is no authentication."
)
@click.option(
    "--grpc-port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port."
)
@click.version_option(loongserve.__version__)
def main(host: str, grpc_port: int, **engine: Any) -> None:
    """Serve MODEL on elastic instances by gRPC (service loongserve.v1.Loong).

    Prompts are prefilled by several instances together; each request's KV is kept on the instances that decode it.
    """
    config = read_config(engine)
    sys.exit(asyncio.run(_run(config, host, grpc_port)))


async def _run(config: EngineConfig, host: str, port: int) -> int:
    """Start, serve and stop. Returns: the exit code."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    stop = asyncio.create_task(stopping.wait())
    start = asyncio.create_task(_start(config))
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            return 0
        client, codec, process = _started(start)
        try:
            return await _serve(client, codec, host, port, stop)
        finally:
            codec.close()
            await client.close()
            await asyncio.to_thread(_reap, process)
    finally:
        for task in (start, stop):
            task.cancel()
        await asyncio.wait({start, stop})


async def _start(config: EngineConfig) -> "tuple[SocketManagerClient, TextCodec, subprocess.Popen[bytes]]":
    """Start the manager and its instances, and load the tokeniser meanwhile."""
    from loongserve.runtime.client import SocketManagerClient
    from loongserve.runtime.launch import start_manager

    load = asyncio.create_task(asyncio.to_thread(_load_codec, config.model))
    try:
        sock, info, process = await start_manager(config)
    except BaseException:
        load.cancel()
        raise
    try:
        codec = await load
        return await SocketManagerClient.open(sock, info), codec, process
    except BaseException:
        sock.close()
        _reap(process)
        raise


def _started(
    start: "asyncio.Task[tuple[SocketManagerClient, TextCodec, subprocess.Popen[bytes]]]",
) -> "tuple[SocketManagerClient, TextCodec, subprocess.Popen[bytes]]":
    """What ``_start`` gave. Raises: click.ClickException for what the user can put right."""
    from loongserve.runtime.process_executor import StartupError

    try:
        return start.result()
    except (StartupError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _load_codec(model: str | None) -> "TextCodec":
    from loongserve.runtime.model.embedded import find_embedded_model
    from loongserve.runtime.model.tokenizer import load_tokenizer
    from loongserve.runtime.server.text import TextCodec

    return TextCodec(load_tokenizer(model if model is not None else find_embedded_model()))


async def _serve(
    client: "SocketManagerClient", codec: "TextCodec", host: str, port: int, stop: "asyncio.Task[Any]"
) -> int:
    """Serve until ``stop`` is done or the manager is lost. Returns: the exit code."""
    from loongserve.runtime.server.server import LoongServer

    server = LoongServer(client, codec, host=host, port=port)
    try:
        await server.start()
    except OSError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_banner(client.info, server.address))
    lost = asyncio.create_task(client.closed())
    await asyncio.wait({lost, stop}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        click.echo("Error: the engine has stopped; see its messages above", err=True)
    else:
        click.echo("Stopping.")
        lost.cancel()
    await server.stop(0.0 if lost.done() else _GRACE_S)
    return 0 if stop.done() else 1


def _banner(info: "ServerInfo", address: str) -> str:
    each = info.total_slots // info.num_instances
    return "\n".join(
        (
            f"loongserve {loongserve.__version__}",
            f"  model      {info.model}, {info.dtype} on {info.device}",
            f"  instances  {info.num_instances}, of {each} KV slots each ({info.total_slots} in all)",
            f"  length     {info.max_model_len} tokens a request at most",
            f"  policy     {info.policy}",
            f"  address    {address} (gRPC)",
            f'Ready: loong-ask --address {address} "..."',
        )
    )


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the manager, whose socket is closed, to end; kill it if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
        return
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
