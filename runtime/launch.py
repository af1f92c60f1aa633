"""Start the manager's process from the front end."""

import asyncio
import dataclasses
import socket
import subprocess

from loongserve.runtime import wire
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.process_executor import StartupError, spawn_module
from loongserve.runtime.protocol import ServerInfo, StartupFailed


async def start_manager(config: EngineConfig) -> tuple[socket.socket, ServerInfo, "subprocess.Popen[bytes]"]:
    """Start the manager and, through it, the instances; wait until all are ready.

    Closing the returned socket ends the manager and all ranks; so does the end of this process, however it comes.

    Args:
        config: validated.

    Returns:
        The connected socket (``wire.py``'s frames), what was started, and the manager's process.

    Raises:
        StartupError: something did not start; nothing is left running.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_module("loongserve.runtime.manager_process", theirs)
    try:
        try:
            wire.send_message(ours, dataclasses.asdict(config))
            answer = await asyncio.to_thread(wire.receive_message, ours)
        except (OSError, wire.WireError) as error:
            raise StartupError(f"the manager (process {process.pid}) broke off before it was ready: {error}") from error
        if isinstance(answer, ServerInfo):
            return ours, answer, process
        if isinstance(answer, StartupFailed):
            raise StartupError(answer.message)
        raise StartupError(f"the manager (process {process.pid}) ended before the cluster was ready; see its messages")
    except BaseException:
        ours.close()
        process.kill()
        process.wait()
        raise
