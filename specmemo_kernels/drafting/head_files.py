"""Sources of Medusa heads: tensors by key of files, hub repositories, modules and dicts, read on demand."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.drafting.source_files import (
    CONFIG_NAME,
    Fetch,
    HeadsError,
    error_line,
    find_files,
    read_index,
    read_json,
)
from specmemo_kernels.ops.weight_codes import pack

HeadsSource = str | Path | nn.Module | Mapping[str, torch.Tensor]

_PREFIX = re.compile(r"(?:.*\.)?medusa_heads?\.(.+)")
#: Floating-point dtypes, as safetensors and torch name them.
FLOATING = re.compile(r"B?F\d+.*|torch\.b?float\w+")


@dataclass(frozen=True)
class Layout:
    """Keys of a published layout: patterns to recognise them, templates to write them."""

    block: re.Pattern[str]
    lm_head: re.Pattern[str]
    block_key: str
    lm_head_key: str


MEDUSA = Layout(
    re.compile(r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.linear\.(?P<part>weight|bias|codes|scales)"),
    re.compile(r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.(?P<part>weight|codes|scales)"),
    "{head}.{layer}.linear.{part}",
    "{head}.{layer}.{part}",
)
VLLM = Layout(
    re.compile(r"blocks\.(?P<head>\d{1,4})\.layers\.(?P<layer>\d{1,4})\.(?P<part>weight|bias)"),
    re.compile(r"lm_heads\.(?P<head>\d{1,4})\.(?P<part>weight)"),
    "blocks.{head}.layers.{layer}.{part}",
    "lm_heads.{head}.{part}",
)


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its full key, its file, shape and dtype.

    Attributes:
        value: the tensor; ``None`` if it is in a safetensors file.
        mapped: :meth:`read` returns a view of the mapped file.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    value: torch.Tensor | None = None
    mapped: bool = False

    def read(self) -> torch.Tensor:
        """The tensor; on the CPU if it is in a file."""
        if self.value is not None:
            return self.value.detach()
        from safetensors import safe_open

        with safe_open(self.where, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor

    def packed(self, matrix: torch.Tensor, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``matrix``, as read, in 4-bit codes and scales (:func:`specmemo_kernels.ops.weight_codes.pack`).

        Raises:
            HeadsError: the codes can't hold it.
        """
        try:
            return pack(matrix, device)
        except ValueError as error:
            raise HeadsError(f"{self.where}: {self.name}: {error}") from error


@dataclass(frozen=True)
class Stored:
    """The tensors and configuration of a source; ``entries`` by key without the ``medusa_head.`` prefix."""

    where: str
    entries: dict[str, Entry]
    config: dict[str, Any] = field(default_factory=dict)


def open_source(source: HeadsSource) -> Stored:
    """The tensors of a folder, file, hub repository, module or dict.

    Raises:
        HeadsError: nothing readable there, or a source of another type.
    """
    if isinstance(source, str | Path):
        return open_path(source)
    if isinstance(source, nn.Module):
        label = f"the {type(source).__name__} module"
        return Stored(label, _select(_tensor_entries(source.state_dict(), label), label))
    if isinstance(source, Mapping):
        return Stored("the dict", _select(_tensor_entries(source, "the dict"), "the dict"))
    raise HeadsError(f"heads can be a folder, a file, a hub id, a module or a dict, not a {type(source).__name__}")


def open_path(source: str | Path) -> Stored:
    """:func:`open_source` for a folder, a file or a hub id."""
    files = find_files(source)
    file = files.weights()
    config_file = files.fetch(CONFIG_NAME)
    entries = _read_head_shards(file, files.fetch) if file.name.endswith(".index.json") else read_file(file)
    config = {} if config_file is None else read_json(config_file)
    return Stored(str(file), _select(entries, str(file)), config)


