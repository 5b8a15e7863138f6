"""Files of a drafter: in a folder or a hub repository; its JSON files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specmemo_kernels.arguments import shown

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "medusa_lm_head.safetensors"
CANDIDATES = (
    WEIGHTS_NAME,
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
Fetch = Callable[[str], Path | None]
_LONGEST_NAME = 255  # bytes, of common file systems


class HeadsError(ValueError):
    """These heads can't be used; the message has the file, the key and the expected value."""


@dataclass(frozen=True)
class SourceFiles:
    """A folder or hub repository; nothing is read or downloaded before it is fetched.

    Attributes:
        names: possible names of its weights.
        fetch: the local path of a file by name, ``None`` if there is no such file.
        remote: files are downloaded.
    """

    label: str
    names: tuple[str, ...]
    fetch: Fetch
    remote: bool

    def weights(self) -> Path:
        """The first existing file of ``names``.

        Raises:
            HeadsError: there is none.
        """
        for name in self.names:
            file = self.fetch(name)
            if file is not None:
                return file
        raise HeadsError(f"{self.label}: no file of heads in it; one of {', '.join(self.names)} is needed")


def find_files(source: str | Path) -> SourceFiles:
    """The files of a folder or a hub id, or a single file and its neighbours.

    Raises:
        HeadsError: neither a folder, a file nor a hub id.
    """
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return SourceFiles(str(source), (path.name,), partial(_file_in, path.parent), False)
        if str(source) and path.exists():
            return SourceFiles(str(source), CANDIDATES, partial(_file_in, path), False)
    except (OSError, RuntimeError) as error:  # a name that is too long, or of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise HeadsError(f"{shown(source)} can't be looked up: {reason}") from error
    if not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise HeadsError(f"{source or repr(source)}: there is no such folder or file, and it isn't a hub id")
    return SourceFiles(source, CANDIDATES, partial(_download, source), True)


def _file_in(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _download(repository: str, name: str) -> Path | None:
    """The cached copy of one file of a hub repository, downloaded if necessary; ``None`` if there is no such file."""
    from huggingface_hub import snapshot_download

    try:
        return _file_in(Path(snapshot_download(repository, allow_patterns=[name])), name)
    except Exception as error:  # errors of the hub's client, its HTTP library or the system
        raise HeadsError(
            f"{repository!r} is neither a folder or file here nor a hub repository that can be read "
            f"(looking for {name}): {error_line(error)}"
        ) from error


def error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        HeadsError: not a file with a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HeadsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise HeadsError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def read_index(index: Path) -> dict[str, str]:
    """The key -> shard map of an index file.

    Raises:
        HeadsError: unreadable, or a shard elsewhere than in its folder.
    """
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(map(_is_name, shards.values())):
        raise HeadsError(f"{index}: its weight_map must map keys to names of files in the same folder")
    return shards


def _is_name(value: Any) -> bool:
    """Whether a value is the name of a file, without a folder."""
    return isinstance(value, str) and Path(value).name == value and len(os.fsencode(value)) <= _LONGEST_NAME
