"""A transport between processes of one machine, through memory that they share.

The parent makes a world, one memory file without a name (`create_shm_world`), and ranks inherit it:

    header | control words a rank | a ring of messages an ordered pair | staging slots an ordered pair | an arena a rank

Only pages that were touched are backed by memory, and stay so for later tensors until the world is gone. Rings are
lock-free with one writer and one reader; a rank holds nothing that others wait for, so it may be killed at any
instruction. Who is there is known by pidfds, so all ranks must be in one PID namespace.

A tensor that `ShmTransport.empty` makes lies in the rank's arena, from where the receiver copies it: one copy. If only
the receiver's tensor lies in its arena, the sender copies it there: one copy. If neither does, a small message is
copied into the arena by `post`, and a large one goes piece by piece through the pair's staging slots: two copies. The
receiver says what is to be done, so both ends know at once when they disagree on a size or dtype.

All of this is C++ of ``native/``, compiled on first use. The copies are made by the thread that waits, or by a thread
of the transport's own while nobody waits; neither holds the interpreter's lock. A small message to a rank where nobody
waits is copied when that rank next posts, looks or waits, or when its sender would sleep. A wait spins shortly before
it sleeps, but only where each rank can have a core of its own.
"""

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from loongserve.comm.transport import (
    Handle,
    MessageMismatch,
    Op,
    PeerLost,
    Send,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
    describe,
)
from loongserve.native_library import build_library

# A page is backed only when it is touched, so this costs nothing but addresses.
ARENA_BYTES = 1 << 30
# A sleep costs 15 to 30 us; waiting a little longer than that without sleep is worth it where a core is idle anyway.
_SPIN_NS = 50_000
_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")
# 30 years; a deadline beyond it has no meaning.
_LONGEST_S = 1e9
# How often a wait for other ranks to come looks after signals.
_FIND_NS = 50_000_000

_PENDING, _FINISHED, _LOST, _CLOSED, _MISMATCHED, _TIMED_OUT, _INTERRUPTED = range(7)
_REASONS = ("", "its process ended", "it closed its transport", "it aborted its transport")
# Numbers of dtypes, the same in all processes.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_pack_op = struct.Struct("=QQIIII").pack
# Handles that nobody waited for are looked through when there are so many, at first.
_MANY_HANDLES = 64


