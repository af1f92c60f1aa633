"""Read a Hugging Face folder: ``config.json`` and safetensors in one file or in shards.

Headers are parsed here because the safetensors library does not tell where in the file a tensor lies, which ranks need
to map the file itself.

Source: the format, https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the tensors.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from loongserve.runtime.model.config import make_config, read_config_json, read_json_object

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Old checkpoints carry the rotary frequencies; they follow from the config.
_DERIVED = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a safetensors file. ``offset``: bytes from the start of the file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFolder:
    """A folder with ``config.json`` and safetensors. ``shapes`` and ``read`` go by parameter names.

    Raises:
        FileNotFoundError: config, index or a shard is missing.
        ValueError: a file is damaged, or holds tensors of a dtype that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        values = read_config_json(path)
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for shard in _shards(path):
            self.tensors |= _read_header(shard)
            with shard.open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()]
        stored_as = max(set(dtypes), key=dtypes.count) if dtypes else "nothing"
        self.config = make_config(values, origin=path / "config.json", stored_as=stored_as)
        if self.config.tie_word_embeddings:
            # Some checkpoints store the tied matrix twice; the config says that one stands for both.
            self.tensors.pop("lm_head.weight", None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter in the folder."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a parameter in the file's dtype; a vector is one row. A copy, [rows, columns]."""
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        row_bytes = columns * tensor.dtype.itemsize
        stored = memoryview(self._maps[tensor.path])
        # bytearray: writable, so torch takes it as it is, and aligned whatever the offset in the file.
        rows = bytearray(stored[tensor.offset + begin * row_bytes : tensor.offset + end * row_bytes])
        return torch.frombuffer(rows, dtype=tensor.dtype).view(end - begin, columns)


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one."""
    if (folder / _INDEX).exists():
        shards = read_json_object(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{folder / _INDEX}: expected an object 'weight_map', got {type(shards).__name__}")
        paths = [folder / name for name in sorted(set(shards.values()))]
    else:
        paths = [folder / _SINGLE]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: a model folder needs {_SINGLE}, or {_INDEX} and its shards")
    return paths


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path}: expected a safetensors header, got {length} as its length in {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: the safetensors header is not JSON: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or name.endswith(_DERIVED):
            continue
        try:
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            num_weights = math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the entry of {name} is damaged: {error!r}") from error
        if kind not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {kind}; supported: {', '.join(_DTYPES)}")
        num_bytes = num_weights * _DTYPES[kind].itemsize
        if end - begin != num_bytes or end > size:
            raise ValueError(
                f"{path}: {name} {list(shape)} takes bytes {begin} to {end} of {size}, expected {num_bytes} bytes: "
                "the file is cut short or damaged"
            )
        tensors[name] = StoredTensor(path, begin, _DTYPES[kind], shape)
    return tensors
