"""Published drafter checkpoints: EAGLE-1, 2 and 3, Clover-2 and DFlash, recognised by config and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from specmemo_kernels.arguments import shown
from specmemo_kernels.drafting.config_reader import accuracy_rows
from specmemo_kernels.drafting.head_files import Entry, first_few, has_heads, read_file, read_shards
from specmemo_kernels.drafting.published_config import (
    CloverConfig,
    DFlashConfig,
    DrafterConfig,
    Eagle3Config,
    clover_config,
    dflash_config,
    eagle3_config,
    eagle_config,
)
from specmemo_kernels.drafting.published_tensors import check_tensors, location
from specmemo_kernels.drafting.source_files import CONFIG_NAME, HeadsError, find_files, read_index, read_json

Tensor = torch.Tensor
Kind = Literal["eagle3", "eagle", "clover2", "dflash"]

_PARSERS: Mapping[Kind, Callable[[str, Mapping[str, Any], Collection[str]], DrafterConfig]] = {
    "eagle3": eagle3_config,
    "eagle": eagle_config,
    "clover2": clover_config,
    "dflash": dflash_config,
}
_SUPPORTED = f"medusa, {', '.join(_PARSERS)}"
_HYDRA_NAME = "hydra_lm_head.pt"
_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq")
_MTP = re.compile(r"(.*\.)?(mtp\w*|enorm|hnorm|eh_proj|shared_head)\..*")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|wte|word_embeddings)\.weight")


@dataclass(frozen=True)
class PublishedDrafter:
    """A checked checkpoint, whose weights aren't read yet.

    Attributes:
        where: the file.
        names: internal key -> stored tensor. Internal keys are the published ones without ``model.``; EAGLE-3's
            ``midlayer`` is ``layers.0``.
        accuracy: the config's ``cumulative_topk_accuracy``: shares from 0 to 1, a row per drafted token.
    """

    kind: Kind
    config: DrafterConfig
    where: str
    names: dict[str, Entry]
    accuracy: tuple[tuple[float, ...], ...] | None

    def read(self, dtype: torch.dtype, device: torch.device | str, head_bits: int | None = None) -> dict[str, Tensor]:
        """Copies of the tensors by internal key, one read after the other: ``d2t`` in int64, the others in ``dtype``.

        The result keeps no file mapped; ``names`` of a pickle do.

        Args:
            head_bits: 4 packs matrices into 4-bit codes (:mod:`specmemo_kernels.drafting.matrices`).

        Raises:
            HeadsError: ``dtype`` isn't a floating-point one, or 4-bit codes can't hold a matrix.
        """
        if not dtype.is_floating_point:
            raise HeadsError(f"dtype is {dtype}, drafters need a floating-point one")
        tensors = {}
        for key, entry in self.names.items():
            if head_bits is not None and len(entry.shape) == 2:
                stem = key.removesuffix("weight")
                tensors[f"{stem}codes"], tensors[f"{stem}scales"] = entry.packed(entry.read(), device)
                continue
            kind = torch.int64 if key == "d2t" else dtype
            tensors[key] = entry.read().to(device=device, dtype=kind, copy=True).contiguous()
        return tensors

    @property
    def elements(self) -> dict[str, int]:
        """The tensors' numbers of elements, by internal key."""
        return {key: prod(entry.shape) for key, entry in self.names.items()}

    def nbytes(self, dtype_bytes: int) -> int:
        """Bytes of what :meth:`read` returns in a dtype of ``dtype_bytes``."""
        return sum(count * (8 if key == "d2t" else dtype_bytes) for key, count in self.elements.items())


def open_drafter(source: str | Path) -> PublishedDrafter | None:
    """Recognise and check the drafter in a folder, a file or a hub repository.

    The config, all keys, shapes and dtypes, and ``d2t`` are checked. Pickles are only read with ``weights_only=True``.

    Returns:
        ``None`` for Medusa heads: use :func:`specmemo_kernels.drafting.load_heads.load_heads`.

    Raises:
        HeadsError: another kind of checkpoint, a wrong config value, a missing or unknown key, a wrong shape or dtype.
    """
    files = find_files(source)
    config_file = files.fetch(CONFIG_NAME)
    config = {} if config_file is None else read_json(config_file)
    if files.remote and (kind := _unsupported_kind(config, ())):
        raise _refusal(files.label, kind, "weren't downloaded")
    paths = map(files.fetch, (*files.names, _HYDRA_NAME))
    file = next(filter(None, paths), None) or files.weights()
    where = str(file)
    if file.name.startswith("medusa_lm_head.") and not _unsupported_kind(config, ()):
        return None
    shards = read_index(file) if file.name.endswith(".index.json") else None
    entries = read_file(file) if shards is None else {}
    keys = list(entries if shards is None else shards)
    kind = _recognise(where, config, keys)
    if kind is None:
        return None
    if config_file is None:
        raise HeadsError(f"{where}: {CONFIG_NAME} is missing; the {kind} drafter's belongs next to this file")
    names = _internal_names(where, entries if shards is None else read_shards(shards, file, files.fetch))
    parsed = _PARSERS[kind](str(config_file), config, names)
    check_tensors(where, names, parsed)
    return PublishedDrafter(kind, parsed, where, names, accuracy_rows(str(config_file), config))


