"""Models of published shapes with random weights, for memory and time without a download."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specmemo_kernels import MedusaHeads

_7B: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
#: Llama shapes by name; the last three as published (lmsys/vicuna-7b-v1.3,
#: meta-llama/Llama-3.1-8B, meta-llama/Llama-2-70b-chat-hf).
SHAPES: dict[str, dict[str, Any]] = {
    "125m": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "1b": {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "vicuna-7b": _7B | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "llama-3.1-8b": _7B
    | {
        "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "llama-2-70b": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def random_model(sizes: dict[str, Any], dtype: torch.dtype, device: str, seed: int = 0) -> Any:
    """A Llama of these sizes without an end-of-text token."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def random_heads(model: Any, num_heads: int, own_lm_head: bool, seed: int = 0) -> MedusaHeads:
    """Medusa heads with one residual block each, in the model's dtype and on its device."""
    weight = model.get_output_embeddings().weight
    torch.manual_seed(seed)
    with torch.device(weight.device):
        heads = MedusaHeads(weight.shape[1], weight.shape[0], num_heads, own_lm_head=own_lm_head).to(weight.dtype)
        for parameter in heads.parameters():
            parameter.data.normal_(std=0.02)
    return heads.eval()


def twin(model: Any) -> Any:
    """A copy of the model that shares its weights; patching the copy doesn't affect the model."""
    weights = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
