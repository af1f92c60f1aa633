"""The stand-in NCCL library for tests: compiling and loading it, its streams as a device, its faults."""

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("libnccl_standin.c")


def build(folder: Path) -> Path:
    """Compile the library into a folder; return its path."""
    library = folder / "libnccl.so.2"
    # With NCCL's own soname it is the one that the bindings take for loaded.
    options = [
        "-std=c11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-Wl,-soname,{library.name}",
    ]
    subprocess.run(["cc", *options, SOURCE, "-o", library], check=True, timeout=120)
    return library


def load(library: str) -> ctypes.CDLL:
    """Load the library so that the bindings find it, before they look for another."""
    standin = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    handle, pointer = ctypes.c_void_p, ctypes.c_void_p
    standin.standin_stream_create.restype = handle
    standin.standin_event_create.restype = handle
    standin.standin_stream_destroy.argtypes = [handle]
    standin.standin_event_record.argtypes = [handle, handle]
    standin.standin_stream_wait.argtypes = [handle, handle]
    standin.standin_event_done.argtypes = [handle]
    standin.standin_stream_sleep.argtypes = [handle, ctypes.c_long]
    standin.standin_stream_copy.argtypes = [handle, pointer, pointer, ctypes.c_long]
    standin.standin_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
    return standin


class HostStreams:
    """The stand-in's streams, on CPU memory. Threads compute themselves, unless a compute stream is made.

    Args:
        standin: From `load`.
        with_compute_stream: Whether work is ordered by a stream as on a GPU, instead of by the calling thread.
    """

    device = torch.device("cpu")

    def __init__(self, standin: ctypes.CDLL, with_compute_stream: bool = False) -> None:
        self.standin = standin
        self.num_events = 0
        self._compute = self.create_stream() if with_compute_stream else None

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def compute_stream(self) -> int | None:
        return self._compute

    def create_stream(self) -> int:
        return int(self.standin.standin_stream_create())

    def destroy_stream(self, stream: int) -> None:
        self.standin.standin_stream_destroy(stream)

    def create_event(self) -> int:
        self.num_events += 1
        return int(self.standin.standin_event_create())

    def destroy_event(self, event: int) -> None:
        # Its memory stays: a stream may still hold it.
        self.num_events -= 1

    def record(self, event: int, stream: int) -> None:
        self.standin.standin_event_record(event, stream)

    def make_wait(self, stream: int, event: int) -> None:
        self.standin.standin_stream_wait(stream, event)

    def is_done(self, event: int) -> bool:
        return bool(self.standin.standin_event_done(event))

    def sleep(self, seconds: float) -> None:
        """Let the compute stream work for a while."""
        self.standin.standin_stream_sleep(self._compute, int(seconds * 1e6))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the compute stream; both tensors must live until it is done."""
        self.standin.standin_stream_copy(self._compute, target.data_ptr(), source.data_ptr(), source.nbytes)
