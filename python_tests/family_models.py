"""A small random model of every causal language model type in transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 61
WINDOW = 8
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

#: Values of settings that most configs share, under all the names that they have.
_SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim_model": 32, "emb_dim": 32, "embedding_size": 32,
    "embedding_dim": 32, "word_embed_proj_dim": 32, "input_embedding_size": 32, "output_embedding_size": 32,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "swa_num_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "swa_num_key_value_heads": 2,
    "head_dim": 8, "swa_head_dim": 8, "dim_head": 8, "d_head": 8, "kv_channels": 8, "attention_head_size": 8,
    "rotary_dim": 8, "global_head_dim": 8,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "n_inner": 48,
    "ffn_hidden_size": 48, "dff": 48, "dim_ff": 48, "d_inner": 48, "dense_intermediate_size": 48,
    "shared_intermediate_size": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16, "expert_ffn_hidden_size": 16, "intermediate_size_mlp": 48,
    "moe_shared_expert_intermediate_size": 16, "feed_forward_size": 48,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "num_shared_experts": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_expert_group": 2, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "zero_expert_num": 1, "moe_layer_end_index": 1,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "o_groups": 2, "o_lora_rank": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 2, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4,
    "mamba_d_ssm": 64, "mamba_chunk_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_headdim": 16,
    "n_mamba_heads": 4, "mamba_dt_rank": 4,
    "time_step_rank": 4, "state_size": 8, "ssm_state_size": 8, "chunk_size": 4, "lru_width": 32,
    "attention_hidden_size": 32, "attention_head_dim": 8, "n_groups": 1, "mamba_n_groups": 1,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "local_attention": WINDOW, "max_window_layers": 1, "use_sliding_window": True,
    "query_pre_attn_scalar": 8, "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "max_source_positions": 64, "max_target_positions": 256, "context_length": 256, "model_max_length": 256,
    "original_max_position_embeddings": 256,
    "vocab_size": VOCAB, "decoder_vocab_size": VOCAB, "unpadded_vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 0,
    "image_size": 16, "patch_size": 8, "num_mel_bins": 8, "router_hidden_size": 16, "adapter_rank": 4,
    "pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 16, "shape_embed_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "tie_word_embeddings": False, "initializer_range": 0.4, "init_std": 0.4, "chunk_size_feed_forward": 0,
    "keep_window_size": 4, "prompt_length": 4,
}  # fmt: skip

_DECODER = {"is_decoder": True}
_GLOBAL = {"per_layer_config": ..., "global_head_dim": 8}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
#: Additions and changes for single types; ``...`` leaves a setting at its default.
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl""".split(),  # noqa: SIM905
        _DECODER,
    ),
    "xmod": _DECODER | {"default_language": "en_XX"},
    "reformer": _DECODER | {"axial_pos_shape": [8, 32], "axial_pos_embds_dim": [8, 24]},
    "xlm": {"causal": True},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma4": {"text_config": _GLOBAL},
    "gemma4_text": _GLOBAL,
    "gemma4_unified": {"text_config": _GLOBAL},
    "gemma4_unified_text": _GLOBAL,
    "moshi": {"sliding_window": 256},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "zaya": {"num_experts_per_tok": 1},
}


def small_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of ``config``, parts included, that make it small."""
    own = config.to_dict()
    settings = {name: value for name, value in _SMALL.items() if name in own}
    settings |= _layers(own)
    if "kv_lora_rank" in own:  # all heads share one compressed key
        settings["num_key_value_heads"] = 4
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            settings[name] = small_settings(part) | {"model_type": part.model_type}
    return settings


#: Settings with a kind for every layer.
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")


def _layers(own: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind in the default config, at least two."""
    kinds = {name: list(dict.fromkeys(own[name])) for name in _KINDS if own.get(name)}
    count = max((2, *map(len, kinds.values())))
    lists = {name: (found * count)[:count] for name, found in kinds.items()}
    return lists | ({"num_hidden_layers": count} if "num_hidden_layers" in own else {})


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``settings`` updated with ``changes``, nested dicts included; ``...`` removes a setting."""
    result = dict(settings)
    for name, value in changes.items():
        if value is ...:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def small_config(name: str) -> PreTrainedConfig:
    """The default config of a model type, shrunk.

    Raises:
        Exception: whatever transformers raises where it can't be built.
    """
    kind = CONFIG_MAPPING[name]
    return kind(**merged(small_settings(kind()), _SPECIAL.get(name, {})))


def family_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model of this type whose output is diverse.

    Raises:
        Exception: whatever transformers raises where it can't be built.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(name), dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases, norms and sinks start at constants; move them so that they count
            parameter.data += 0.1 * torch.randn_like(parameter)
        if not parameter.isfinite().all():  # transformers left it uninitialised
            parameter.data.normal_(std=0.1)
    model.generation_config.eos_token_id = None
    return model.eval()
