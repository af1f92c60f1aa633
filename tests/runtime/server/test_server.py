"""GetCluster, health, reflection, and what the generated files must agree with."""

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto import loongserve_pb2_grpc as pb_grpc
from loongserve.runtime.server import server as server_module

pytestmark = pytest.mark.timeout(60)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_cluster_mirrors_the_status(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            cluster = await served.stub.GetCluster(pb.GetClusterRequest())
            assert (cluster.model, cluster.policy, cluster.dtype, cluster.device) == (
                "scripted",
                "elastic",
                "float32",
                "cpu",
            )
            assert (cluster.max_model_len, cluster.total_slots) == (1000, 3000)
            assert [(i.instance, i.num_slots, i.free_slots, i.state, list(i.group)) for i in cluster.instances] == [
                (0, 1000, 900, "prefill", [0, 1]),
                (1, 1000, 1000, "prefill", [0, 1]),
            ]
            assert (cluster.waiting, cluster.running) == (4, 2)
            assert dict(cluster.counters) == {"prefills": 3, "scale_downs": 1}
            (decision,) = cluster.decisions
            assert (decision.time_s, decision.kind, list(decision.group), list(decision.requests)) == (
                1.5,
                "scale_down",
                [1],
                [7],
            )

    asyncio.run(body())


async def _health(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


async def _becomes(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(10):
        for service in ("", "loongserve.v1.Loong"):
            while await _health(channel, service) != status:
                await asyncio.sleep(0.01)


def test_health_follows_the_manager(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_INTERVAL_S", 0.02)
    monkeypatch.setattr(server_module, "HEALTH_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with serving() as served:
            assert await _health(served.channel, "") == SERVING
            assert await _health(served.channel, "loongserve.v1.Loong") == SERVING
            # A manager that hangs is not healthy although its process lives; nor is one that has ended.
            served.manager.answers_status = False
            await _becomes(served.channel, NOT_SERVING)
            served.manager.answers_status = True
            await _becomes(served.channel, SERVING)
            # It answers, but serves nothing any more.
            served.manager.state = "lost"
            await _becomes(served.channel, NOT_SERVING)
            served.manager.state = "prefill"
            await _becomes(served.channel, SERVING)
            served.manager.kill()
            await _becomes(served.channel, NOT_SERVING)

    asyncio.run(body())


def test_health_follows_progress(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_INTERVAL_S", 0.02)
    monkeypatch.setattr(server_module, "STALL_S", 0.3)

    async def body() -> None:
        async with serving() as served:
            # An instance that hangs without dying: the manager answers, and nothing comes of what runs.
            await _becomes(served.channel, NOT_SERVING)
            served.manager.counters["output_tokens"] = 1
            await _becomes(served.channel, SERVING)
            await _becomes(served.channel, NOT_SERVING)
            served.manager.counters["iterations"] = 1
            await _becomes(served.channel, SERVING)
            await _becomes(served.channel, NOT_SERVING)
            # Nothing to do is no stall.
            served.manager.waiting = served.manager.running = 0
            await _becomes(served.channel, SERVING)
            await asyncio.sleep(0.5)
            assert await _health(served.channel, "") == SERVING

    asyncio.run(body())


def test_reflection_knows_the_service(serving: Any) -> None:
    async def body() -> None:
        async with serving() as served:
            stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="loongserve.v1.Loong"),
            ]
            answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
            names = {service.name for service in answers[0].list_services_response.service}
            assert {"loongserve.v1.Loong", "grpc.health.v1.Health"} <= names
            file = descriptor_pb2.FileDescriptorProto()
            file.ParseFromString(answers[1].file_descriptor_response.file_descriptor_proto[0])
            assert [method.name for method in file.service[0].method] == ["Generate", "Abort", "GetCluster"]

    asyncio.run(body())


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """What protoc makes of the .proto now is what is committed (whatever the generator's version)."""
    pytest.importorskip("grpc_tools")
    source = Path(inspect.getfile(pb)).with_name("loongserve.proto")
    target = tmp_path / "descriptors"
    name = "loongserve/runtime/proto/loongserve.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_out={target}"]
    subprocess.run([*command, f"-I{source.parents[3]}", name], check=True, timeout=50)
    made = descriptor_pb2.FileDescriptorSet()
    made.ParseFromString(target.read_bytes())
    committed = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    # protoc writes out the JSON names, which are a function of the names.
    for message in made.file[0].message_type:
        for field in (*message.field, *(field for nested in message.nested_type for field in nested.field)):
            field.ClearField("json_name")
    assert committed == made.file[0]


def test_handwritten_types_name_every_method() -> None:
    types = Path(inspect.getfile(pb_grpc)).with_suffix(".pyi").read_text()
    generated = Path(inspect.getfile(pb_grpc)).read_text()
    for method in pb.DESCRIPTOR.services_by_name["Loong"].methods:
        kind = "UnaryStream" if method.server_streaming else "UnaryUnary"
        arguments = f"[pb.{method.input_type.name}, pb.{method.output_type.name}]"
        assert f"    {method.name}: grpc.aio.{kind}MultiCallable{arguments}\n" in types
        assert f"    async def {method.name}(\n" in types
        assert f"'/loongserve.v1.Loong/{method.name}'" in generated
