"""Reads sizes from transformers configurations, whose field names depend on the family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Maximum of bytes read from a configuration; typical ones have up to 100 KB.
_LONGEST_CONFIG = 16 << 20
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def read_sizes(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a ``ModelSpec``, quantisation excepted, from a text configuration.

    Raises:
        ValueError: a missing size or an unknown dtype; the message has the field and ``name``.
    """

    def need(*keys: str) -> int:
        value = next((text[key] for key in keys if text.get(key) is not None), None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"the configuration of {name} has {keys[0]}={value!r}, a size of at least 1 is needed")
        return value

    def get(*keys: str) -> int:
        return _size_or_0(text, name, *keys)

    hidden, layers = need("hidden_size", "n_embd"), need("num_hidden_layers", "n_layer")
    heads = need("num_attention_heads", "n_head")
    experts = get("num_local_experts", "num_experts", "n_routed_experts")
    width = get("intermediate_size", "n_inner") or 4 * hidden
    expert_size = (get("moe_intermediate_size") or width) if experts else 0
    shared = get("shared_expert_intermediate_size") or get("n_shared_experts") * expert_size
    dense = get("first_k_dense_replace") + len(text.get("mlp_only_layers") or ()) if experts else layers
    attention = _attention(text, name, hidden, heads)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the configuration of {name} has dtype={dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return attention | {
        "name": name, "hidden_size": hidden, "num_layers": layers, "vocab_size": need("vocab_size"),
        "num_qo_heads": heads, "intermediate_size": width, "dense_layers": min(layers, dense),
        "gated": text.get("model_type") not in _UNGATED, "num_experts": experts,
        "experts_per_token": get("num_experts_per_tok") if experts else 0, "expert_size": expert_size,
        "shared_size": shared if experts else 0,
        "ffn_tensors": _ffn_tensors(str(text.get("model_type"))),
        "expert_tensors": 9 if text.get("model_type") == "gpt_oss" else 4,
        "norm_weights": hidden * (4 if text.get("model_type") in _FOUR_NORMS else 2)
        + (2 * attention["head_dim"] if text.get("model_type") in _HEAD_NORMS else 0),
        "tied": bool(text.get("tie_word_embeddings", text.get("model_type") in _TIED)), "dtype": dtype,
        "max_context": get("max_position_embeddings", "n_positions") or 1 << 20,
        "mtp_layers": _size_or_0(text, name, "num_nextn_predict_layers", "num_mtp_layers"),
        "recurrent": _is_recurrent(text),
    }  # fmt: skip


#: Kinds of layers (transformers' ``layer_types``) that have a state per sequence.
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
#: First part of settings that only models with such layers have, where a configuration doesn't list its layers.
_RECURRENT_SETTINGS = ("mamba_", "linear_", "conv_L_cache", "ssm_", "attn_type_list", "time_mix", "lru_width")


def _is_recurrent(text: Mapping[str, Any]) -> bool:
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        return bool(RECURRENT_KINDS & set(kinds))
    return any(key.startswith(_RECURRENT_SETTINGS) and value for key, value in text.items())


#: Families with differences from Llama that aren't in a config.json.
_UNGATED = {"gpt2", "gpt_neox", "phi", "opt", "starcoder2", "nemotron"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
_FUSED = {"phi3", "glm", "glm4"}
#: Families with norms of queries and keys, one per head size.
_HEAD_NORMS = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text"}
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2"}


def _ffn_tensors(family: str) -> int:
    """Live tensors of a dense layer: two; three with a gate (gate, up, product); four with a fused matrix.

    Experts have four as well; gpt-oss's have nine: the fused pair, both clamped, three for the gate, up plus one, the
    product.
    """
    return 2 if family in _UNGATED else 4 if family in _FUSED else 3


def _size_or_0(text: Mapping[str, Any], name: str, *keys: str) -> int:
    """The first of these fields that is set, else 0.

    Raises:
        ValueError: not a number of at least 0.
    """
    key = next((key for key in keys if text.get(key) is not None), keys[0])
    value = text.get(key) or 0
    if not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        raise ValueError(f"the configuration of {name} has {key}={value!r}, expected a number of at least 0")
    return int(value)


def _attention(text: Mapping[str, Any], name: str, hidden: int, heads: int) -> dict[str, int]:
    """Heads, dimensions and matrix elements of one layer's attention, grouped queries or latent (DeepSeek)."""
    if text.get("kv_lora_rank"):
        rope, plain = int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
        latent, value, dim = int(text["kv_lora_rank"]), int(text["v_head_dim"]), rope + plain
        query = int(text.get("q_lora_rank") or 0)
        into_queries = query * (hidden + heads * dim) if query else hidden * heads * dim
        weights = into_queries + hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
        sizes = {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": value}
        return sizes | {"attention_weights": weights, "bias_weights": 0}
    kv_heads = _size_or_0(text, name, "num_key_value_heads") or heads
    dim = _size_or_0(text, name, "head_dim") or hidden // heads
    biased = bool(text.get("attention_bias") or text.get("use_qkv_bias") or text.get("model_type") == "qwen2")
    return {
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "attention_weights": hidden * dim * (2 * heads + 2 * kv_heads),
        "bias_weights": dim * (heads + 2 * kv_heads) if biased else 0,
    }


def read_json(file: Path) -> Mapping[str, Any]:
    """The object of a ``config.json``.

    Raises:
        ValueError: no JSON, or no object; the message has the file.
    """
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_CONFIG)  # might be a file of weights
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{file} holds a {type(config).__name__}, expected the JSON object of a config.json")
    return config
