"""Checksums of a model's checkpoint files, without reading all of them."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file


def checkpoint_digest(name_or_path: str) -> dict[str, object]:
    """A checksum for each safetensors file of a model; empty if this machine has no such files."""
    folder = _folder(name_or_path) if name_or_path else None
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return {f"the checkpoint's {path.name}": f"{_digest(path):08x}" for path in files}


def _folder(name_or_path: str) -> Path | None:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        with suppress(OSError):  # neither a folder nor the name of a repository
            path = cached_file(name_or_path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
            if path is not None:
                return Path(path).parent
    return None


def _digest(path: Path) -> int:
    """Checksum of names, shapes, and the first, middle and last row of each tensor: training changes every row."""
    checksum = 0
    with safe_open(path, framework="pt") as file:
        for key in sorted(file.keys()):
            tensor = file.get_slice(key)
            shape = tensor.get_shape()
            checksum = zlib.crc32(f"{key} {shape} {tensor.get_dtype()}".encode(), checksum)
            rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and all(shape) else []
            for row in rows:
                flat = tensor[row : row + 1].contiguous().flatten()
                checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum
