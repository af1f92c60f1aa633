"""One copy of a model's weights for all processes of a machine.

The parent process calls ``share_weights`` once; ranks call ``attach_weights`` with its description, which takes
milliseconds, since nothing is read or copied. There are two cases:

- A safetensors folder whose dtype is the compute dtype: ranks map the files themselves. No byte is copied; the page
  cache holds the only copy. The largest models are served this way.
- Anything else (quantised GGUF, another dtype): the parent unpacks the weights once into a memfd, an anonymous file in
  memory that ranks inherit. It has no name, so nothing is left behind, however the processes end. It is sealed, so no
  rank can change what the others see.

Parts that are multiplied with the same input (q, k and v; gate and up) also get a view over all of them, under a name
of its own, wherever they lie one after another: always in the memfd, which is laid out for it, and in safetensors files
where the writer happened to put them so. A decoder takes the view where there is one.
"""

import fcntl
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.safetensors_folder import SafetensorsFolder

# Fused name -> its parts, below "model.layers.<n>.".
FUSED = {
    "self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT_BYTES = 64
# Unpacked at a time by one thread: bounds the memory beside the weights themselves.
_CHUNK_WEIGHTS = 1 << 20


class WeightFile(Protocol):
    """An open model file: what ``share_weights`` needs of it."""

    path: Path
    config: ModelConfig

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter in the file, by its Hugging Face name."""

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a parameter as [rows, columns], any float dtype; a vector is one row."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: number of its source, bytes from its start, shape."""

    source: int
    offset: int
    shape: tuple[int, ...]


class SharedWeights:
    """The parent's hold on shared weights. Keep it as long as ranks may still be started; then ``close``.

    Attributes:
        fds: File descriptors that rank processes must inherit under the same numbers (``subprocess``: ``pass_fds``).
    """

    def __init__(self, sources: Sequence[int | Path], places: Mapping[str, _Place], dtype: torch.dtype) -> None:
        self._sources = list(sources)
        self._places = dict(places)
        self._dtype = dtype
        self.fds = tuple(source for source in self._sources if isinstance(source, int))

    def describe(self) -> dict[str, Any]:
        """Everything ``attach_weights`` needs, as plain values that msgpack and JSON carry."""
        return {
            "dtype": str(self._dtype).removeprefix("torch."),
            "sources": [source if isinstance(source, int) else str(source) for source in self._sources],
            "tensors": {name: [place.source, place.offset, list(place.shape)] for name, place in self._places.items()},
        }

    def close(self) -> None:
        """Let go of the descriptors; what is attached stays valid. Harmless when called again."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def share_weights(file: WeightFile, dtype: torch.dtype) -> SharedWeights:
    """Make the weights of an open model file attachable, in ``dtype``.

    Args:
        file: Its parameters must have the names and shapes that its config says.
        dtype: float32 or bfloat16, the dtype to compute in.

    Raises:
        ValueError: another dtype, or parameters that are missing, unexpected or of a wrong shape.
    """
    if dtype not in _DTYPES.values():
        raise ValueError(f"weights can be shared in {' or '.join(_DTYPES)}, got {dtype}")
    _check_parameters(file)
    if isinstance(file, SafetensorsFolder) and all(
        tensor.dtype == dtype and tensor.offset % dtype.itemsize == 0 for tensor in file.tensors.values()
    ):
        sources = sorted({tensor.path for tensor in file.tensors.values()})
        places = {
            name: _Place(sources.index(tensor.path), tensor.offset, tensor.shape)
            for name, tensor in file.tensors.items()
        }
        return SharedWeights([path.resolve() for path in sources], _with_fused(places, dtype), dtype)
    places, num_bytes = _lay_out(file.config, dtype)
    fd = _fill(file, places, num_bytes, dtype)
    return SharedWeights([fd], _with_fused(places, dtype), dtype)


def attach_weights(description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Map the weights that ``SharedWeights.describe`` tells of, by name; fused views included.

    Each tensor is a private mapping: memory is shared with all other processes until something writes to it, which
    nothing should.

    Raises:
        ValueError: a file is shorter than it was when it was described.
        OSError: a file is gone, or a descriptor was not inherited.
    """
    dtype = _DTYPES[description["dtype"]]
    maps = [_map(source) for source in description["sources"]]
    weights = {}
    for name, (source, offset, shape) in description["tensors"].items():
        count = math.prod(shape)
        if offset + count * dtype.itemsize > len(maps[source]):
            raise ValueError(
                f"{description['sources'][source]}: {name} ends at byte {offset + count * dtype.itemsize} of "
                f"{len(maps[source])}: the file has changed since the model was opened"
            )
        weights[name] = torch.frombuffer(maps[source], dtype=dtype, count=count, offset=offset).view(shape)
    return weights


def _map(source: int | str) -> mmap.mmap:
    if isinstance(source, int):
        # A private mapping counts as writable, as torch wants its buffers, on a sealed file too.
        return mmap.mmap(source, 0, access=mmap.ACCESS_COPY)
    with open(source, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _check_parameters(file: WeightFile) -> None:
    expected, got = file.config.parameter_shapes(), file.shapes
    missing = [name for name in expected if name not in got]
    if missing:
        raise ValueError(f"{file.path}: {len(missing)} parameters are missing, among them {', '.join(missing[:3])}")
    unexpected = sorted(set(got) - set(expected))
    if unexpected:
        raise ValueError(
            f"{file.path}: {len(unexpected)} tensors that a Llama decoder of {file.config.num_layers} layers does not "
            f"have, among them {', '.join(unexpected[:3])}"
        )
    for name, shape in expected.items():
        if got[name] != shape:
            raise ValueError(f"{file.path}: {name} has shape {list(got[name])}, expected {list(shape)} by the config")


def _lay_out(config: ModelConfig, dtype: torch.dtype) -> tuple[dict[str, _Place], int]:
    """Places of all parameters in one file, the parts of fused weights one after another; and the file's size."""
    followers = {part for parts in FUSED.values() for part in parts[1:]}
    shapes = config.parameter_shapes()
    places: dict[str, _Place] = {}
    position = 0

    def put(name: str) -> None:
        nonlocal position
        places[name] = _Place(0, position, shapes[name])
        position += math.prod(shapes[name]) * dtype.itemsize

    for name in shapes:
        prefix, stem = _split_layer(name)
        if stem in followers:
            continue
        position = -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        parts = next((parts for parts in FUSED.values() if parts[0] == stem), (stem,))
        for part in parts:
            put(prefix + part)
    return places, position


def _split_layer(name: str) -> tuple[str, str]:
    """("model.layers.3.", "mlp.up_proj.weight"), or ("", name) outside the layers."""
    fields = name.split(".")
    if fields[:2] != ["model", "layers"]:
        return "", name
    return ".".join(fields[:3]) + ".", ".".join(fields[3:])


def _with_fused(places: Mapping[str, _Place], dtype: torch.dtype) -> dict[str, _Place]:
    """The places, and one more for each group of parts that lie one after another."""
    result = dict(places)
    for name, first in places.items():
        prefix, stem = _split_layer(name)
        for fused, stems in FUSED.items():
            if stems[0] != stem:
                continue
            parts = [places[prefix + part] for part in stems]
            ends = [part.offset + math.prod(part.shape) * dtype.itemsize for part in parts]
            adjacent = all(part.offset == end for part, end in zip(parts[1:], ends, strict=False))
            if adjacent and len({part.source for part in parts}) == 1:
                num_rows = sum(part.shape[0] for part in parts)
                result[prefix + fused] = _Place(first.source, first.offset, (num_rows, *first.shape[1:]))
    return result


def _fill(file: WeightFile, places: Mapping[str, _Place], num_bytes: int, dtype: torch.dtype) -> int:
    """Write all parameters into a new memfd and seal it; returns its descriptor."""
    fd = os.memfd_create("loongserve-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)

        def write_rows(name: str, begin: int, end: int) -> None:
            place = places[name]
            rows = file.read(name, begin, end).to(dtype).contiguous()
            row_bytes = place.shape[-1] * dtype.itemsize
            _write(fd, rows.view(torch.uint8).numpy().data.cast("B"), place.offset + begin * row_bytes)

        # numpy, torch and the kernel let go of the interpreter lock in all that takes long.
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            pending = [pool.submit(write_rows, *chunk) for chunk in _chunks(places)]
            for result in pending:
                result.result()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _chunks(places: Mapping[str, _Place]) -> Iterator[tuple[str, int, int]]:
    """(name, first row, last row + 1) of pieces of a bounded size, in the order of the file."""
    for name, place in places.items():
        num_rows, step = math.prod(place.shape[:-1]), max(1, _CHUNK_WEIGHTS // place.shape[-1])
        for begin in range(0, num_rows, step):
            yield name, begin, min(begin + step, num_rows)


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
