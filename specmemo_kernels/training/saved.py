"""The files of a trained drafter, as ``patch`` and other engines load them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specmemo_kernels.drafting.published_config import LayerSpec
from specmemo_kernels.drafting.replaced_file import replace_file
from specmemo_kernels.drafting.source_files import CONFIG_NAME
from specmemo_kernels.training.objective import HeldOut
from specmemo_kernels.training.trainable import Trainable, TrainableClover, TrainableEagle3, TrainableMedusa

Tensor = torch.Tensor

WEIGHTS_NAME = "model.safetensors"


def save_drafter(drafter: Trainable, folder: Path, held_out: HeldOut, verifier: str) -> None:
    """Write a drafter in the target's dtype, with its accuracies in ``config.json``.

    Medusa heads in this package's layout, Clover-2 as published, EAGLE-3 as speculators saves it.

    Args:
        verifier: the target's name, for speculators' config.

    Raises:
        OSError: a file can't be written.
    """
    accuracy = [list(row) for row in held_out.accuracy]
    if isinstance(drafter, TrainableMedusa):
        heads = copy.deepcopy(drafter.heads).to(drafter.target.dtype)
        heads.cumulative_topk_accuracy = accuracy
        try:
            heads.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(f"{folder} can't be written: {error}") from error
        return
    tensors = {key: value.detach().contiguous() for key, value in drafter.cast().items()}
    if isinstance(drafter, TrainableEagle3):
        tensors |= _vocabulary_maps(drafter)
        config = _eagle3_json(drafter, verifier)
    else:
        assert isinstance(drafter, TrainableClover)
        config = _clover_json(drafter)
    config["cumulative_topk_accuracy"] = accuracy
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_NAME, lambda path: save_file(tensors, path))
    replace_file(folder / CONFIG_NAME, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def _vocabulary_maps(drafter: TrainableEagle3) -> dict[str, Tensor]:
    """``d2t``, offsets from a row of the draft vocabulary to its token, and ``t2d``, which tokens have a row."""
    tokens = drafter.tokens
    if tokens is None:
        return {}
    has_row = torch.zeros(len(drafter.target.weight), dtype=torch.bool, device=tokens.device)
    return {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": has_row.index_fill(0, tokens, True)}


def _eagle3_json(drafter: TrainableEagle3, verifier: str) -> dict[str, Any]:
    config, model = drafter.config, drafter.target.model
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids or ()),
        "tie_word_embeddings": not config.own_lm_head,
        "transformer_layer_config": _layer_json(config.layer, config.num_layers, config.vocab_size),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.depth}],
            "verifier": {"name_or_path": verifier, "architectures": model.config.architectures or []},
        },
    }


def _clover_json(drafter: TrainableClover) -> dict[str, Any]:
    config = drafter.config
    clover = {
        "num_heads": config.num_heads, "num_layers": config.num_layers, "heads_coefficient": 1.0,
        "decay_coefficient": 0.7,
    }  # fmt: skip
    return {
        "architectures": ["Clover2Model"],
        "clover": clover,
    } | _layer_json(config.layer, config.num_layers, config.vocab_size)


def _layer_json(layer: LayerSpec, layers: int, vocab_size: int) -> dict[str, Any]:
    """A Llama configuration of a drafter's layers."""
    return {
        "model_type": "llama", "hidden_size": layer.hidden_size, "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layers, "num_attention_heads": layer.num_qo_heads,
        "num_key_value_heads": layer.num_kv_heads, "head_dim": layer.head_dim, "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps, "attention_bias": layer.attention_bias, "mlp_bias": layer.mlp_bias,
        "rope_parameters": dict(layer.rope), "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": vocab_size,
    }  # fmt: skip
