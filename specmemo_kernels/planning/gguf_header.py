"""The header of a ``.gguf`` file: metadata, and names, shapes and types of its tensors.

No tensor data is read. The format: ggml's ``docs/gguf.md``; block sizes of types: the package gguf 0.19.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
#: Elements and bytes of a block by type.
BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
FLOAT32 = 0
#: struct formats of metadata values; 8 is a string, 9 an array.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Limits of a header: entries, dimensions, and bytes of a string.
_MOST_ENTRIES, _MOST_DIMENSIONS, _LONGEST_STRING = 1 << 20, 8, 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: ``shape`` as torch has it (rows first), ``kind`` as in :data:`BLOCKS`."""

    name: str
    shape: tuple[int, ...]
    kind: int

    @property
    def nbytes(self) -> int:
        elements, size = BLOCKS[self.kind]
        return prod(self.shape) // elements * size


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays of strings as their lengths) and tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def is_gguf(path: Path) -> bool:
    """Whether a file starts like a ``.gguf`` file."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Read a file's header.

    Raises:
        ValueError: not a gguf file of version 2 or 3, a broken header, or an unknown tensor type.
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} isn't a gguf file: it doesn't start with {MAGIC.decode()}")
        try:
            (version,) = _numbers(file, "I")
            if version not in (2, 3):
                raise ValueError(f"version {version}, expected 2 or 3")
            tensors, entries = _numbers(file, "QQ")
            if max(tensors, entries) > _MOST_ENTRIES:
                raise ValueError(f"{tensors} tensors and {entries} metadata entries, at most {_MOST_ENTRIES} are read")
            metadata = {}
            for _ in range(entries):
                key = _string(file)
                metadata[key] = _value(file, *_numbers(file, "I"))
            return GgufHeader(metadata, tuple(_tensor(file) for _ in range(tensors)))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path} has a broken or unknown gguf header: {error}") from error


def _numbers(file: BinaryIO, formats: str) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{formats}")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file ends in its header")
    return struct.unpack(f"<{formats}", data)


def _string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "Q")
    if length > _LONGEST_STRING:
        raise ValueError(f"a string of {length} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("the file ends in its header")
    return data.decode(errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A metadata value; of an array of strings its length."""
    if kind == _STRING:
        return _string(file)
    if kind in _FORMATS:
        return _numbers(file, _FORMATS[kind])[0]
    if kind != _ARRAY:
        raise ValueError(f"a metadata value of type {kind}")
    element, count = _numbers(file, "IQ")
    if count > _LONGEST_STRING or (element != _STRING and element not in _FORMATS):
        raise ValueError(f"an array of {count} elements of type {element}")
    if element == _STRING:
        for _ in range(count):
            _string(file)
        return count
    return list(_numbers(file, f"{count}{_FORMATS[element]}"))


def _tensor(file: BinaryIO) -> GgufTensor:
    name, (dimensions,) = _string(file), _numbers(file, "I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    *sizes, kind, _ = _numbers(file, f"{dimensions}QIQ")
    if kind not in BLOCKS:
        raise ValueError(f"{name} has type {kind}")
    return GgufTensor(name, tuple(reversed(sizes)), kind)
