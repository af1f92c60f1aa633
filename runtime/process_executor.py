"""Real instances: one process a rank on this machine, commanded over anonymous socket pairs."""

import logging
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import loongserve
from loongserve.comm.shm import create_shm_world
from loongserve.native_library import NativeBuildError
from loongserve.runtime import wire
from loongserve.runtime.config import TransportChoice
from loongserve.runtime.executor import Deliver, recipients
from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.weights import SharedWeights
from loongserve.runtime.protocol import InstanceLost, RankCommand, Ready, Shutdown, StartupFailed
from loongserve.runtime.rank import RankConfig

_logger = logging.getLogger(__name__)

# How long ranks may take to import, attach the weights and find each other.
STARTUP_TIMEOUT_S = 300.0
# A rank's command thread does nothing but read: one that takes nothing for so long hangs, or is stopped.
SEND_TIMEOUT_S = 10.0
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
        transport: shm, gloo, or auto: shm where it can be had, else gloo after a warning.
        timeout_s: deadline of a message between ranks.

    Raises:
        StartupError: a rank did not start, or there is no such transport; all are ended.
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
        transport: TransportChoice = "auto",
        timeout_s: float = 60.0,
    ) -> None:
        self.num_instances = len(num_slots)
        self._deliver = deliver
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._readers: list[threading.Thread] = []
        # More threads than cores in all would make every operation slower, by 2.6 times on a 2-core machine.
        num_threads = max(1, len(os.sched_getaffinity(0)) // self.num_instances)
        self.transport, world = _make_world(transport, self.num_instances)
        configs = [
            RankConfig(
                instance=instance,
                num_instances=self.num_instances,
                num_slots=slots,
                model=model.to_dict(),
                weights=weights.describe(),
                dtype=dtype,
                device=f"cuda:{instance}" if device == "cuda" else device,
                num_threads=num_threads,
                transport=self.transport,
                world_fd=world,
                timeout_s=timeout_s,
            )
            for instance, slots in enumerate(num_slots)
        ]
        try:
            for _ in configs:
                self._spawn(num_threads, [world, *weights.fds])
            ready = self._set_up(configs)
        except BaseException:
            # None has begun anything that is worth waiting for.
            for process in self._processes:
                process.kill()
            self.close()
            raise
        finally:
            os.close(world)
        for event in ready:
            deliver(event)
        for instance, sock in enumerate(self._sockets):
            _set_send_timeout(sock, SEND_TIMEOUT_S)
            reader = threading.Thread(
                target=self._read_events, args=(instance,), name=f"rank-{instance}-events", daemon=True
            )
            self._readers.append(reader)
            reader.start()

    def submit(self, command: RankCommand) -> None:
        """Send a command to the ranks that it concerns; call from one thread only.

        A rank that is gone gets nothing, one that takes nothing for ``SEND_TIMEOUT_S`` is killed; in both cases its
        reader delivers ``InstanceLost``.

        Raises:
            ValueError: the command names an instance that does not exist.
        """
        frame = wire.frame(command)
        for instance in recipients(command, self.num_instances):
            try:
                self._sockets[instance].sendall(frame)
            except BlockingIOError:
                self._processes[instance].kill()
            except OSError:
                # Its reader sees that too.
                continue

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
            # One that is gone needs none; one whose socket is full does not read, and is killed below.
            with suppress(OSError):
                sock.send(frame, socket.MSG_DONTWAIT)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # With its process a rank's end of the socket is closed, so its reader ends.
        for reader in self._readers:
            reader.join()
        for sock in self._sockets:
            sock.close()

    def _spawn(self, num_threads: int, fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        _set_send_timeout(ours, STARTUP_TIMEOUT_S)
        with theirs:
            env = {"OMP_NUM_THREADS": str(num_threads)}
            self._processes.append(spawn_module("loongserve.runtime.rank", theirs, pass_fds=fds, env=env))

    def _set_up(self, configs: Sequence[RankConfig]) -> list[Ready]:
        """Tell all ranks what they are and wait until all are ready, or the first fails: the others may wait for it."""
        for sock, config in zip(self._sockets, configs, strict=True):
            # One that is gone is seen below.
            with suppress(OSError):
                wire.send_message(sock, config.describe())
        ready: dict[int, Ready] = {}
        deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for instance, sock in enumerate(self._sockets):
                selector.register(sock, selectors.EVENT_READ, instance)
            while len(ready) < self.num_instances:
                selected = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not selected:
                    late = sorted(set(range(self.num_instances)) - ready.keys())
                    raise StartupError(f"instances {late} were not ready within {STARTUP_TIMEOUT_S:g} s")
                for key, _ in selected:
                    ready[key.data] = self._first_event(key.data)
                    selector.unregister(key.fileobj)
        return [ready[instance] for instance in range(self.num_instances)]

    def _first_event(self, instance: int) -> Ready:
        reason = ""
        try:
            event = wire.receive_message(self._sockets[instance])
            if isinstance(event, Ready):
                return event
            if isinstance(event, StartupFailed):
                raise StartupError(event.message)
        except (OSError, wire.WireError) as error:
            reason = f": {error}"
        raise StartupError(f"instance {instance}: {self._how_it_ended(instance)} before it was ready{reason}")

    def _read_events(self, instance: int) -> None:
        reason = ""
        try:
            while (event := wire.receive_message(self._sockets[instance])) is not None:
                self._deliver(event)
        except (OSError, wire.WireError) as error:
            reason = f": {error}"
        if not self._closing:
            self._deliver(InstanceLost(instance, f"{self._how_it_ended(instance)}{reason}"))

    def _how_it_ended(self, instance: int) -> str:
        process = self._processes[instance]
        try:
            code = process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} closed its connection"
        return f"process {process.pid} ended with {'signal ' + str(-code) if code < 0 else 'status ' + str(code)}"


def _make_world(transport: TransportChoice, num_instances: int) -> tuple[str, int]:
    """Choose shm or gloo, and make the file through which the ranks meet.

    It is a file in memory without a name: nothing to clean up, whoever is killed.
    """
    if transport != "gloo":
        try:
            return "shm", create_shm_world(num_instances)
        except (NativeBuildError, OSError) as error:
            if transport == "shm":
                raise StartupError(f"no shared-memory transport, use gloo or auto: {error}") from error
            _logger.warning("no shared-memory transport, gloo serves instead: %s", error)
    return "gloo", os.memfd_create("loongserve-rendezvous")


def _set_send_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Bound how long one send may wait; unlike ``settimeout``, receiving is not touched. It ends in BlockingIOError."""
    seconds = int(timeout_s)
    timeval = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
