"""Parse the header of a GGUF file: metadata and the table of tensors. Needs neither torch nor gguf.

``gguf.GGUFReader`` does the same, but takes seconds over a vocabulary; the tokenizer's strings are stepped over here.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Metadata types of fixed size, as struct formats; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor. ``shape``: rows first, as in torch; ``kind``: GGML type; ``offset``: bytes from the file's start."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``metadata``: by key; an array of strings (vocabulary, merges) is None. ``tensors``: by the file's own names."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def map_gguf(path: Path) -> mmap.mmap:
    """Map a GGUF file for reading.

    Raises:
        ValueError: it does not start as a GGUF file does.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        size = path.stat().st_size
        if magic != b"GGUF" or size < 24:
            raise ValueError(f"{path}: expected a GGUF file, got {size} bytes that start with {magic!r}")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse the header of the GGUF file at ``path``.

    Raises:
        ValueError: not a GGUF file, of another version, or damaged.
    """
    with map_gguf(path) as data:
        try:
            return _parse(data, path)
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ValueError(f"{path}: the GGUF header is cut short or damaged: {error}") from error


def _parse(data: mmap.mmap, path: Path) -> GGUFHeader:
    version, num_tensors, num_entries = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version}; supported: 2 and 3, little-endian")
    position = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key, position = _read_string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[key], position = _read_value(data, position + 4, kind)
    tensors: dict[str, TensorEntry] = {}
    for _ in range(num_tensors):
        name, position = _read_string(data, position)
        (num_dims,) = struct.unpack_from("<I", data, position)
        entry = f"<{num_dims}QIQ"
        *dims, kind, offset = struct.unpack_from(entry, data, position + 4)
        position += 4 + struct.calcsize(entry)
        tensors[name] = TensorEntry(tuple(reversed(dims)), kind, offset)
    # Offsets in the table count from the first aligned byte after it.
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-position // alignment) * alignment
    return GGUFHeader(
        metadata,
        {name: TensorEntry(entry.shape, entry.kind, start + entry.offset) for name, entry in tensors.items()},
    )


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    end = position + 8 + length
    if end > len(data):
        raise IndexError(f"a string of {length} bytes at byte {position}")
    return data[position + 8 : end].decode(), end


def _read_value(data: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    """One metadata value and where it ends."""
    if kind in _SCALARS:
        scalar = "<" + _SCALARS[kind]
        return struct.unpack_from(scalar, data, position)[0], position + struct.calcsize(scalar)
    if kind == _STRING:
        return _read_string(data, position)
    if kind != _ARRAY:
        raise IndexError(f"metadata of type {kind} at byte {position}")
    element, length = struct.unpack_from("<IQ", data, position)
    position += 12
    if element in _SCALARS:
        array = f"<{length}{_SCALARS[element]}"
        return list(struct.unpack_from(array, data, position)), position + struct.calcsize(array)
    if element != _STRING:
        raise IndexError(f"an array of metadata of type {element} at byte {position}")
    for _ in range(length):
        position += 8 + struct.unpack_from("<Q", data, position)[0]
    return None, position
