"""Tiny random models with recurrent or convolution layers beside attention."""

from __future__ import annotations

from typing import Any

import torch
from family_models import VOCAB, merged, small_settings
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

_BOTH = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_OWN = {"num_hidden_layers": 3, "layer_types": ..., "layers_block_type": ...}
#: A model type and what is changed of its small configuration.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _BOTH,
    "qwen3_5_text": _BOTH,
    "qwen3_5_moe_text": _BOTH,
    "lfm2": _BOTH | {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": _BOTH | {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm3": {},
    "granitemoehybrid": _BOTH,
    "bamba": _OWN | {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "nemotron_h": {},
    "kimi_linear": _BOTH | _SPARSE,
    "olmo_hybrid": _BOTH,
    "bailing_hybrid": _BOTH | _SPARSE,
    "minimax": _BOTH | {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "jamba": _OWN | {"attn_layer_period": 3, "attn_layer_offset": 1},
    # two blocks of attention, which three layers share
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 3, 4],
        "num_mem_blocks": 2,
    },
}


def hybrid_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    kind = CONFIG_MAPPING[family]
    config = kind(**merged(small_settings(kind()), HYBRIDS[family] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        if not parameter.isfinite().all():
            parameter.data.normal_(std=0.1)
    model.generation_config.eos_token_id = None
    return model.eval()


__all__ = ["HYBRIDS", "VOCAB", "hybrid_model"]