class _Failure(ctypes.Structure):
    """`Failure` of post.h."""

    _fields_ = (
        ("rank", ctypes.c_uint32),
        ("reason", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
    )


@cache
def _library() -> ctypes.CDLL:
    """Load the native part, compiling it if need be; every call of it releases the interpreter's lock."""
    library = ctypes.CDLL(str(build_library(_SOURCES, "shm.cpp", "shm", _FLAGS)))
    pointer, u32, i64, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
    signatures = {
        "total_bytes": (u64, (u32, u32, u64)),
        "create": (ctypes.c_int, (ctypes.c_int, u32, u32, u64)),
        "read": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(u32), ctypes.POINTER(u32))),
        "enter": (pointer, (ctypes.c_int, u32, i64, ctypes.POINTER(ctypes.c_int))),
        "find_peers": (ctypes.c_int, (pointer, i64, ctypes.POINTER(u32))),
        "post": (pointer, (pointer, ctypes.c_char_p, u32, u32)),
        "wait": (u32, (pointer, pointer, i64)),
        "look": (u32, (pointer, pointer)),
        "num_held": (u32, (pointer,)),
        "failure": (None, (pointer, ctypes.POINTER(_Failure))),
        "is_over": (u32, (pointer, u32)),
        "release": (None, (pointer,)),
        "empty": (pointer, (pointer, u64)),
        "used_bytes": (u64, (pointer,)),
        "abort": (None, (pointer,)),
        "close": (None, (pointer,)),
        "delete": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"loong_shm_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def create_shm_world(world_size: int, arena_bytes: int = ARENA_BYTES, channels: int = 2) -> int:
    """Make the memory file of a new world.

    Args:
        world_size: Number of ranks.
        arena_bytes: Memory for tensors of each rank, at most; rounded up to whole pages.
        channels: Number of channels.

    Returns:
        A file descriptor for the ranks to inherit (``subprocess``: ``pass_fds``), and for the caller to close.

    Raises:
        ValueError: An argument is out of range.
        NativeBuildError: There is no C++ compiler, or it failed.
        OSError: The kernel has no memory files or pidfds for us, or the compiled code can't be stored.
    """
    for name, value in (("world_size", world_size), ("arena_bytes", arena_bytes), ("channels", channels)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    library = _library()
    arena_bytes = -(-arena_bytes // 4096) * 4096
    file = os.memfd_create("loongserve-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, library.loong_shm_total_bytes(world_size, channels, arena_bytes))
        # Nobody can take away what others have mapped.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        if error := library.loong_shm_create(file, world_size, channels, arena_bytes):
            raise OSError(error, os.strerror(error))
    except BaseException:
        os.close(file)
        raise
    return file


class ShmTransport(Transport):
    """One rank of a world of processes, or threads, on this machine. Only CPU tensors.

    Every rank must make it; it returns when all have. A peer that dies is seen at once, one that hangs only by the
    deadline of a wait. A rank that comes back, and all others with it, need a new world.

    Args:
        rank: This rank.
        fd: Memory file that `create_shm_world` made; may be closed after.
        timeout_s: Seconds to wait for the other ranks here, and deadline of waits that name none.

    Raises:
        ValueError: An argument is out of range, or the file is no world.
        TransportTimeout: Some ranks did not come in time.
        PeerLost: A rank came and ended.
        TransportError: Somebody else is, or was, this rank.
        NativeBuildError: There is no C++ compiler, or it failed.
    """

    def __init__(self, rank: int, fd: int, timeout_s: float = 60.0) -> None:
        self._engine: int | None = None
        # A fork of this process has no part in it.
        self._pid = os.getpid()
        self._native = _library()
        world_size, channels = ctypes.c_uint32(), ctypes.c_uint32()
        if self._native.loong_shm_read(fd, world_size, channels):
            raise ValueError(f"fd must be a memory file of create_shm_world, got {fd}, which is none")
        super().__init__(rank, world_size.value, channels.value)
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._timeout_ns = _to_ns(timeout_s)
        self._closed = ""
        # What still holds its tensors, by its native address.
        self._held: dict[int, _ShmHandle] = {}
        self._max_held = _MANY_HANDLES
        spin_ns = _SPIN_NS if world_size.value <= len(os.sched_getaffinity(0)) else 0
        error = ctypes.c_int()
        self._engine = self._native.loong_shm_enter(fd, rank, spin_ns, error)
        if self._engine is None:
            if error.value == errno.EBUSY:
                raise TransportError(f"rank {rank} of this world is or was somebody else's: make a new world")
            raise OSError(error.value, os.strerror(error.value))
        try:
            self._find_peers()
        except BaseException:
            self.close()
            raise

    @property
    def arena_used_bytes(self) -> int:
        """Bytes of the arena in use by tensors and by small messages on their way."""
        return int(self._native.loong_shm_used_bytes(self._engine))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        if self._closed:
            raise TransportClosed(self._closed)
        size = torch.Size(shape)
        num_bytes = size.numel() * dtype.itemsize
        if num_bytes and torch.device(device).type == "cpu":
            pointer = self._native.loong_shm_empty(self._engine, num_bytes)
            if pointer is not None:
                # Torch takes the memory over, and gives it back when the last view of it goes.
                capsule = _make_capsule(pointer, b"dltensor", None)
                data: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
                return data.view(dtype).view(size)
        return torch.empty(size, dtype=dtype, device=device)

    def close(self) -> None:
        self._closed = self._closed or f"rank {self.rank}: the transport was closed"
        if self._engine is not None and self._pid == os.getpid():
            self._native.loong_shm_close(self._engine)
        self._held.clear()

    def abort(self) -> None:
        self._closed = self._closed or f"rank {self.rank}: the transport was aborted"
        self._native.loong_shm_abort(self._engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._pid == os.getpid():
            self.close()
            self._native.loong_shm_delete(self._engine)

    def _post(self, ops: Sequence[Op], channel: int) -> Handle:
        ops = tuple(ops)
        packed = b""
        for op in ops:
            tensor = op.tensor
            if not tensor.is_cpu:
                raise ValueError(f"the shared-memory transport sends CPU tensors only, got one on {tensor.device}")
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError("tensor must not be a conjugate or negative view: use resolve_conj() or resolve_neg()")
            number = _DTYPE_NUMBERS[tensor.dtype]
            packed += _pack_op(tensor.data_ptr(), tensor.nbytes, op.peer, number, type(op) is Send, 0)
        native = self._native.loong_shm_post(self._engine, packed, len(ops), channel)
        if native is None:
            raise TransportClosed(self._closed)
        handle = _ShmHandle(self, native, ops, channel)
        if ops:
            self._held[native] = handle
        if len(self._held) > self._max_held:
            self._let_go()
        return handle

    def _let_go(self) -> None:
        """Drop the handles whose tensors are not used any more; twice as many are awaited before the next time."""
        for handle in list(self._held.values()):
            if handle.done():
                handle._let_go()
        self._max_held = max(_MANY_HANDLES, 2 * len(self._held))

    def _find_peers(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        lost = ctypes.c_uint32()
        while result := self._native.loong_shm_find_peers(self._engine, _FIND_NS, lost):
            if result == 2:
                raise PeerLost(lost.value, "it came and ended")
            if time.monotonic() > deadline_s:
                raise TransportTimeout(
                    f"rank {self.rank} did not find all of {self.world_size} ranks within {self._timeout_s:g} s"
                )


_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _ShmHandle(Handle):
    """A native post and the tensors that it uses."""

    def __init__(self, transport: ShmTransport, native: int, ops: tuple[Op, ...], channel: int) -> None:
        self._transport = transport
        self._native = native
        self._ops = ops
        self._channel = channel
        self._finished = False

    def wait(self, timeout_s: float | None = None) -> None:
        if self._finished:
            return
        transport = self._transport
        library = transport._native
        limit_ns = transport._timeout_ns if timeout_s is None else _to_ns(timeout_s)
        status = library.loong_shm_wait(transport._engine, self._native, limit_ns)
        if status == _INTERRUPTED:
            # The interpreter sees to the signal between two calls.
            deadline_ns = time.monotonic_ns() + limit_ns
            while status == _INTERRUPTED:
                left_ns = max(0, deadline_ns - time.monotonic_ns())
                status = library.loong_shm_wait(transport._engine, self._native, left_ns)
        if status == _FINISHED:
            self._finished = True
            transport._held.pop(self._native, None)
            return
        if status != _TIMED_OUT:
            self._let_go()
        raise self._error(status, limit_ns / 1e9)

    def done(self) -> bool:
        if self._finished:
            return True
        transport = self._transport
        return int(transport._native.loong_shm_look(transport._engine, self._native)) != _PENDING

    def __del__(self) -> None:
        self._transport._native.loong_shm_release(self._native)

    def _let_go(self) -> None:
        if self._transport._native.loong_shm_num_held(self._native) == 0:
            self._transport._held.pop(self._native, None)

    def _error(self, status: int, limit_s: float) -> TransportError:
        transport = self._transport
        library = transport._native
        if status == _TIMED_OUT:
            waits = ", ".join(
                describe(op) for index, op in enumerate(self._ops) if not library.loong_shm_is_over(self._native, index)
            )
            return TransportTimeout(
                f"rank {transport.rank}, channel {self._channel}: not done after {limit_s:g} s: {waits}"
            )
        if status == _CLOSED:
            return TransportClosed(transport._closed)
        failure = _Failure()
        library.loong_shm_failure(self._native, failure)
        if status == _LOST:
            return PeerLost(failure.rank, _REASONS[failure.reason])
        op = self._ops[failure.op]
        theirs = _DTYPES[failure.dtype]
        ends = [
            (transport.rank, op.tensor.numel(), op.tensor.dtype),
            (op.peer, failure.bytes // theirs.itemsize, theirs),
        ]
        source, destination = ends if isinstance(op, Send) else ends[::-1]
        return MessageMismatch(
            f"rank {source[0]} sends {source[1]} elements of {source[2]}, "
            f"rank {destination[0]} receives {destination[1]} of {destination[2]}"
        )


def _to_ns(seconds: float) -> int:
    return int(min(max(seconds, 0.0), _LONGEST_S) * 1e9)
