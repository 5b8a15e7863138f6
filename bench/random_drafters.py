"""Published drafters of random weights for a model, in their published layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specmemo_kernels.drafting.published_config import (
    clover_config,
    dflash_config,
    eagle3_config,
    eagle_config,
)
from specmemo_kernels.drafting.published_tensors import tensor_shapes

#: Kinds of drafters.
KINDS = {"eagle3": eagle3_config, "eagle": eagle_config, "clover2": clover_config, "dflash": dflash_config}


def config_of(kind: str, model: Any) -> dict[str, Any]:
    """The ``config.json`` of a drafter with one layer of the model's size; EAGLE-3 drafts 32,000 tokens at most."""
    sizes = {
        name: getattr(model.config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "rms_norm_eps",
        )
    }
    config = sizes | {
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    }
    if kind == "eagle3":
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": min(32000, sizes["vocab_size"]),
        }
    if kind == "clover2":
        return config | {"clover": {"num_heads": 5, "num_layers": 2}}
    if kind == "dflash":
        layers = model.config.num_hidden_layers
        options = {"target_layer_ids": [1, layers // 2, layers - 2], "mask_token_id": 0}
        return config | {"block_size": 8, "num_target_layers": layers, "dflash_config": options, "head_dim": 64}
    return config


def write_drafter(kind: str, model: Any, folder: Path) -> None:
    """A drafter of random weights in the published layout."""
    config = config_of(kind, model)
    marks = {"lm_head.weight", "fc.bias"} if kind in ("eagle3", "eagle") else set()
    shapes = dict(tensor_shapes(KINDS[kind]("config.json", config, marks)))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, shape in shapes.items():
        if key in ("d2t", "embed_tokens.weight"):
            continue
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0
        value = torch.randn(shape, generator=generator) * scale if len(shape) > 1 else torch.ones(shape)
        name = key.replace("layers.0.", "midlayer.") if kind == "eagle3" else key
        tensors[name] = value.to(model.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
