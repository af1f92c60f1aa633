"""A manager that dies, or is not waited for, while it starts."""

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from loongserve.runtime import launch
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.process_executor import StartupError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch):
    """Let a script stand in for the manager: set ``script``; ``processes`` are those started."""

    class Spawned:
        def __init__(self) -> None:
            self.script = ""
            self.processes: list[subprocess.Popen[bytes]] = []

        def __call__(self, module: str, sock: Any) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-c", self.script, str(sock.fileno())]
            process = subprocess.Popen(command, pass_fds=[sock.fileno()])
            if not self.script:
                process.wait()
            self.processes.append(process)
            return process

    stand_in = Spawned()
    monkeypatch.setattr(launch, "spawn_module", stand_in)
    return stand_in


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("", id="before-the-configuration"),
        # Its socket closes with the configuration unread, which is an error of another kind.
        pytest.param("import time; time.sleep(0.3)", id="without-reading"),
        pytest.param("import os, sys; os.write(int(sys.argv[1]), b'hal')", id="within-a-frame"),
    ],
)
def test_manager_that_dies_is_a_startup_error(spawned, script: str) -> None:
    """The front end showed a bare broken pipe or connection reset."""
    spawned.script = script
    with pytest.raises(StartupError, match=r"the manager \(process \d+\)"):
        asyncio.run(launch.start_manager(EngineConfig()))
    assert spawned.processes[-1].returncode is not None


def test_cancelled_start_leaves_no_manager(spawned) -> None:
    spawned.script = "import time; time.sleep(100)"

    async def cancelled() -> None:
        start = asyncio.create_task(launch.start_manager(EngineConfig()))
        while not spawned.processes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(cancelled())
    assert spawned.processes[-1].returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(spawned.processes[-1].pid, 0)
