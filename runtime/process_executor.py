"""Real instances: one process a rank on this machine, commanded over anonymous socket pairs."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import loongserve
from loongserve.runtime import wire
from loongserve.runtime.executor import Deliver
from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.weights import SharedWeights
from loongserve.runtime.protocol import Free, InstanceLost, Iteration, RankCommand, Ready, Shutdown, StartupFailed
from loongserve.runtime.rank import RankConfig

# How long ranks may take to end what they run and leave.
CLOSE_TIMEOUT_S = 5.0


class StartupError(RuntimeError):
    """A process of the cluster did not start; the message says which and why."""


def spawn_module(
    module: str, sock: socket.socket, *, pass_fds: Sequence[int] = (), env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``python -m module FD`` with ``sock`` inherited as FD.

    Args:
        module: of loongserve.
        sock: the child's end; the caller closes its own copy after.
        pass_fds: more descriptors to inherit, under the same numbers.
        env: added to the environment.
    """
    # The child imports the very package that runs here, installed or not, and nothing of the current directory (-P).
    source = str(Path(loongserve.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(sock.fileno())],
        pass_fds=[sock.fileno(), *pass_fds],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.DEVNULL,
    )


class ProcessExecutor:
    """Starts the ranks, carries commands to them and their events to ``deliver``.

    Args:
        model: the decoder's shape.
        weights: shared in the dtype to compute in; may be closed once the executor is made.
        num_slots: pool size of each instance, in tokens; its length is the number of instances.
        deliver: called with every event, from a thread for each rank.
        dtype: float32, bfloat16 or float16.
        device: cpu, or cuda (instance i on the i-th device).
        timeout_s: deadline of a message between ranks.

    Raises:
        StartupError: a rank did not start; all are ended.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: SharedWeights,
        num_slots: Sequence[int],
        deliver: Deliver,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        self.num_instances = len(num_slots)
        self._deliver = deliver
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        # More threads than cores in all would make every operation slower, by 2.6 times on a 2-core machine.
        num_threads = max(1, (os.cpu_count() or 1) // self.num_instances)
        # The ranks' rendezvous is a file in memory without a name: nothing to clean up, whoever is killed.
        store = os.memfd_create("loongserve-rendezvous")
        try:
            for instance, slots in enumerate(num_slots):
                config = RankConfig(
                    instance=instance,
                    num_instances=self.num_instances,
                    num_slots=slots,
                    model=model.to_dict(),
                    weights=weights.describe(),
                    dtype=dtype,
                    device=f"cuda:{instance}" if device == "cuda" else device,
                    num_threads=num_threads,
                    store_fd=store,
                    timeout_s=timeout_s,
                )
                self._spawn(config, [store, *weights.fds])
            ready = [self._first_event(i) for i in range(self.num_instances)]
        except BaseException:
            self.close()
            raise
        finally:
            os.close(store)
        for event in ready:
            deliver(event)
        self._readers = [
            threading.Thread(target=self._read_events, args=(i,), name=f"rank-{i}-events", daemon=True)
            for i in range(self.num_instances)
        ]
        for reader in self._readers:
            reader.start()

    def submit(self, command: RankCommand) -> None:
        """Send a command to the ranks that it concerns; call from one thread only.

        A rank that is gone gets nothing; its ``InstanceLost`` is delivered by its reader.
        """
        match command:
            case Iteration():
                instances: Sequence[int] = command.group
            case Free():
                instances = (command.instance,)
            case Shutdown():
                instances = range(self.num_instances)
        frame = wire.frame(command)
        for instance in instances:
            with suppress(OSError):
                self._sockets[instance].sendall(frame)

    def pids(self) -> list[int]:
        """Return the process of each instance, by its number."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks, after what they run if that takes no longer than ``CLOSE_TIMEOUT_S``; then kill them."""
        if self._closing:
            return
        self._closing = True
        frame = wire.frame(Shutdown())
        for sock in self._sockets:
            with suppress(OSError):
                sock.sendall(frame)
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for sock in self._sockets:
            sock.close()

    def _spawn(self, config: RankConfig, fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            env = {"OMP_NUM_THREADS": str(config.num_threads)}
            self._processes.append(spawn_module("loongserve.runtime.rank", theirs, pass_fds=fds, env=env))
        self._sockets.append(ours)
        wire.send_message(ours, config.describe())

    def _first_event(self, instance: int) -> Ready:
        event = wire.receive_message(self._sockets[instance])
        if isinstance(event, Ready):
            return event
        if isinstance(event, StartupFailed):
            raise StartupError(event.message)
        raise StartupError(f"instance {instance} {self._how_it_ended(instance)} before it was ready")

    def _read_events(self, instance: int) -> None:
        message = ""
        try:
            while (event := wire.receive_message(self._sockets[instance])) is not None:
                self._deliver(event)
        except (OSError, wire.WireError) as error:
            message = f": {error}"
        if not self._closing:
            self._deliver(InstanceLost(instance, f"instance {instance} {self._how_it_ended(instance)}{message}"))

    def _how_it_ended(self, instance: int) -> str:
        process = self._processes[instance]
        try:
            code = process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its connection"
        return f"(process {process.pid}) ended with {'signal ' + str(-code) if code < 0 else 'status ' + str(code)}"
