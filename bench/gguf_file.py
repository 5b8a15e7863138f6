"""A Llama model as a GGUF file for llama.cpp, without a tokenizer: benches exchange token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

#: GGUF's dtypes of matrices; vectors are float32 in GGUF files.
_TYPES = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}
_FILE_TYPES = {torch.float32: gguf.LlamaFileType.ALL_F32, torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(model: Any, path: Path) -> None:
    """Write a ``LlamaForCausalLM`` with the weights' own dtype.

    Raises:
        ValueError: another architecture, or weights that aren't float32 or bfloat16.
    """
    config = model.config
    if config.model_type != "llama" or model.dtype not in _TYPES:
        raise ValueError(f"{config.model_type} in {model.dtype}: GGUF files are written of llama in {list(_TYPES)}")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(_FILE_TYPES[model.dtype])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    decoder = model.model
    _add(writer, "token_embd", decoder.embed_tokens.weight)
    for i, layer in enumerate(decoder.layers):
        for name, gguf_name in _LAYER.items():
            weight = layer.get_submodule(name).weight
            if name.endswith(("q_proj", "k_proj")):
                weight = _interleaved(weight, config.head_dim)
            _add(writer, f"blk.{i}.{gguf_name}", weight)
    _add(writer, "output_norm", decoder.norm.weight)
    if not config.tie_word_embeddings:
        _add(writer, "output", model.get_output_embeddings().weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows in llama.cpp's order: the two halves of a head, which are rotated together, as neighbours."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    weight = weight.detach().contiguous()
    if weight.ndim == 1:
        writer.add_tensor(f"{name}.weight", weight.float().numpy())
        return
    kind = _TYPES[weight.dtype]
    writer.add_tensor(f"{name}.weight", weight.view(torch.uint8).numpy(), raw_dtype=kind)
