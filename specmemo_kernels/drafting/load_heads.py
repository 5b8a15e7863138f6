"""Medusa heads for a model, from files of every published layout, hub repositories, modules and dicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from specmemo_kernels.drafting.head_files import HeadsSource, open_path, open_source
from specmemo_kernels.drafting.head_tensors import StoredHeads, stored_heads
from specmemo_kernels.drafting.medusa_heads import MedusaHeads, build_heads
from specmemo_kernels.drafting.source_files import HeadsError
from specmemo_kernels.ops.weight_codes import check_bits

__all__ = ["HeadsError", "HeadsSource", "describe_heads", "load_heads"]


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

    The numbers of heads and layers are counted from the keys, not read from a config. The layouts:

    - Medusa-1: ``{h}.{l}.linear.weight``, ``.bias``, and each head's own lm_head ``{h}.{num_layers}.weight``;
    - shared ("v2"): the same without ``{h}.{num_layers}.weight``; all heads use the model's lm_head;
    - Medusa-2: either layout behind ``medusa_head.`` in a whole model's files; no other tensor is read;
    - vLLM: ``blocks.{h}.layers.{l}.weight`` (and ``.bias``), ``lm_heads.{h}.weight``; shared if the config has
      ``original_lm_head`` or no ``lm_heads.*`` exist (a single ``lm_head.weight`` is the model's, so it isn't read).
      ``token_map`` isn't needed with whole lm_heads; lm_heads cut down to it are refused;
    - heads in 4 bits by ``save_pretrained``: ``.codes`` and ``.scales`` in the place of each matrix's ``.weight``.

    Args:
        source: a folder, a file, a hub id, a :class:`MedusaHeads`, another module (Medusa's own ``ModuleList``) or a
            dict of tensors. In a folder or repository the first of these counts: ``medusa_lm_head.safetensors``,
            ``medusa_lm_head.pt``, ``model.safetensors``, its ``.index.json``, ``pytorch_model.bin``, its
            ``.index.json``. Pickles are only read with ``weights_only=True``. Only the needed files are downloaded.
        dtype, device: of the result; ``None`` keeps the source's.
        head_bits: 4 packs all matrices into 4-bit codes, a few rows at a time; ``None``: as stored.

    Returns:
        The heads. A :class:`MedusaHeads` that needs no conversion is returned itself; unconverted tensors of another
        module or dict are shared. Files are copied tensor by tensor; no file stays mapped.

    Raises:
        HeadsError: no heads, a missing or unknown key, a wrong shape or dtype, a matrix that 4-bit codes can't hold,
            wrong accuracies.
        ValueError: ``head_bits`` other than 4.
    """
    check_bits(head_bits)
    stored = open_source(source)
    if isinstance(source, MedusaHeads):
        names = ("vocab_size", "own_lm_head", "cumulative_topk_accuracy")
        stored = replace(stored, config={name: getattr(source, name) for name in names})
    parsed = stored_heads(stored)
    parsed.check(hidden_size, vocab_size, dtype)
    if isinstance(source, MedusaHeads):
        same = all(p.to(device=device, dtype=dtype) is p for p in source.parameters())
        same &= all(b.to(device=device) is b and b.dtype in (torch.uint8, torch.float16) for b in source.buffers())
        if same and head_bits in (None, source.head_bits):
            return source
    heads = build_heads(parsed, hidden_size, vocab_size, dtype, device, head_bits)
    return heads.train(source.training) if isinstance(source, nn.Module) else heads


def describe_heads(source: str | Path, hidden_size: int, vocab_size: int) -> StoredHeads:
    """The heads that :func:`load_heads` would load. Keys, shapes and ``config.json`` are read, no weights.

    Exception: torch files that aren't zip archives are read whole.

    Raises:
        HeadsError: as :func:`load_heads`.
    """
    parsed = stored_heads(open_path(source))
    parsed.check(hidden_size, vocab_size, torch.float32)  # a dtype, because patch converts mixed dtypes to the model's
    return parsed
