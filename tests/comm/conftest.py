"""Worlds of ranks for the tests of comm: threads over each transport, and real processes."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loongserve.comm.gloo import GlooTransport
from loongserve.comm.local import LocalWorld
from loongserve.comm.shm import ShmTransport, create_shm_world
from loongserve.comm.staged import StagedTransport
from loongserve.comm.transport import Handle, Op, Recv, Transport

EXCHANGES = Path(__file__).with_name("exchanges.py")
STANDIN = Path(__file__).with_name("standin.py")
SOURCES = Path(__file__).parents[2] / "src"


def load_module(path: Path) -> ModuleType:
    """Load a module of this folder, none of which is importable by name."""
    spec = importlib.util.spec_from_file_location(f"comm_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def exchanges() -> ModuleType:
    return load_module(EXCHANGES)


@pytest.fixture(scope="session")
def nccl_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libnccl.so.2, compiled; to be loaded into processes of tests only, never into this one."""
    library: Path = load_module(STANDIN).build(tmp_path_factory.mktemp("nccl"))
    return library


class GuardedTransport(Transport):
    """Passes ops on, and refuses a receive into memory that is still in flight, or a send of memory being received."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size, inner.num_channels)
        self.serial_posts = inner.serial_posts
        self._inner = inner
        self._in_flight: list[tuple[Handle, Op]] = []
        self._guard = threading.Lock()

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        return self._post_all([ops], channel)[0]

    def _post_all(self, posts: Sequence[Sequence[Op]], channel: int) -> list[Handle]:
        with self._guard:
            self._in_flight = [(handle, op) for handle, op in self._in_flight if not handle.done()]
            taken = [op for _, op in self._in_flight]
            for op in (op for ops in posts for op in ops):
                for other in taken:
                    if (isinstance(op, Recv) or isinstance(other, Recv)) and overlap(op.tensor, other.tensor):
                        raise AssertionError(f"rank {self.rank}: {op} uses memory that is in flight in {other}")
                taken.append(op)
            handles = self._inner.post_all(posts, channel)
            self._in_flight += [(handle, op) for handle, ops in zip(handles, posts, strict=True) for op in ops]
            return handles

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        return self._inner.empty(shape, dtype, device)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def on_threads(transports: Sequence[Transport], body: Callable[[Transport], object], timeout_s: float = 60.0) -> None:
    """Run `body` for every rank on a thread of its own; raise the first error, or TimeoutError at the deadline."""
    errors: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            body(transport)
        except BaseException as error:
            errors.append(error)
            for each in transports:
                each.abort()

    threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    for transport in transports if stuck else ():
        transport.abort()
    if errors:
        raise errors[0]
    if stuck:
        raise TimeoutError(f"ranks still run after {timeout_s} s: {stuck}")


@pytest.fixture(name="on_threads")
def on_threads_fixture() -> Callable[..., None]:
    return on_threads


@pytest.fixture
def guard() -> Callable[[Sequence[Transport]], list[Transport]]:
    return lambda transports: [GuardedTransport(transport) for transport in transports]


def connect(kind: str, size: int, store_path: Path, channels: int = 2, timeout_s: float = 60.0) -> list[Transport]:
    """Make the ranks of a gloo or shm world in this process."""
    transports: dict[int, Transport] = {}
    file = create_shm_world(size, arena_bytes=1 << 22, channels=channels) if kind == "shm" else -1

    def make(rank: int) -> None:
        if kind == "gloo":
            transports[rank] = GlooTransport(rank, size, store_path, channels, timeout_s)
        else:
            transports[rank] = ShmTransport(rank, file, timeout_s)

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if kind == "shm":
        os.close(file)
    return [transports[rank] for rank in range(size)]


@pytest.fixture(params=["local", "local-delayed", "staged", "gloo", "shm"])
def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], list[Transport]]]:
    """Makes the transports of a world of a given size; the test runs over each kind of world."""
    made: list[Transport] = []

    def make(size: int) -> list[Transport]:
        if request.param in ("gloo", "shm"):
            transports = connect(request.param, size, tmp_path / f"store-{len(made)}")
        else:
            world = LocalWorld(size, seed=11, max_delay_s=0.0 if request.param == "local" else 0.002)
            transports: list[Transport] = [world.transport(rank) for rank in range(size)]
            if request.param == "staged":
                transports = [StagedTransport(transport, ["cpu"]) for transport in transports]
        made.extend(transports)
        return transports

    yield make
    for transport in made:
        transport.close()


@pytest.fixture(params=["gloo", "shm"])
def kind(request: pytest.FixtureRequest) -> str:
    """A transport between processes; a test of one of them alone overrides it."""
    return str(request.param)


@pytest.fixture
def process_world(kind: str, tmp_path: Path) -> Iterator[Callable[..., list[Transport]]]:
    """Makes the transports of a world that could be processes in this one."""
    made: list[Transport] = []

    def make(size: int, channels: int = 2, timeout_s: float = 60.0) -> list[Transport]:
        made.extend(connect(kind, size, tmp_path / f"store-{len(made)}", channels, timeout_s))
        return made[-size:]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def spawn(kind: str, tmp_path: Path) -> Iterator[Callable[..., list["subprocess.Popen[str]"]]]:
    """Starts real processes that run a scenario of exchanges.py; those left at the end of the test are killed."""
    processes: list[subprocess.Popen[str]] = []
    files: list[int] = []

    def start(scenario: str, world_size: int, ranks: Sequence[int] | None = None) -> list["subprocess.Popen[str]"]:
        place = str(tmp_path / "store")
        if kind == "shm":
            files.append(create_shm_world(world_size, channels=3))
            place = str(files[-1])
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        for rank in range(world_size) if ranks is None else ranks:
            command = [sys.executable, str(EXCHANGES), scenario, str(rank), str(world_size), kind, place]
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    pass_fds=files,
                )
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    for file in files:
        os.close(file)