def read_shards(shards: Mapping[str, str], index: Path, fetch: Fetch) -> dict[str, Entry]:
    """The tensors of ``shards`` (key -> shard). Other shards of ``index`` are neither opened nor downloaded.

    Raises:
        HeadsError: a missing or unreadable shard, or one without a tensor that the index has in it.
    """
    entries: dict[str, Entry] = {}
    for shard in sorted(set(shards.values())):
        path = fetch(shard)
        if path is None:
            raise HeadsError(f"{index}: its shard {shard} is missing")
        found, keys = read_file(path), [key for key, name in shards.items() if name == shard]
        if missing := [key for key in keys if key not in found]:
            raise HeadsError(f"{path} has no {first_few(missing)}, although {index} lists it; download both again")
        entries.update((key, found[key]) for key in keys)
    return entries


def _read_head_shards(index: Path, fetch: Fetch) -> dict[str, Entry]:
    """The heads' tensors of a sharded model."""
    shards = read_index(index)
    head_shards = {key: shards[key] for key in _short_names(shards, str(index)).values()}
    layout_of(_short_names(head_shards, str(index)), str(index))
    return read_shards(head_shards, index, fetch)


def read_file(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, or of a pickle by ``torch.load(weights_only=True)``.

    Raises:
        HeadsError: unreadable.
    """
    if path.suffix != ".safetensors":
        # Only zip archives can be mapped; files of older torch versions are read whole.
        mapped = zipfile.is_zipfile(path)
        return _tensor_entries(_unpickle(path, mapped), str(path), mapped)
    from safetensors import SafetensorError, safe_open

    entries = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(key)
                entries[key] = Entry(key, str(path), tuple(part.get_shape()), part.get_dtype(), mapped=True)
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{path} is not a readable safetensors file: {error}") from error
    return entries


def _unpickle(path: Path, mapped: bool) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:  # torch's message is about its own arguments
        raise HeadsError(
            f"{path} does not load as plain tensors: it is a pickle of a module or of other objects, or no pickle; "
            "save a state_dict(), in safetensors if you can"
        ) from error
    except Exception as error:  # a broken pickle raises anything
        raise HeadsError(f"{path} does not load as plain tensors: {error_line(error)}") from error
    if not isinstance(content, Mapping):
        raise HeadsError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    return content


def _tensor_entries(tensors: Mapping[str, Any], where: str, mapped: bool = False) -> dict[str, Entry]:
    """Entries of tensors in memory. Values of other types get a dtype that fails every check."""
    entries = {}
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype) + " without data" * value.is_meta
            entries[str(key)] = Entry(str(key), where, tuple(value.shape), dtype, value, mapped)
        else:
            entries[str(key)] = Entry(str(key), where, (), f"a {type(value).__name__}")
    return entries


def _short_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Key without prefix -> key, for the keys behind ``medusa_head.``, or for all keys if there are none."""
    keys = list(keys)
    names: dict[str, str] = {}
    for key in keys:
        match = _PREFIX.fullmatch(key)
        if match and names.setdefault(match[1], key) != key:
            raise HeadsError(f"{where}: {names[match[1]]} and {key} would both be {match[1]}")
    return names or {key: key for key in keys}


def _select(entries: dict[str, Entry], where: str) -> dict[str, Entry]:
    return {short: entries[key] for short, key in _short_names(entries, where).items()}


def has_heads(keys: Iterable[str]) -> bool:
    """Whether any of a file's keys belongs to Medusa heads."""
    layouts = [pattern for layout in (VLLM, MEDUSA) for pattern in (layout.block, layout.lm_head)]
    return any(_PREFIX.fullmatch(key) or any(pattern.fullmatch(key) for pattern in layouts) for key in keys)


def layout_of(keys: Iterable[str], where: str) -> Layout:
    """The layout of these keys (without prefix).

    Args:
        where: the source's name, for the message.

    Raises:
        HeadsError: no key belongs to heads.
    """
    keys = list(keys)
    for layout in (VLLM, MEDUSA):
        if any(layout.block.fullmatch(key) or layout.lm_head.fullmatch(key) for key in keys):
            return layout
    raise HeadsError(f"{where}: no Medusa heads in it; its keys are {first_few(keys)}")


def first_few(keys: list[str]) -> str:
    """Up to four keys and the number of further keys, for messages."""
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "") if keys else "none"
