"""The gRPC server: the Loong service, health and reflection on one port."""

import asyncio
import time
from contextlib import suppress

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from loongserve.runtime.client import ManagerClient, ManagerLost
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto.loongserve_pb2_grpc import add_LoongServicer_to_server
from loongserve.runtime.protocol import Status
from loongserve.runtime.server.service import LoongService
from loongserve.runtime.server.text import TextCodec

SERVICE: str = pb.DESCRIPTOR.services_by_name["Loong"].full_name

# How often the manager is asked whether it lives, and how long its answer may take before health says no.
HEALTH_INTERVAL_S = 2.0
HEALTH_TIMEOUT_S = 5.0
# How long nothing may come of what runs before health says no. No iteration of a living cluster should last so long.
STALL_S = 300.0

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Clients may ping every 10 s (gRPC's own limit is 5 minutes); a second less, as pings come early by some jitter.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 9_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A port in use is an error, not a port shared with whoever has it.
    ("grpc.so_reuseport", 0),
]


class _Progress:
    """Judges by the manager's answers, one after the other, whether its cluster can serve.

    One group that hangs is not seen while another gets on.
    """

    def __init__(self) -> None:
        self._done: tuple[int, ...] | None = None
        self._since = 0.0

    def is_well(self, status: Status, now: float) -> bool:
        """Whether no instance is lost, and work that waits or runs has got on within ``STALL_S``."""
        done = tuple(status.counters.get(name, 0) for name in ("iterations", "output_tokens"))
        if done != self._done or status.waiting + status.running == 0:
            self._done, self._since = done, now
        lost = any(instance.state == "lost" for instance in status.instances)
        return not lost and now - self._since < STALL_S


class LoongServer:
    """Serves a manager by gRPC.

    Args:
        client: the manager.
        codec: the tokeniser of its model.
        host: a name or address to listen on; loopback unless said.
        port: 0 takes any free one.
    """

    def __init__(self, client: ManagerClient, codec: TextCodec, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._client = client
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._server = grpc.aio.server(options=_OPTIONS)
        self._service = LoongService(client, codec)
        self._health = health_aio.HealthServicer()
        add_LoongServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """``host:port``; the real port once started."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen and serve. Raises: OSError where the address cannot be had."""
        try:
            self._port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self.address}: choose another --host or --grpc-port (0 for any)"
            ) from error
        await self._set_health(serving=self._client.healthy)
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_manager(), name="health")

    async def stop(self, grace_s: float) -> None:
        """Stop: streams may finish for ``grace_s`` seconds, then end as UNAVAILABLE."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._health.enter_graceful_shutdown()
        await self._service.drain(grace_s)
        # Time for the last status of each stream; a client that does not read it is cut off.
        await self._server.stop(1.0)

    async def _watch_manager(self) -> None:
        """Keep health true to whether the manager answers, all instances live and what runs gets on."""
        progress = _Progress()
        while self._client.healthy:
            try:
                status = await asyncio.wait_for(self._client.status(), HEALTH_TIMEOUT_S)
                serving = progress.is_well(status, time.monotonic())
            except (TimeoutError, ManagerLost):
                serving = False
            await self._set_health(serving=serving)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._client.closed(), HEALTH_INTERVAL_S)
        await self._set_health(serving=False)

    async def _set_health(self, *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, response.SERVING if serving else response.NOT_SERVING)
