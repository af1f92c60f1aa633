"""The whole path: loong-run with the embedded model on two instances in their own processes, used and ended."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc import StatusCode

from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto.loongserve_pb2_grpc import LoongStub

# Of each of the two instances.
_SLOTS = 300

pytestmark = pytest.mark.timeout(280)


class _Served:
    """A running loong-run, where it listens, its descendants and the shared memory files that they map."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process, self.address = process, address
        self.family = psutil.Process(process.pid).children(recursive=True)
        maps = {region.path for member in self.family for region in member.memory_maps()}
        self.shared_files = {path for path in maps if path.startswith("/dev/shm/")}

    def assert_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=20)
        assert alive == []
        assert [path for path in self.shared_files if os.path.exists(path)] == []


@contextmanager
def _serve() -> Iterator[_Served]:
    code = "from loongserve.cli.run import main; main(prog_name='loong-run')"
    command = [sys.executable, "-P", "-c", code, "--instances", "2", "--grpc-port", "0", "--kv-tokens", str(_SLOTS)]
    process = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True)
    overdue = threading.Timer(120, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if line.strip().startswith("address"):
                address = line.split()[1]
            if line.startswith("Ready"):
                break
        overdue.cancel()
        assert address, f"loong-run ended with {process.poll()} before it was ready"
        served = _Served(process, address)
        assert len(served.family) >= 3
        yield served
    finally:
        overdue.cancel()
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in (process, *family):
            member.kill()
        process.communicate()


async def _answer(stub: Any, **fields: Any) -> tuple[str, list[int]]:
    text, tokens = "", []
    async for response in stub.Generate(pb.GenerateRequest(**fields)):
        text += response.text
        tokens += response.token_ids
    return text, tokens


async def _read_to_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _pools_are_empty(stub: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            cluster = await stub.GetCluster(pb.GetClusterRequest())
            assert [instance.num_slots for instance in cluster.instances] == [_SLOTS, _SLOTS]
            if all(instance.free_slots == _SLOTS for instance in cluster.instances):
                return
            await asyncio.sleep(0.05)


def _question(text: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)])


def test_a_real_model_is_served_until_a_signal() -> None:
    async def body(served: _Served) -> None:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = LoongStub(channel)
            asked = {"chat": _question("What is the capital of France?"), "temperature": 0.0, "max_tokens": 8}
            text, greedy = await _answer(stub, **asked)
            assert "Paris" in text

            # A seeded answer is the same alone and beside others.
            seeded = {"text": "The river runs", "temperature": 0.8, "seed": 11, "max_tokens": 8}
            alone = await _answer(stub, **seeded)
            beside = await asyncio.gather(
                _answer(stub, text="Once upon a time there", max_tokens=8),
                _answer(stub, **seeded),
                _answer(stub, **asked),
            )
            assert beside[1] == alone
            assert beside[2] == (text, greedy)

            # Longer than one pool: it lies on both instances.
            _, tokens = await _answer(stub, token_ids=pb.TokenIds(ids=[5] * 400), max_tokens=3, ignore_eos=True)
            assert len(tokens) == 3
            await _pools_are_empty(stub)

            for fields in (
                {"text": ""},
                {"text": "a", "max_tokens": -1},
                {"text": "a", "temperature": float("nan")},
                {"token_ids": pb.TokenIds(ids=[49152])},
                # Fits the model, but never the pools.
                {"token_ids": pb.TokenIds(ids=[5] * 601), "max_tokens": 1},
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _answer(stub, **fields)
                assert caught.value.code() == StatusCode.INVALID_ARGUMENT

            cut = stub.Generate(pb.GenerateRequest(text="a", max_tokens=500, ignore_eos=True))
            await cut.read()
            cut.cancel()
            await _pools_are_empty(stub)

            last = stub.Generate(pb.GenerateRequest(text="a", max_tokens=590, ignore_eos=True))
            await last.read()
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_to_its_end(last)
            assert caught.value.code() == StatusCode.UNAVAILABLE

    with _serve() as served:
        asyncio.run(body(served))
        assert served.process.wait(30) == 0
        served.assert_nothing_is_left()


def test_killed_front_end_leaves_nothing() -> None:
    async def begin(served: _Served) -> None:
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = LoongStub(channel).Generate(pb.GenerateRequest(text="a", max_tokens=500, ignore_eos=True))
            await call.read()
            served.process.kill()

    with _serve() as served:
        asyncio.run(begin(served))
        served.process.wait(10)
        served.assert_nothing_is_left()
