"""Medusa heads from whatever holds them: files of every published layout, hub repositories, modules, dicts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.drafting.head_files import (
    MEDUSA,
    VLLM,
    Entry,
    HeadsError,
    HeadsSource,
    Stored,
    first_few,
    layout_of,
    open_path,
    open_source,
)
from specmemo_kernels.drafting.medusa_heads import CONFIG_NAME, MedusaHeads
from specmemo_kernels.ops.weight_codes import CODE_BITS, GROUP, check_bits, groups_of, pack

__all__ = ["HeadsError", "HeadsFacts", "HeadsSource", "describe_heads", "load_heads", "load_pretrained"]

_FLOATING = re.compile(r"B?F\d+.*|torch\.b?float\w+")  # as safetensors and torch call them
_BYTES = re.compile(r"U8|torch\.uint8")
_VLLM_EXTRAS = ("lm_head.weight", "token_map")


@dataclass(frozen=True)
class _Plan:
    """What the keys say; ``names``: key of the result -> key of the source (``None``: a bias of zeros).

    ``head_bits``: 4 where own lm_heads are stored in codes.
    """

    num_heads: int
    num_layers: int
    own_lm_head: bool
    head_bits: int | None
    names: dict[str, str | None]


def load_heads(
    source: HeadsSource,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    head_bits: int | None = None,
) -> MedusaHeads:
    """Heads for a model of width ``hidden_size`` with ``vocab_size`` rows in its lm_head.

    How many heads and layers there are is counted from the keys, whatever a config says. The layouts:

    - Medusa-1: ``{h}.{l}.linear.weight``, ``.bias``, and each head's own lm_head ``{h}.{num_layers}.weight``;
    - shared ("v2"): the same without ``{h}.{num_layers}.weight``, the model's lm_head serves all heads;
    - Medusa-2: one of those behind ``medusa_head.`` in a whole model's files, of which nothing else is read;
    - vLLM: ``blocks.{h}.layers.{l}.weight`` (and ``.bias``), ``lm_heads.{h}.weight``; shared where the config says
      ``original_lm_head`` or no ``lm_heads.*`` exist (a single ``lm_head.weight`` is the model's, so it isn't read).
      ``token_map`` isn't needed with whole lm_heads; lm_heads cut down to it are refused;
    - what ``save_pretrained`` writes of heads in 4 bits: Medusa-1 with ``{h}.{num_layers}.codes`` and ``.scales``.

    Args:
        source: a folder, a file, a hub id, a :class:`MedusaHeads`, another module (Medusa's own ``ModuleList``) or a
            dict of tensors. In a folder or repository the first of these counts: ``medusa_lm_head.safetensors``,
            ``medusa_lm_head.pt``, ``model.safetensors``, its ``.index.json``, ``pytorch_model.bin``, its
            ``.index.json``. Pickles are only read with ``weights_only=True``. From the hub come only the files needed.
        dtype, device: of the result; ``None`` keeps the source's.
        head_bits: 4 puts own lm_heads in 4-bit codes, a few rows of one at a time; ``None``: as stored.

    Returns:
        The heads. A :class:`MedusaHeads` that needs no conversion comes back itself; tensors of a module or dict that
        need none are shared. Files are copied tensor by tensor, nothing stays mapped.

    Raises:
        HeadsError: nothing found, a missing or unknown key, a wrong shape or dtype, ``head_bits`` without own lm_heads.
    """
    stored = open_source(source)
    if isinstance(source, MedusaHeads):
        _check(stored, _plan(stored, head_bits), hidden_size, vocab_size, dtype)
        same = all(p.to(device=device, dtype=dtype) is p for p in source.parameters())
        same &= all(b.to(device=device) is b and b.dtype in (torch.uint8, torch.float16) for b in source.buffers())
        if same and head_bits in (None, source.head_bits):
            return source
    heads = _load(stored, hidden_size, vocab_size, dtype, device, head_bits)
    return heads.train(source.training) if isinstance(source, nn.Module) else heads


def load_pretrained(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    head_bits: int | None = None,
) -> MedusaHeads:
    """:func:`load_heads` with the sizes that the files tell; behind ``MedusaHeads.from_pretrained``."""
    stored = open_path(source)
    plan = _plan(stored)
    kept_as = "weight" if plan.head_bits is None else "codes"
    lm_head = plan.names[f"0.{plan.num_layers}.{kept_as}"] if plan.own_lm_head else "lm_head.weight"
    vocab_size = stored.config.get("vocab_size")
    if lm_head in stored.entries and "token_map" not in stored.entries:
        vocab_size = (*stored.entries[lm_head].shape, 0)[0]
    if not isinstance(vocab_size, int):
        raise HeadsError(
            f"{stored.where}: the vocabulary's size is neither in the weights nor in {CONFIG_NAME} "
            f"(vocab_size: {vocab_size!r}); use load_heads(source, hidden_size, vocab_size)"
        )
    hidden_size = (0, *stored.entries[str(plan.names["0.0.linear.weight"])].shape)[-1]
    return _load(stored, hidden_size, vocab_size, dtype, device, head_bits)


@dataclass(frozen=True)
class HeadsFacts:
    """What a file of heads says without being loaded; ``accuracy`` as ``MedusaHeads.cumulative_topk_accuracy``."""

    num_heads: int
    num_layers: int
    own_lm_head: bool
    head_bits: int | None
    accuracy: list[list[float]] | None


def describe_heads(source: str | Path, hidden_size: int, vocab_size: int) -> HeadsFacts:
    """What :func:`load_heads` would load for such a model. Keys, shapes and ``config.json`` are read, no weights.

    (What torch wrote before it wrote zip archives can only be read whole.)

    Raises:
        HeadsError: as :func:`load_heads`.
    """
    stored = open_path(source)
    plan = _plan(stored)
    # Mixed dtypes become the model's when the heads are loaded for it.
    _check(stored, plan, hidden_size, vocab_size, torch.float32)
    accuracy = _accuracy(stored, plan.num_heads)
    return HeadsFacts(plan.num_heads, plan.num_layers, plan.own_lm_head, plan.head_bits, accuracy)


def _plan(stored: Stored, head_bits: int | None = None) -> _Plan:
    """Count heads and layers, and see that exactly the keys they need are there; ``head_bits`` as somebody asks."""
    check_bits(head_bits)
    entries, layout = stored.entries, layout_of(stored.entries, stored.where)
    ignored = set(_VLLM_EXTRAS) if layout is VLLM else set()
    num_heads = num_layers = 1
    own_lm_head, coded, biased = False, False, layout is MEDUSA
    for key in entries:
        if match := layout.block.fullmatch(key):
            num_layers = max(num_layers, int(match["layer"]) + 1)
            biased |= match["part"] == "bias"
        elif not (match := layout.lm_head.fullmatch(key)):
            continue
        elif layout is VLLM and stored.config.get("original_lm_head"):
            ignored.add(key)
            continue
        else:
            own_lm_head = True
            coded |= match["part"] != "weight"
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
        for part in ("codes", "scales") if coded else ("weight",) if own_lm_head else ():
            take(f"{head}.{num_layers}.{part}", layout.lm_head_key.format(head=head, layer=num_layers, part=part))
    unknown = [entry.name for key, entry in entries.items() if key not in ignored and key not in names.values()]
    if unknown:
        raise HeadsError(f"{stored.where}: unknown keys {first_few(unknown)} ({found})")
    if head_bits is not None and not own_lm_head:
        raise HeadsError(
            f"{stored.where}: head_bits is {head_bits}, but these heads share the model's lm_head and have no "
            "vocabulary matrix of their own; leave head_bits out"
        )
    return _Plan(num_heads, num_layers, own_lm_head, CODE_BITS if coded else None, names)


def _check(stored: Stored, plan: _Plan, hidden_size: int, vocab_size: int, dtype: torch.dtype | None) -> None:
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
        if _is_coded(target):
            groups = groups_of(hidden_size)
            expected = (vocab_size, groups if key.endswith("scales") else groups * (GROUP // 2))
        is_codes = _is_coded(target) and key.endswith("codes")
        if not (_BYTES if is_codes else _FLOATING).fullmatch(entry.dtype):
            needed = "uint8 for codes" if is_codes else "floating-point tensors"
            raise HeadsError(f"{at} is {entry.dtype}, heads need {needed}")
        if entry.shape == expected or (target is None and entry.shape == (kept, hidden_size)):
            continue
        if not is_block and kept != vocab_size and entry.shape == (kept, hidden_size):
            raise HeadsError(
                f"{at} has shape {list(entry.shape)}, cut down to the {kept} tokens of token_map, "
                f"but {list(expected)} is needed: a truncated vocabulary is not supported"
            )
        raise HeadsError(f"{at} has shape {list(entry.shape)}, but the model needs {list(expected)} ({sizes})")
    own = [key for key, target in used.items() if not _is_coded(target)]
    dtypes = {stored.entries[key].dtype: stored.entries[key].name for key in reversed(own)}
    if dtype is None and len(dtypes) > 1:
        mixed = ", ".join(f"{name} is {kind}" for kind, name in reversed(dtypes.items()))
        raise HeadsError(f"{stored.where}: {mixed}: say which dtype the heads shall have")
    made_for = stored.config.get("vocab_size")
    if "own_lm_head" in stored.config and not plan.own_lm_head and made_for != vocab_size:
        raise HeadsError(f"{stored.where}: heads for vocab_size {made_for}, but the model has {vocab_size} ({sizes})")


def _is_coded(target: str | None) -> bool:
    """Whether a key of the result is of a matrix in codes."""
    return target is not None and target.endswith((".codes", ".scales"))


def _load(
    stored: Stored,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    head_bits: int | None,
) -> MedusaHeads:
    plan = _plan(stored, head_bits)
    _check(stored, plan, hidden_size, vocab_size, dtype)
    bits = head_bits or plan.head_bits
    with torch.device("meta"):
        heads = MedusaHeads(
            hidden_size, vocab_size, plan.num_heads, plan.num_layers, own_lm_head=plan.own_lm_head, head_bits=bits
        )
    state: dict[str, torch.Tensor] = {}
    for target, key in plan.names.items():
        if key is None:
            state[target] = state[target.replace("bias", "weight")].new_zeros(hidden_size)
            continue
        entry = stored.entries[key]
        if bits is not None and target.endswith(f".{plan.num_layers}.weight"):
            stem = target.removesuffix("weight")
            state[f"{stem}codes"], state[f"{stem}scales"] = _packed(entry, device)
            continue
        kind = dtype if not _is_coded(target) else torch.float16 if target.endswith("scales") else None
        # A copy of a mapped file's tensor does not care what becomes of the file.
        state[target] = entry.read().to(device=device, dtype=kind, copy=entry.mapped).contiguous()
    heads.load_state_dict(state, assign=True)
    heads.cumulative_topk_accuracy = _accuracy(stored, plan.num_heads)
    return heads


def _packed(entry: Entry, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a stored matrix; of one in a mapped file a few rows are in memory at a time."""
    try:
        return pack(entry.read(), device)
    except ValueError as error:
        raise HeadsError(f"{entry.where}: {entry.name}: {error}") from error


def _accuracy(stored: Stored, num_heads: int) -> list[list[float]] | None:
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
