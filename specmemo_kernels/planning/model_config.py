"""Reads sizes from transformers configurations, whose field names depend on the family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Maximum of bytes read from a configuration; typical ones have up to 100 KB.
_LONGEST_CONFIG = 16 << 20
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def read_sizes(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a ``ModelSpec``, weights and quantisation excepted, from a text configuration.

    Feed-forward layers and mixtures are read as in Llama-like decoders.

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
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the configuration of {name} has dtype={dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return _attention(text, name, hidden, heads) | {
        "name": name, "hidden_size": hidden, "num_layers": layers, "vocab_size": need("vocab_size"),
        "num_qo_heads": heads, "intermediate_size": width, "dense_layers": min(layers, dense), "gated": True,
        "num_experts": experts, "experts_per_token": get("num_experts_per_tok") if experts else 0,
        "expert_size": expert_size, "shared_size": shared if experts else 0, "ffn_tensors": 3,
        "expert_tensors": 9 if text.get("model_type") == "gpt_oss" else 4, "dtype": dtype,
        "max_context": get("max_position_embeddings", "n_positions") or 1 << 20,
        "mtp_layers": get("num_nextn_predict_layers", "num_mtp_layers"), "recurrent": _is_recurrent(text),
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


def check_experts(text: Mapping[str, Any], name: str, experts: int) -> None:
    """Check that no setting names experts which :func:`read_sizes` hasn't found.

    Raises:
        ValueError: one does.
    """
    for key, value in text.items():
        if not experts and re.search("^(?!.*(shared|_per_)).*experts", key) and isinstance(value, int) and value > 1:
            raise ValueError(
                f"the configuration of {name} has {key}={value}, but the sizes of its experts aren't known; add "
                "num_experts, num_experts_per_tok and moe_intermediate_size to it"
            )


def _size_or_0(text: Mapping[str, Any], name: str, *keys: str) -> int:
    """The first of these fields that is set, else 0; of a list of every layer's size, the largest.

    Raises:
        ValueError: not a number of at least 0.
    """
    key = next((key for key in keys if text.get(key) is not None), keys[0])
    value = text.get(key) or 0
    if isinstance(value, list | tuple) and len(value) == text.get("num_hidden_layers"):
        value = max(value)
    if not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        raise ValueError(f"the configuration of {name} has {key}={value!r}, expected a number of at least 0")
    return int(value)


def _attention(text: Mapping[str, Any], name: str, hidden: int, heads: int) -> dict[str, int]:
    """Heads and dimensions of attention, with grouped queries or latents (DeepSeek)."""
    if text.get("kv_lora_rank"):
        dim = int(text["qk_rope_head_dim"]) + int(text["qk_nope_head_dim"])
        return {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": int(text["v_head_dim"])}
    kv_heads = _size_or_0(text, name, "num_key_value_heads") or heads
    dim = _size_or_0(text, name, "head_dim") or hidden // heads
    return {"num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}


def _float_or_object(fields: dict[str, Any]) -> Any:
    """The infinity or NaN that transformers writes as an object, or the object."""
    return float(str(fields["__float__"])) if list(fields) == ["__float__"] else fields


def read_json(file: Path) -> Mapping[str, Any]:
    """The object of a ``config.json``.

    Raises:
        ValueError: no JSON, or no object; the message has the file.
    """
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_CONFIG)  # might be a file of weights
    try:
        config = json.loads(content, object_hook=_float_or_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{file} holds a {type(config).__name__}, expected the JSON object of a config.json")
    return config