def config_of(where: str, config: Mapping[str, Any], keys: Collection[str]) -> DrafterConfig:
    """The parsed ``config.json`` of a drafter whose tensors have these internal keys.

    Raises:
        HeadsError: no known drafter, or a wrong value.
    """
    kind = _recognise(where, config, list(keys))
    if kind is None:
        raise HeadsError(f"{where}: Medusa heads have no configuration of their own")
    return _PARSERS[kind](where, config, keys)


def check_target(drafter: PublishedDrafter, hidden_size: int, vocab_size: int) -> None:
    """Check that a drafter fits a target of width ``hidden_size`` with ``vocab_size`` rows in its lm_head.

    Raises:
        HeadsError: another hidden or vocabulary size.
    """
    config, names, where = drafter.config, drafter.names, f"{drafter.where}: {CONFIG_NAME}"
    advice = f"the target has hidden_size {hidden_size}, vocab_size {vocab_size}; use a drafter made for this model"
    clover, own_hidden = isinstance(config, CloverConfig), config.layer.hidden_size
    features = config.target_hidden_size if isinstance(config, Eagle3Config) else own_hidden
    if features != hidden_size:
        entry = names["clover_embed_tokens.weight" if clover else "fc.weight"]
        rows = entry.shape[0] if clover or isinstance(config, Eagle3Config) else hidden_size
        needed = [rows, entry.shape[1] // features * hidden_size]
        raise HeadsError(f"{location(entry)} has shape {list(entry.shape)}, but {needed} is needed: {advice}")
    if config.vocab_size not in (None, vocab_size):
        keys = ("embed_tokens.weight", "clover_embed_tokens.weight", "lm_head.weight")
        matrices = (names[key] for key in keys if key in names and names[key].shape[0] == config.vocab_size)
        for matrix in matrices:
            needed = [vocab_size, own_hidden]
            raise HeadsError(f"{location(matrix)} has shape {list(matrix.shape)}, but {needed} is needed: {advice}")
        raise HeadsError(f"{where}: vocab_size is {config.vocab_size}, but {advice}")
    if isinstance(config, DFlashConfig) and config.mask_token_id >= vocab_size:
        raise HeadsError(f"{where}: mask_token_id is {config.mask_token_id}, but {advice}")


def _refusal(where: str, kind: str, keys: str) -> HeadsError:
    return HeadsError(f"{where}: {kind} drafters aren't supported; its first keys {keys}; supported are {_SUPPORTED}")


def _unsupported_kind(config: Mapping[str, Any], keys: Collection[str]) -> str | None:
    """The name of a known kind of drafter that can't be used here."""
    if "hydra_num_heads" in config or any(key.startswith("hydra_") for key in keys):
        return "hydra"
    speculators_kind = config.get("speculators_model_type")
    if speculators_kind not in (None, "eagle3"):
        return f"speculators' {speculators_kind}"[:60]
    names = " ".join(_architectures(config)).lower()
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    if "dspark" in names or "dspark_config" in config or any(key.startswith("markov_head.") for key in keys):
        return "dspark"
    if projector not in (None, "dflash"):
        return f"dflash with projector_type {shown(projector)}"
    if "dflash2" in names or "domino" in names:
        return "dflash2" if "dflash2" in names else "domino"
    return "peagle" if "peagle" in names or "mask_hidden" in keys else None


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _recognise(where: str, config: Mapping[str, Any], keys: list[str]) -> Kind | None:
    """The kind of a checkpoint; ``None`` for Medusa heads.

    Raises:
        HeadsError: another kind.
    """
    if kind := "hydra" if Path(where).name == _HYDRA_NAME else _unsupported_kind(config, keys):
        raise _refusal(where, kind, f"are {first_few(keys)}")
    if has_heads(keys):
        return None
    bare = {key.removeprefix("model.") for key in keys}
    eagle3 = config.get("speculators_model_type") is not None or "layers.0.hidden_norm.weight" in bare
    if eagle3 or any(key.startswith("midlayer.") for key in bare) or "Eagle3" in " ".join(_architectures(config)):
        return "eagle3"
    if config.get("clover") is not None:
        return "clover2"
    if config.get("dflash_config") is not None:
        return "dflash"
    if "fc.weight" in bare:
        return "eagle"
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return None
    found = f"{where}: its first keys are {first_few(keys)}"
    if any(_MTP.fullmatch(key) for key in keys):
        raise HeadsError(f'{found}: a model with MTP layers; load the model and pass heads="mtp"')
    if any(_EMBEDDING.fullmatch(key) for key in keys):
        raise HeadsError(f"{found}: a whole language model, not a drafter; load it and pass it as DraftModel(...)")
    raise HeadsError(f"{found}: no known drafter; supported are {_SUPPORTED}")


def _internal_names(where: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Stored tensors by internal key, without the ignored ones."""
    names: dict[str, Entry] = {}
    for stored, entry in entries.items():
        key = re.sub(r"^midlayer\.", "layers.0.", stored.removeprefix("model."))
        if _IGNORED.fullmatch(key):
            continue
        if key in names:
            raise HeadsError(f"{where}: {names[key].name} and {stored} would both be {key}; remove one")
        names[key] = entry
    return names
