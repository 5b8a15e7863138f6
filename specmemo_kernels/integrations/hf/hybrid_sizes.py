"""Sizes of models with recurrent layers for plans: from the model itself, or from its code without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specmemo_kernels.cache.state_pool import MixerSpec
from specmemo_kernels.integrations.hf.find_mixers import stateful_modules
from specmemo_kernels.integrations.hf.mixers import Mixers
from specmemo_kernels.planning.model_spec import MixerSizes, ModelSpec


def with_mixers(spec: ModelSpec, model: Any, mixers: Mixers, attention_layers: int) -> ModelSpec:
    """``spec`` with the sizes of ``model``'s recurrent layers, and with its number of matrix elements."""
    found = [(mixer.spec, mixer.module) for mixer in mixers.mixers]
    return _with_mixers(spec, model, found, attention_layers) if found else spec


def recurrent_spec(spec: ModelSpec, source: str | Path) -> ModelSpec:
    """``spec`` of a ``config.json``, a folder with one or a hub id, with the sizes of its recurrent layers.

    The model is made by transformers on the meta device, without weights, and its layers run on one row.
    """
    if not spec.recurrent:
        return spec
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"), torch.no_grad():
        make: Any = AutoModelForCausalLM.from_config
        model = make(config.get_text_config(), dtype=getattr(torch, spec.dtype)).eval()
        found = stateful_modules(model)
    kinds = list(config.get_text_config().layer_types)
    attention = sum((kind.endswith("attention") and kind != "linear_attention") or "hybrid" in kind for kind in kinds)
    return _with_mixers(spec, model, found, attention)


def _with_mixers(
    spec: ModelSpec, model: Any, found: list[tuple[MixerSpec, nn.Module]], attention_layers: int
) -> ModelSpec:
    weights, matrices = _matrices([module for _, module in found])
    outside = [model.get_input_embeddings(), *([] if spec.tied else [model.get_output_embeddings()])]
    layers = _matrices([model])[0] - _matrices(outside)[0]
    states = [mixer.state_bytes for mixer, _ in found]
    sizes = MixerSizes(weights, matrices, sum(states), max(states), sum(mixer.row_bytes for mixer, _ in found))
    bare = replace(spec, layers_without_keys=spec.num_layers - attention_layers, other_weights=0, mixers=sizes)
    return replace(bare, other_weights=layers - bare.layer_weights)


def _matrices(modules: list[nn.Module]) -> tuple[int, int]:
    """Elements and number of the modules' matrices."""
    matrices = {id(p): p for module in modules for p in module.parameters() if p.dim() > 1}
    return sum(p.numel() for p in matrices.values()), len(matrices)
