"""The manager's process: ``python -P -m loongserve.runtime.manager_process FD``, started by ``launch.start_manager``.

First message in: the configuration, as a dict. First message out: ``ServerInfo`` or ``StartupFailed``. Then client
messages in and client events out, until the front end's end closes: the instances are ended and the process leaves.
"""

import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress

from loongserve.runtime import wire
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.engine import ManagerLoop, start_loop
from loongserve.runtime.protocol import ClientEvent, StartupFailed


class _FrontEnd:
    """The front end's socket, and the loop that its messages go to once that runs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop: ManagerLoop | None = None

    def attach(self, loop: ManagerLoop) -> None:
        self._loop = loop

    def send(self, message: object) -> None:
        # A front end that is gone is seen by the reader.
        with suppress(OSError):
            wire.send_message(self._sock, message)

    def read(self) -> None:
        try:
            while (message := wire.receive_message(self._sock)) is not None:
                if self._loop is not None:
                    self._loop.post(message)
        except OSError:
            pass
        except Exception:
            # Half a frame, which a front end that is killed may leave, or no frame at all: it is as good as gone.
            traceback.print_exc()
        if self._loop is None:
            # Gone before the cluster was up; the ranks end with this process.
            os._exit(0)
        self._loop.stop()


def main() -> None:
    """Run the manager until the front end is gone."""
    # Ctrl-C in a terminal goes to the whole process group; the front end alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    fields = wire.receive_message(sock)
    if fields is None:
        return
    config = EngineConfig(**fields)
    front_end = _FrontEnd(sock)
    threading.Thread(target=front_end.read, name="front-end", daemon=True).start()

    def on_event(event: ClientEvent) -> None:
        front_end.send(event)

    try:
        loop, info = start_loop(config, on_event)
    except Exception as error:
        traceback.print_exc()
        front_end.send(StartupFailed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    front_end.attach(loop)
    front_end.send(info)
    loop.run()


if __name__ == "__main__":
    main()
