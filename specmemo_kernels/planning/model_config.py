"""Reads sizes from transformers configurations, whose field names depend on the family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmemo_kernels.arguments import shown

#: Maximum of bytes read from a configuration; typical ones have up to 100 KB.
_LONGEST_CONFIG = 16 << 20
#: Limits of a configuration's numbers, beyond published models: layers (126), experts of a layer (512), sizes.
#: A module is built for each layer, in some models for each expert.
MOST_LAYERS, _MOST_EXPERTS, _LARGEST = 1000, 8192, 1 << 40
_LAYERS = re.compile("layers?$|^depth$|_depth$|_blocks$")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

#: Fields with the number of a layer's experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_sizes(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a ``ModelSpec``, weights and quantisation excepted, from a text configuration.

    Feed-forward layers and mixtures are read as in Llama-like decoders.

    Raises:
        ValueError: a size that is missing, too large or doesn't fit another one, or an unknown dtype; the message has
            the field and ``name``.
    """
    check_counts(text, name)

    def need(*keys: str) -> int:
        value = next((text[key] for key in keys if text.get(key) is not None), None)
        if not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise ValueError(
                f"the configuration of {name} has {keys[0]}={shown(value)}, a size from 1 to {_LARGEST} is needed"
            )
        return value

    def get(*keys: str) -> int:
        return _size_or_0(text, name, *keys)

    hidden, layers = need("hidden_size", "n_embd"), need("num_hidden_layers", "n_layer")
    heads = need("num_attention_heads", "n_head")
    experts, chosen = get(*_EXPERTS), get("num_experts_per_tok")
    if experts and text.get("num_experts_per_tok") is not None and not 1 <= chosen <= experts:
        raise ValueError(
            f"the configuration of {name} has num_experts_per_tok={chosen} and {_set_experts(text)}, a token needs "
            f"from 1 to {experts} experts; correct them"
        )
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
        "num_experts": experts, "experts_per_token": chosen if experts else 0,
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


def check_counts(config: Mapping[str, Any], name: str) -> None:
    """Check the numbers of layers and experts in a configuration and the objects in it, before modules are built.

    Raises:
        ValueError: one is beyond any real model; the message has its key and the limit.
    """
    fields = list(config.items())
    for key, value in fields:
        if isinstance(value, Mapping):
            fields += value.items()
        most = MOST_LAYERS if _LAYERS.search(str(key)) else _MOST_EXPERTS if "experts" in str(key) else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise ValueError(f"the configuration of {name} has {key}={shown(value)}, the limit is {most}; correct it")


def check_experts(text: Mapping[str, Any], name: str, sizes: Mapping[str, Any]) -> None:
    """Check, for weights that are counted by ``sizes`` of :func:`read_sizes`, that it has found what mixtures need.

    Raises:
        ValueError: a setting names experts that it hasn't found, or the number of a token's experts is missing.
    """
    experts = sizes["num_experts"]
    if experts and not sizes["experts_per_token"]:
        raise ValueError(
            f"the configuration of {name} has {_set_experts(text)}, but the number of experts per token is missing; "
            "add num_experts_per_tok"
        )
    for key, value in text.items():
        if not experts and re.search("^(?!.*(shared|_per_)).*experts", key) and isinstance(value, int) and value > 1:
            raise ValueError(
                f"the configuration of {name} has {key}={value}, but the sizes of its experts aren't known; add "
                "num_experts, num_experts_per_tok and moe_intermediate_size to it"
            )


def _set_experts(text: Mapping[str, Any]) -> str:
    """The fields with the number of a layer's experts, for messages; transformers' configurations have several."""
    return " and ".join(f"{key}={text[key]}" for key in _EXPERTS if text.get(key) is not None)


def _size_or_0(text: Mapping[str, Any], name: str, *keys: str) -> int:
    """The first of these fields that is set, else 0; of a list of every layer's size, the largest.

    Raises:
        ValueError: not a number from 0 to the largest size.
    """
    key = next((key for key in keys if text.get(key) is not None), keys[0])
    value = text.get(key) or 0
    if isinstance(value, list | tuple) and len(value) == text.get("num_hidden_layers"):
        value = max(value)
    if not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ValueError(
            f"the configuration of {name} has {key}={shown(value)}, expected a number from 0 to {_LARGEST}"
        )
    return int(value)


def _attention(text: Mapping[str, Any], name: str, hidden: int, heads: int) -> dict[str, int]:
    """Heads and dimensions of attention, with grouped queries or latents (DeepSeek).

    Raises:
        ValueError: a wrong size, or KV heads that query heads can't share evenly.
    """
    if text.get("kv_lora_rank"):
        dim = int(text["qk_rope_head_dim"]) + int(text["qk_nope_head_dim"])
        return {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": int(text["v_head_dim"])}
    kv_heads = _size_or_0(text, name, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"the configuration of {name} has num_key_value_heads={kv_heads}, expected a divisor of "
            f"num_attention_heads={heads}; correct one of both"
        )
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
