"""One rank's process: ``python -P -m loongserve.runtime.rank FD``, started by ``ProcessExecutor`` alone.

The command thread reads the socket FD; the compute thread (the main one) obeys the commands in order. When the other
end closes, however that came about, the process ends at once: no rank outlives its manager.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from loongserve.runtime import wire
from loongserve.runtime.protocol import (
    Free,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    SampledToken,
    Shutdown,
    StartupFailed,
    StepTokens,
)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank is told first; sent as a plain dict."""

    instance: int
    num_instances: int
    # KV tokens of this instance's pool.
    num_slots: int
    # ``ModelConfig.to_dict`` and ``SharedWeights.describe``.
    model: dict[str, Any]
    weights: dict[str, Any]
    # float32, bfloat16 or float16.
    dtype: str
    device: str
    # Compute threads.
    num_threads: int
    # shm or gloo.
    transport: str
    # Inherited memory file: the shared-memory world, or what gloo's ranks find each other through.
    world_fd: int
    # No message of a peer may take longer.
    timeout_s: float

    def describe(self) -> dict[str, Any]:
        """Return plain values for the socket."""
        return asdict(self)


def main() -> None:
    """Run the rank until its socket closes or it is told to shut down."""
    # Ctrl-C in a terminal goes to the whole process group; the front end alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sock, commands), name="commands", daemon=True).start()
    config = RankConfig(**commands.get())
    try:
        run = _Runner(config, sock)
    except Exception as error:
        traceback.print_exc()
        wire.send_message(sock, StartupFailed(f"instance {config.instance}: {type(error).__name__}: {error}"))
        sys.exit(1)
    wire.send_message(sock, Ready(config.instance, config.num_slots))
    while not isinstance(command := commands.get(), Shutdown):
        run.obey(command)
    run.instance.close()


class _Runner:
    def __init__(self, config: RankConfig, sock: socket.socket) -> None:
        import torch

        from loongserve.comm.gloo import GlooTransport
        from loongserve.comm.shm import ShmTransport
        from loongserve.comm.transport import Transport
        from loongserve.runtime.instance import Instance
        from loongserve.runtime.model.config import ModelConfig
        from loongserve.runtime.model.llama import LlamaModel
        from loongserve.runtime.model.weights import attach_weights

        torch.set_num_threads(config.num_threads)
        model = LlamaModel(
            ModelConfig.from_dict(config.model),
            attach_weights(config.weights),
            dtype=getattr(torch, config.dtype),
            device=config.device,
        )
        transport: Transport
        if config.transport == "shm":
            transport = ShmTransport(config.instance, config.world_fd, timeout_s=config.timeout_s)
        else:
            store = f"/proc/self/fd/{config.world_fd}"
            transport = GlooTransport(config.instance, config.num_instances, store, timeout_s=config.timeout_s)
        self.instance = Instance(config.instance, model, transport, config.num_slots)
        self._sock = sock

    def obey(self, command: Iteration | Free) -> None:
        """Obey one command; an iteration that raises is reported and ends the process."""
        if isinstance(command, Free):
            self.instance.free(command.request)
            return
        number = self.instance.instance

        def emit(step: int, tokens: tuple[SampledToken, ...]) -> None:
            wire.send_message(self._sock, StepTokens(command.seq, command.epoch, number, step, tokens))

        start = time.monotonic()
        try:
            self.instance.execute(command, emit)
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            wire.send_message(self._sock, IterationFailed(command.seq, command.epoch, number, message))
            sys.exit(1)
        elapsed = time.monotonic() - start
        wire.send_message(self._sock, IterationDone(command.seq, command.epoch, number, elapsed))


def _read_commands(sock: socket.socket, commands: "queue.SimpleQueue[Any]") -> None:
    status = 1
    try:
        while (message := wire.receive_message(sock)) is not None:
            commands.put(message)
        status = 0
    except OSError:
        status = 0
    except Exception:
        # Half a frame, which a manager that is killed may leave, or no frame at all: no more commands come.
        traceback.print_exc()
    finally:
        # Not sys.exit: the compute thread may be deep in a kernel or wait for a peer that is gone too.
        os._exit(status)


if __name__ == "__main__":
    main()
