"""Medusa heads from whatever holds them: files of every published layout, hub repositories, modules, dicts."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.drafting.medusa_heads import CONFIG_NAME, WEIGHTS_NAME, MedusaHeads

HeadsSource = str | Path | nn.Module | Mapping[str, torch.Tensor]

CANDIDATES = (
    WEIGHTS_NAME,
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_Fetch = Callable[[str], Path | None]
_PREFIX = re.compile(r"(?:.*\.)?medusa_heads?\.(.+)")
_FLOATING = re.compile(r"B?F\d+.*|torch\.b?float\w+")  # as safetensors and torch call them
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class HeadsError(ValueError):
    """These heads can't be used; the message names the file, the key and what was expected."""


@dataclass(frozen=True)
class _Layout:
    """How a layout spells its tensors: patterns to recognise them, templates to write them."""

    block: re.Pattern[str]
    lm_head: re.Pattern[str]
    block_key: str
    lm_head_key: str


_MEDUSA = _Layout(
    re.compile(r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.linear\.(?P<part>weight|bias)"),
    re.compile(r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.weight"),
    "{head}.{layer}.linear.{part}",
    "{head}.{layer}.weight",
)
_VLLM = _Layout(
    re.compile(r"blocks\.(?P<head>\d{1,4})\.layers\.(?P<layer>\d{1,4})\.(?P<part>weight|bias)"),
    re.compile(r"lm_heads\.(?P<head>\d{1,4})\.weight"),
    "blocks.{head}.layers.{layer}.{part}",
    "lm_heads.{head}.weight",
)
_VLLM_EXTRAS = ("lm_head.weight", "token_map")


@dataclass(frozen=True)
class _Entry:
    """A stored tensor: its full key, its file and what is known without reading it.

    Attributes:
        value: the tensor, unless it has to be read from a safetensors file.
        mapped: what :meth:`read` gives is a view of the mapped file.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    value: torch.Tensor | None = None
    mapped: bool = False

    def read(self) -> torch.Tensor:
        if self.value is not None:
            return self.value.detach()
        from safetensors import safe_open

        with safe_open(self.where, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class _Stored:
    """Everything a source holds about heads; ``entries`` by key without the ``medusa_head.`` prefix."""

    where: str
    entries: dict[str, _Entry]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    """What the keys say; ``names``: key of the result -> key of the source (``None``: a bias of zeros)."""

    num_heads: int
    num_layers: int
    own_lm_head: bool
    names: dict[str, str | None]


def load_heads(
    source: HeadsSource,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MedusaHeads:
    """Heads for a model of width ``hidden_size`` with ``vocab_size`` rows in its lm_head.

    How many heads and layers there are is counted from the keys, whatever a config says. The layouts:

    - Medusa-1: ``{h}.{l}.linear.weight``, ``.bias``, and each head's own lm_head ``{h}.{num_layers}.weight``;
    - shared ("v2"): the same without ``{h}.{num_layers}.weight``, the model's lm_head serves all heads;
    - Medusa-2: one of those behind ``medusa_head.`` in a whole model's files, of which nothing else is read;
    - vLLM: ``blocks.{h}.layers.{l}.weight`` (and ``.bias``), ``lm_heads.{h}.weight``; shared where the config says
      ``original_lm_head`` or no ``lm_heads.*`` exist (a single ``lm_head.weight`` is the model's, so it isn't read).
      ``token_map`` isn't needed with whole lm_heads; lm_heads cut down to it are refused.

    Args:
        source: a folder, a file, a hub id, a :class:`MedusaHeads`, another module (Medusa's own ``ModuleList``) or a
            dict of tensors. In a folder or repository the first of these counts: ``medusa_lm_head.safetensors``,
            ``medusa_lm_head.pt``, ``model.safetensors``, its ``.index.json``, ``pytorch_model.bin``, its
            ``.index.json``. Pickles are only read with ``weights_only=True``. From the hub come only the files needed.
        dtype, device: of the result; ``None`` keeps the source's.

    Returns:
        The heads. A :class:`MedusaHeads` that needs no conversion comes back itself; tensors of a module or dict that
        need none are shared. Files are copied tensor by tensor, nothing stays mapped.

    Raises:
        HeadsError: nothing found, a missing or unknown key, a wrong shape or dtype.
    """
    stored = _open(source)
    if isinstance(source, MedusaHeads):
        _check(stored, _plan(stored), hidden_size, vocab_size, dtype)
        if all(p.to(device=device, dtype=dtype) is p for p in source.parameters()):
            return source
    heads = _load(stored, hidden_size, vocab_size, dtype, device)
    return heads.train(source.training) if isinstance(source, nn.Module) else heads


def load_pretrained(
    source: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> MedusaHeads:
    """:func:`load_heads` with the sizes that the files tell; behind ``MedusaHeads.from_pretrained``."""
    stored = _open_path(source)
    plan = _plan(stored)
    lm_head = plan.names[f"0.{plan.num_layers}.weight"] if plan.own_lm_head else "lm_head.weight"
    vocab_size = stored.config.get("vocab_size")
    if lm_head in stored.entries and "token_map" not in stored.entries:
        vocab_size = (*stored.entries[lm_head].shape, 0)[0]
    if not isinstance(vocab_size, int):
        raise HeadsError(
            f"{stored.where}: the vocabulary's size is neither in the weights nor in {CONFIG_NAME} "
            f"(vocab_size: {vocab_size!r}); use load_heads(source, hidden_size, vocab_size)"
        )
    hidden_size = (0, *stored.entries[str(plan.names["0.0.linear.weight"])].shape)[-1]
    return _load(stored, hidden_size, vocab_size, dtype, device)


def _open(source: HeadsSource) -> _Stored:
    if isinstance(source, str | Path):
        return _open_path(source)
    if isinstance(source, nn.Module):
        label = f"the {type(source).__name__} module"
        config = {}
        if isinstance(source, MedusaHeads):
            names = ("vocab_size", "own_lm_head", "cumulative_topk_accuracy")
            config = {name: getattr(source, name) for name in names}
        return _Stored(label, _select(_tensor_entries(source.state_dict(), label), label), config)
    if isinstance(source, Mapping):
        return _Stored("the dict", _select(_tensor_entries(source, "the dict"), "the dict"))
    raise HeadsError(f"heads can be a folder, a file, a hub id, a module or a dict, not a {type(source).__name__}")


def _open_path(source: str | Path) -> _Stored:
    path = Path(source).expanduser()
    names: tuple[str, ...] = (path.name,) if path.is_file() else CANDIDATES
    fetch: _Fetch = partial(_file_in, path.parent if path.is_file() else path)
    if not path.exists():
        if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
            raise HeadsError(f"{source}: there is no such folder or file, and a hub id it is not")
        fetch = partial(_download, source)
    for name in names:
        found = fetch(name)
        if found is not None:
            config_file = fetch(CONFIG_NAME)
            entries = _read_shards(found, fetch) if name.endswith(".index.json") else _read_file(found)
            config = {} if config_file is None else _read_json(config_file)
            return _Stored(str(found), _select(entries, str(found)), config)
    raise HeadsError(f"{source}: no file of heads in it; one of {', '.join(names)} is needed")


def _file_in(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _download(repository: str, name: str) -> Path | None:
    """The cached copy of one file of a hub repository, downloaded if need be; ``None``: it has no such file."""
    from huggingface_hub import snapshot_download

    try:
        return _file_in(Path(snapshot_download(repository, allow_patterns=[name])), name)
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's
        raise HeadsError(
            f"{repository!r} is neither a folder or file here nor a hub repository that can be read "
            f"(looking for {name}): {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise HeadsError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _read_shards(index: Path, fetch: _Fetch) -> dict[str, _Entry]:
    """The heads' tensors of a sharded model; shards without any are neither opened nor downloaded."""
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
        raise HeadsError(f"{index}: its weight_map does not lead from keys to names of files beside it")
    wanted = {key: shards[key] for key in _short_names(shards, str(index)).values()}
    _layout(_short_names(wanted, str(index)), str(index))
    entries: dict[str, _Entry] = {}
    for shard in sorted(set(wanted.values())):
        path = fetch(shard)
        if path is None:
            raise HeadsError(f"{index}: its shard {shard} is missing")
        entries.update((key, entry) for key, entry in _read_file(path).items() if wanted.get(key) == shard)
    return entries


def _read_file(path: Path) -> dict[str, _Entry]:
    if path.suffix != ".safetensors":
        # Only zip archives can be mapped; what older torch versions wrote is read whole.
        mapped = zipfile.is_zipfile(path)
        return _tensor_entries(_unpickle(path, mapped), str(path), mapped)
    from safetensors import SafetensorError, safe_open

    entries = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(key)
                entries[key] = _Entry(key, str(path), tuple(part.get_shape()), part.get_dtype(), mapped=True)
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{path} is not a readable safetensors file: {error}") from error
    return entries


def _unpickle(path: Path, mapped: bool) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a broken pickle raises anything
        raise HeadsError(f"{path} does not load as plain tensors: {_reason(error)}") from error
    if not isinstance(content, Mapping):
        raise HeadsError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    return content


def _tensor_entries(tensors: Mapping[str, Any], where: str, mapped: bool = False) -> dict[str, _Entry]:
    """What isn't a tensor in memory keeps a dtype that no check lets pass."""
    entries = {}
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype) + " without data" * value.is_meta
            entries[str(key)] = _Entry(str(key), where, tuple(value.shape), dtype, value, mapped)
        else:
            entries[str(key)] = _Entry(str(key), where, (), f"a {type(value).__name__}")
    return entries


def _short_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Key without prefix -> key, of those behind ``medusa_head.``; of all where none is."""
    keys = list(keys)
    names: dict[str, str] = {}
    for key in keys:
        match = _PREFIX.fullmatch(key)
        if match and names.setdefault(match[1], key) != key:
            raise HeadsError(f"{where}: {names[match[1]]} and {key} would both be {match[1]}")
    return names or {key: key for key in keys}


def _select(entries: dict[str, _Entry], where: str) -> dict[str, _Entry]:
    return {short: entries[key] for short, key in _short_names(entries, where).items()}


def _layout(keys: Iterable[str], where: str) -> _Layout:
    keys = list(keys)
    for layout in (_VLLM, _MEDUSA):
        if any(layout.block.fullmatch(key) or layout.lm_head.fullmatch(key) for key in keys):
            return layout
    raise HeadsError(f"{where}: no Medusa heads in it; its keys are {_some(keys)}")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "") if keys else "none"


def _plan(stored: _Stored) -> _Plan:
    """Count heads and layers, and see that exactly the keys they need are there."""
    entries, layout = stored.entries, _layout(stored.entries, stored.where)
    ignored = set(_VLLM_EXTRAS) if layout is _VLLM else set()
    num_heads = num_layers = 1
    own_lm_head, biased = False, layout is _MEDUSA
    for key in entries:
        if match := layout.block.fullmatch(key):
            num_layers = max(num_layers, int(match["layer"]) + 1)
            biased |= match["part"] == "bias"
        elif not (match := layout.lm_head.fullmatch(key)):
            continue
        elif layout is _VLLM and stored.config.get("original_lm_head"):
            ignored.add(key)
            continue
        else:
            own_lm_head = True
            num_layers = max(num_layers, int(match.groupdict().get("layer", 0)))
        num_heads = max(num_heads, int(match["head"]) + 1)
    found = f"its keys speak of {num_heads} head(s), {num_layers} layer(s) each" + ", own lm_heads" * own_lm_head
    first = next(iter(entries.items()))
    prefix = first[1].name.removesuffix(first[0])
    names: dict[str, str | None] = {}

    def take(target: str, key: str) -> None:
        if key not in entries:
            raise HeadsError(f"{stored.where}: {prefix}{key} is missing ({found})")
        names[target] = key

    for head in range(num_heads):
        for layer in range(num_layers):
            for part in ("weight", "bias"):
                target = f"{head}.{layer}.linear.{part}"
                if part == "bias" and not biased:
                    names[target] = None
                else:
                    take(target, layout.block_key.format(head=head, layer=layer, part=part))
        if own_lm_head:
            take(f"{head}.{num_layers}.weight", layout.lm_head_key.format(head=head, layer=num_layers))
    unknown = [entry.name for key, entry in entries.items() if key not in ignored and key not in names.values()]
    if unknown:
        raise HeadsError(f"{stored.where}: unknown keys {_some(unknown)} ({found})")
    return _Plan(num_heads, num_layers, own_lm_head, names)


def _check(stored: _Stored, plan: _Plan, hidden_size: int, vocab_size: int, dtype: torch.dtype | None) -> None:
    """Shapes and dtypes against the model's, before anything is read."""
    if dtype is not None and not dtype.is_floating_point:
        raise HeadsError(f"load_heads: dtype is {dtype}, heads need a floating-point one")
    sizes = f"hidden_size {hidden_size}, vocab_size {vocab_size}"
    token_map = stored.entries.get("token_map")
    kept = vocab_size if token_map is None else (*token_map.shape, 0)[0]
    used = {key: target for target, key in plan.names.items() if key is not None}
    for key in (*used, *(k for k in ("lm_head.weight",) if k in stored.entries and k not in used)):
        entry, target = stored.entries[key], used.get(key)
        at = f"{entry.where}: {entry.name}"
        is_block = target is not None and ".linear." in target
        expected = (hidden_size if is_block else vocab_size, hidden_size)[: 1 if key.endswith("bias") else 2]
        if not _FLOATING.fullmatch(entry.dtype):
            raise HeadsError(f"{at} is {entry.dtype}, heads need floating-point tensors")
        if entry.shape == expected or (target is None and entry.shape == (kept, hidden_size)):
            continue
        if not is_block and kept != vocab_size and entry.shape == (kept, hidden_size):
            raise HeadsError(
                f"{at} has shape {list(entry.shape)}, cut down to the {kept} tokens of token_map, "
                f"but {list(expected)} is needed: a truncated vocabulary is not supported"
            )
        raise HeadsError(f"{at} has shape {list(entry.shape)}, but the model needs {list(expected)} ({sizes})")
    dtypes = {stored.entries[key].dtype: stored.entries[key].name for key in reversed(used)}
    if dtype is None and len(dtypes) > 1:
        mixed = ", ".join(f"{name} is {kind}" for kind, name in reversed(dtypes.items()))
        raise HeadsError(f"{stored.where}: {mixed}: say which dtype the heads shall have")
    made_for = stored.config.get("vocab_size")
    if "own_lm_head" in stored.config and not plan.own_lm_head and made_for != vocab_size:
        raise HeadsError(f"{stored.where}: heads for vocab_size {made_for}, but the model has {vocab_size} ({sizes})")


def _load(
    stored: _Stored,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> MedusaHeads:
    plan = _plan(stored)
    _check(stored, plan, hidden_size, vocab_size, dtype)
    with torch.device("meta"):
        heads = MedusaHeads(hidden_size, vocab_size, plan.num_heads, plan.num_layers, own_lm_head=plan.own_lm_head)
    state: dict[str, torch.Tensor] = {}
    for target, key in plan.names.items():
        if key is None:
            state[target] = state[target.replace("bias", "weight")].new_zeros(hidden_size)
        else:
            entry = stored.entries[key]
            # A copy of a mapped file's tensor does not care what becomes of the file.
            state[target] = entry.read().to(device=device, dtype=dtype, copy=entry.mapped).contiguous()
    heads.load_state_dict(state, assign=True)
    heads.cumulative_topk_accuracy = _accuracy(stored, plan.num_heads)
    return heads


def _accuracy(stored: _Stored, num_heads: int) -> list[list[float]] | None:
    rows: Any = stored.config.get("cumulative_topk_accuracy")
    if rows is None:
        return None
    try:
        shares = [[float(share) for share in row] for row in rows[:num_heads]]
    except (TypeError, ValueError):
        shares = []
    if len(shares) < num_heads or not all(row and min(row) >= 0 and max(row) <= 1 for row in shares):
        raise HeadsError(f"{stored.where}: cumulative_topk_accuracy, beside it, is not {num_heads} rows of shares")
    return shares
