"""NcclTransport and NcclAllReduce: the contract of transports, deaths in any phase, errors, and order in streams.

The bindings are the real ones. On a machine without GPUs the library behind them is a stand-in on CPU memory; on one
with GPUs what needs no injected faults runs on the real library too. The bodies are the scenarios of nccl_ranks.py.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from loongserve.comm.nccl import NcclAllReduce, NcclTransport
from loongserve.comm.nccl_communicator import load_nccl

RANKS = Path(__file__).with_name("nccl_ranks.py")
SOURCES = Path(__file__).parents[2] / "src"
MAX_DETECTION_S = 2.0
TIMEOUT_S = 60.0


class Rank:
    """A process of the server's: what it writes, and its death."""

    def __init__(self, pid: int, output: int) -> None:
        self._process = os.pidfd_open(pid)
        self._output = output
        self._rest = b""
        self.written = ""

    def lines(self) -> Iterator[str]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            line, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest = rest
                self.written += line.decode() + "\n"
                yield line.decode()
                continue
            ready, _, _ = select.select([self._output], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"nothing came for {TIMEOUT_S} s; before:\n{self.written}"
            part = os.read(self._output, 1 << 16)
            if not part:
                return
            self._rest += part

    def read_until(self, word: str) -> list[str]:
        for line in self.lines():
            if line.startswith(word):
                return line.split()
        raise AssertionError(f"no line began with {word!r}; the process wrote:\n{self.written}")

    def kill(self) -> None:
        # It may have ended.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        os.close(self._process)
        os.close(self._output)


class Server:
    """The process that forks ranks, with one NCCL library in it."""

    def __init__(self, library: Path | None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        with theirs:
            command = [sys.executable, str(RANKS), str(theirs.fileno()), "" if library is None else str(library)]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._ranks: list[Rank] = []

    def start(self, scenario: str, knobs: dict[str, int] | None = None, **arguments: Any) -> Rank:
        message = json.dumps({"scenario": scenario, "knobs": knobs or {}, "arguments": arguments}).encode()
        output, theirs = os.pipe()
        socket.send_fds(self._control, [message], [theirs])
        os.close(theirs)
        pid = self._control.recv(64)
        assert pid, "the server has ended"
        self._ranks.append(Rank(int(pid), output))
        return self._ranks[-1]

    def run(self, scenario: str, knobs: dict[str, int] | None = None, **arguments: Any) -> None:
        """Run a scenario in one process, and see that it ends well."""
        self.start(scenario, knobs, **arguments).read_until("end ok")

    def end_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def close(self) -> None:
        self._control.close()
        self._process.wait(TIMEOUT_S)


def libraries(wanted_ranks: int) -> list[Any]:
    """The libraries to test with here, each with the number of ranks that it can have."""
    params = [pytest.param(("stand-in", wanted_ranks), id="stand-in")]
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= 2 or (num_gpus == 1 and wanted_ranks > 1 and load_nccl().get_version() >= 23000):
        # From 2.30 on ranks may share a GPU.
        params.append(pytest.param(("cuda", min(wanted_ranks, num_gpus) if num_gpus > 1 else 2), id="cuda"))
    elif num_gpus == 1 and wanted_ranks == 1:
        params.append(pytest.param(("cuda", 1), id="cuda"))
    return params


@pytest.fixture(scope="module")
def servers(nccl_standin: Path) -> Iterator[dict[str, Server]]:
    """A server for each library that is asked for."""
    made: dict[str, Server] = {}

    class Servers(dict[str, Server]):
        def __missing__(self, library: str) -> Server:
            self[library] = made[library] = Server(nccl_standin if library == "stand-in" else None)
            return self[library]

    yield Servers()
    for server in made.values():
        server.close()


@pytest.fixture
def server(servers: dict[str, Server]) -> Iterator[Server]:
    yield servers["stand-in"]
    servers["stand-in"].end_ranks()


@pytest.mark.parametrize("library", libraries(4))
def test_exchanges_between_processes(library: tuple[str, int], servers: dict[str, Server], tmp_path: Path) -> None:
    """Groups of every size, all dtypes, empty blocks, random histories, hundreds of outstanding messages."""
    name, size = library
    knobs = {"delay_us": 1000, "seed": 3} if name == "stand-in" else {}
    arguments = {"world_size": size, "path": str(tmp_path / "store"), "num_histories": 20}
    for rank in [servers[name].start("exchanges", knobs, rank=rank, **arguments) for rank in range(size)]:
        rank.read_until("end ok")


@pytest.mark.parametrize("library", libraries(3))
@pytest.mark.parametrize(
    ("phase", "knobs"),
    [
        ("idle", {}),
        ("receive", {}),
        ("receive", {"notice_death": 1}),
        ("send", {}),
        ("mixed", {"notice_death": 1}),
        ("ring", {"delay_us": 500}),
        ("histories", {"delay_us": 500, "seed": 1}),
        ("histories", {"delay_us": 200, "seed": 2, "notice_death": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "noticed" if "notice_death" in value else "unnoticed",
)
def test_a_killed_rank_is_named_by_all_and_comes_back(
    phase: str, knobs: dict[str, int], library: tuple[str, int], servers: dict[str, Server], tmp_path: Path
) -> None:
    """Every other rank names it, forms a world without it, and one with it when it was started anew."""
    name, size = library
    server, victim, path = servers[name], size - 1, str(tmp_path / "store")
    arguments = {"world_size": size, "path": path, "victim": victim, "phase": phase}
    knobs = knobs if name == "stand-in" else {}
    ranks = [server.start("churn", knobs, rank=rank, **arguments) for rank in range(size)]
    for rank in ranks:
        rank.read_until("ready")
    time.sleep(0.15)
    killed_s = time.monotonic()
    ranks[victim].kill()
    Path(f"{path}-killed").touch()
    for rank in ranks[:victim]:
        for what in ("lost", "later"):
            _, kind, lost, when_s = rank.read_until(what)
            assert (kind, lost) == ("PeerLost", str(victim)), rank.written
            assert float(when_s) - killed_s < MAX_DETECTION_S
    ranks[victim] = server.start("churn", knobs, rank=victim, joins=True, **arguments)
    for rank in ranks:
        rank.read_until("end ok")


def test_a_rank_killed_while_all_connect(server: Server, tmp_path: Path) -> None:
    arguments = {"world_size": 3, "path": str(tmp_path / "store")}
    knobs = [{}, {}, {"init_us": 60_000_000}]
    ranks = [server.start("die_while_connecting", knobs[rank], rank=rank, **arguments) for rank in range(3)]
    for rank in ranks:
        rank.read_until("ready")
    time.sleep(0.5)
    killed_s = time.monotonic()
    ranks[2].kill()
    for rank in ranks[:2]:
        _, kind, lost, when_s = rank.read_until("lost")
        assert (kind, lost) == ("PeerLost", "2")
        assert float(when_s) - killed_s < MAX_DETECTION_S


@pytest.mark.parametrize("library", libraries(3))
def test_sums(library: tuple[str, int], servers: dict[str, Server], tmp_path: Path) -> None:
    name, size = library
    arguments = {"world_size": size, "path": str(tmp_path / "store")}
    for rank in [servers[name].start("sums", rank=rank, **arguments) for rank in range(size)]:
        rank.read_until("end ok")


@pytest.mark.parametrize("library", libraries(1))
def test_a_message_to_oneself(library: tuple[str, int], servers: dict[str, Server], tmp_path: Path) -> None:
    servers[library[0]].run("one_rank_alone", path=str(tmp_path / "store"))


@pytest.mark.parametrize(
    "scenario",
    [
        "contract",
        "others_go_on",
        "close_wakes_everyone",
        "abort_while_nccl_is_in_progress",
        "many_threads",
        "nccl_errors",
        "remote_error",
        "wrong_sizes",
        "deadlines",
        "serial_posts",
        "stream_order",
        "stream_deadline",
        "stream_loss",
        "close_flushes",
        "all_dtypes",
        "refusals",
        "sums_in_streams",
    ],
)
def test_on_the_standin(scenario: str, server: Server, tmp_path: Path) -> None:
    """What needs injected faults, delays, or all ranks in one process; each scenario says what it shows."""
    server.run(scenario, path=str(tmp_path / "store"))


def test_a_rank_that_never_comes(server: Server, tmp_path: Path) -> None:
    server.run("absent", rank=0, world_size=2, path=str(tmp_path / "store"))


@pytest.mark.parametrize("make", [NcclTransport, NcclAllReduce])
def test_what_is_missing_is_named(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(str(tmp_path / "store"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"need cuda-python: pip install 'loongserve\[cuda13\]'"):
        make(0, 2, store)
    streams = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(ImportError, match=r"need nccl4py: pip install 'loongserve\[cuda13\]'"):
        make(0, 2, store, streams)

    def no_library() -> int:
        raise RuntimeError("Failure finding libnccl.so.2")

    bindings = SimpleNamespace(nccl=SimpleNamespace(get_version=no_library))
    monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
    with pytest.raises(ImportError, match=r"need libnccl.so.2, which was not found: pip install"):
        make(0, 2, store, streams)
