"""Tensors of stored Medusa heads: finds their keys in any layout, checks them, and makes one state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specmemo_kernels.drafting.config_reader import accuracy_rows
from specmemo_kernels.drafting.head_files import FLOATING, MEDUSA, VLLM, Stored, first_few, layout_of
from specmemo_kernels.drafting.source_files import CONFIG_NAME, HeadsError
from specmemo_kernels.ops.weight_codes import CODE_BITS, GROUP, groups_of

_BYTES = re.compile(r"U8|torch\.uint8")
_VLLM_EXTRAS = ("lm_head.weight", "token_map")


def accuracy_of(where: str, config: Mapping[str, Any], num_heads: int) -> list[list[float]] | None:
    """``cumulative_topk_accuracy`` of a configuration.

    Raises:
        HeadsError: there isn't a row of shares for each head.
    """
    rows = accuracy_rows(where, config)
    if rows is None:
        return None
    if len(rows) < num_heads:
        raise HeadsError(
            f"{where}: cumulative_topk_accuracy has {len(rows)} rows, it must have one for each of {num_heads} heads; "
            "correct or remove it"
        )
    return [list(row) for row in rows[:num_heads]]


@dataclass(frozen=True)
class StoredHeads:
    """Stored heads: their sizes by the keys, and the source key of each tensor.

    Attributes:
        head_bits: 4 if matrices are stored as codes.
        names: key of the state dict -> key of the source; ``None``: a bias of zeros.
    """

    stored: Stored
    num_heads: int
    num_layers: int
    own_lm_head: bool
    head_bits: int | None
    names: dict[str, str | None]

    @property
    def accuracy(self) -> list[list[float]] | None:
        """``cumulative_topk_accuracy`` of the configuration.

        Raises:
            HeadsError: there isn't a row of shares for each head.
        """
        return accuracy_of(self.stored.where, self.stored.config, self.num_heads)

    def sizes(self) -> tuple[int, int]:
        """hidden_size and vocab_size by the weights' shapes, else by the configuration.

        Raises:
            HeadsError: vocab_size is in neither.
        """
        entries, config = self.stored.entries, self.stored.config
        lm_head = self._first_matrix(f"0.{self.num_layers}") if self.own_lm_head else "lm_head.weight"
        vocab_size = config.get("vocab_size")
        if lm_head in entries and "token_map" not in entries:
            vocab_size = (*entries[lm_head].shape, 0)[0]
        if not isinstance(vocab_size, int):
            raise HeadsError(
                f"{self.stored.where}: the vocabulary's size is neither in the weights nor in {CONFIG_NAME} "
                f"(vocab_size: {vocab_size!r}); use load_heads(source, hidden_size, vocab_size)"
            )
        return (*entries[self._first_matrix("0.0.linear")].shape, 0)[0], vocab_size

    def _first_matrix(self, layer: str) -> str:
        """The source key of a layer's matrix or codes."""
        return str(self.names.get(f"{layer}.weight") or self.names[f"{layer}.codes"])

    def check(self, hidden_size: int, vocab_size: int, dtype: torch.dtype | None) -> None:
        """Check shapes and dtypes against the model's, without reading a tensor, and the configuration's accuracies.

        Raises:
            HeadsError: a wrong shape or dtype, mixed dtypes without ``dtype``, or wrong accuracies.
        """
        accuracy_of(self.stored.where, self.stored.config, self.num_heads)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise HeadsError(f"load_heads: dtype is {dtype!r}, heads need a floating-point torch.dtype")
        entries, where = self.stored.entries, self.stored.where
        sizes = f"hidden_size {hidden_size}, vocab_size {vocab_size}"
        token_map = entries.get("token_map")
        stored_vocab = vocab_size if token_map is None else (*token_map.shape, 0)[0]
        targets = {key: target for target, key in self.names.items() if key is not None}
        for key in (*targets, *({"lm_head.weight"} & entries.keys() - targets.keys())):
            entry, target = entries[key], targets.get(key)
            at = f"{entry.where}: {entry.name}"
            is_block = target is not None and ".linear." in target
            expected = (hidden_size if is_block else vocab_size, hidden_size)[: 1 if key.endswith("bias") else 2]
            if _is_coded(target):
                groups = groups_of(hidden_size)
                expected = (expected[0], groups if key.endswith("scales") else groups * (GROUP // 2))
            is_codes = _is_coded(target) and key.endswith("codes")
            if not (_BYTES if is_codes else FLOATING).fullmatch(entry.dtype):
                needed = "uint8 for codes" if is_codes else "floating-point tensors"
                raise HeadsError(f"{at} is {entry.dtype}, heads need {needed}")
            if entry.shape == expected or (target is None and entry.shape == (stored_vocab, hidden_size)):
                continue
            if not is_block and stored_vocab != vocab_size and entry.shape == (stored_vocab, hidden_size):
                raise HeadsError(
                    f"{at} has shape {list(entry.shape)}, cut down to the {stored_vocab} tokens of token_map, "
                    f"but {list(expected)} is needed: a truncated vocabulary is not supported"
                )
            raise HeadsError(f"{at} has shape {list(entry.shape)}, but the model needs {list(expected)} ({sizes})")
        keys = [key for key, target in targets.items() if not _is_coded(target)]
        dtypes = {entries[key].dtype: entries[key].name for key in reversed(keys)}
        if dtype is None and len(dtypes) > 1:
            mixed = ", ".join(f"{name} is {kind}" for kind, name in reversed(dtypes.items()))
            raise HeadsError(f"{where}: heads need one dtype, {mixed}; pass dtype to convert them")
        config_vocab = self.stored.config.get("vocab_size")
        if "own_lm_head" in self.stored.config and not self.own_lm_head and config_vocab != vocab_size:
            raise HeadsError(f"{where}: heads for vocab_size {config_vocab}, but the model has {vocab_size} ({sizes})")

    def read(
        self, hidden_size: int, dtype: torch.dtype | None, device: torch.device | str | None, head_bits: int | None
    ) -> dict[str, torch.Tensor]:
        """The state dict of :class:`MedusaHeads`, matrices as codes if ``head_bits`` is 4.

        Raises:
            HeadsError: a matrix that 4-bit codes can't hold.
        """
        state: dict[str, torch.Tensor] = {}
        matrix_dtype: torch.dtype | None = None
        for target, key in self.names.items():
            if key is None:  # a bias, behind its matrix
                state[target] = torch.zeros(hidden_size, dtype=dtype or matrix_dtype, device=device)
                continue
            entry = self.stored.entries[key]
            tensor = entry.read()
            if target.endswith(".weight"):
                matrix_dtype = tensor.dtype
                if head_bits is not None:
                    stem = target.removesuffix("weight")
                    state[f"{stem}codes"], state[f"{stem}scales"] = entry.packed(tensor, device)
                    continue
            kind = dtype if not _is_coded(target) else torch.float16 if target.endswith("scales") else None
            # Tensors of a mapped file are copied, so that later changes of the file have no effect.
            state[target] = tensor.to(device=device, dtype=kind, copy=entry.mapped).contiguous()
        return state


def stored_heads(stored: Stored) -> StoredHeads:
    """Count heads and layers by their keys.

    Raises:
        HeadsError: a missing or unknown key.
    """
    entries, layout = stored.entries, layout_of(stored.entries, stored.where)
    ignored = set(_VLLM_EXTRAS) if layout is VLLM else set()
    num_heads = num_layers = 1
    own_lm_head, coded, biased = False, False, layout is MEDUSA
    for key in entries:
        if match := layout.block.fullmatch(key):
            num_layers = max(num_layers, int(match["layer"]) + 1)
            biased |= match["part"] == "bias"
            coded |= match["part"] == "codes"
        elif not (match := layout.lm_head.fullmatch(key)):
            continue
        elif layout is VLLM and stored.config.get("original_lm_head"):
            ignored.add(key)
            continue
        else:
            own_lm_head = True
            coded |= match["part"] == "codes"
            num_layers = max(num_layers, int(match.groupdict().get("layer", 0)))
        num_heads = max(num_heads, int(match["head"]) + 1)
    summary = f"its keys are of {num_heads} head(s), {num_layers} layer(s) each" + ", own lm_heads" * own_lm_head
    first_key, first_entry = next(iter(entries.items()))
    prefix = first_entry.name.removesuffix(first_key)
    names: dict[str, str | None] = {}

    def take(target: str, key: str) -> None:
        if key not in entries:
            raise HeadsError(f"{stored.where}: {prefix}{key} is missing ({summary})")
        names[target] = key

    def take_matrix(target: str, key: str) -> None:
        """Codes and scales if there are codes, else the matrix."""
        for part in ("codes", "scales") if f"{key}codes" in entries else ("weight",):
            take(f"{target}.{part}", f"{key}{part}")

    for head in range(num_heads):
        for layer in range(num_layers):
            target, key = f"{head}.{layer}.linear", layout.block_key.format(head=head, layer=layer, part="")
            take_matrix(target, key)
            names[f"{target}.bias"] = None
            if biased:
                take(f"{target}.bias", f"{key}bias")
        if own_lm_head:
            take_matrix(f"{head}.{num_layers}", layout.lm_head_key.format(head=head, layer=num_layers, part=""))
    unknown = [entry.name for key, entry in entries.items() if key not in ignored and key not in names.values()]
    if unknown:
        raise HeadsError(f"{stored.where}: unknown keys {first_few(unknown)} ({summary})")
    return StoredHeads(stored, num_heads, num_layers, own_lm_head, CODE_BITS if coded else None, names)


def _is_coded(target: str | None) -> bool:
    """Whether a key of the state dict is of a matrix in codes."""
    return target is not None and target.endswith((".codes", ".scales"))
