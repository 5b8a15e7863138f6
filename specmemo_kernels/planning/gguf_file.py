"""A model's sizes from a ``.gguf`` file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from specmemo_kernels.planning.decoder_matrices import DecoderWeights, Matrix
from specmemo_kernels.planning.gguf_header import FLOAT32, GgufHeader, GgufTensor, read_header
from specmemo_kernels.planning.model_config import check_experts, read_sizes
from specmemo_kernels.planning.quantisation_scheme import AT_LOAD
from specmemo_kernels.planning.quantised_weights import QuantisedWeights

#: transformers' names of architectures that have another name in gguf files.
_MODEL_TYPES = {
    "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "phi2": "phi",
    "gptneox": "gpt_neox", "command-r": "cohere",
}  # fmt: skip
#: A configuration's fields by metadata key, without the architecture.
_FIELDS = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
}  # fmt: skip
#: Keys of recurrent layers.
_RECURRENT = (".ssm.", ".wkv.", ".shortconv.", ".time_mix_")


def read_gguf(path: Path) -> dict[str, Any]:
    """The fields of a ``ModelSpec``. Matrices have the file's bytes exactly; the dtype is float32, as in transformers.

    Raises:
        ValueError: not a whole gguf file of a decoder, or one with recurrent layers.
        OSError: the file can't be read.
    """
    header = read_header(path)
    try:
        return _sizes(header, str(path))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} has unusual metadata ({type(error).__name__}: {error}); {_REMEDY}") from error


_REMEDY = "give the model's config.json instead, with --weight-bits"


def _sizes(header: GgufHeader, name: str) -> dict[str, Any]:
    metadata, tensors = header.metadata, {tensor.name: tensor for tensor in header.tensors}
    if int(metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{name} is one of {metadata['split.count']} files; {_REMEDY}")
    architecture = str(metadata.get("general.architecture"))
    if any(part in key for key in metadata for part in _RECURRENT):
        raise ValueError(f"{name} is of architecture {architecture}, which has recurrent layers; {_REMEDY}")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{name} has no token_embd.weight, so it isn't a decoder; {_REMEDY}")
    text: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        if f"{architecture}.{key}" in metadata:
            text[field] = _one(metadata[f"{architecture}.{key}"])
    text |= _latent(metadata, architecture) if "kv_lora_rank" in text else {}
    embedding = tensors["token_embd.weight"]
    tied = "output.weight" not in tensors
    text |= {
        "model_type": _MODEL_TYPES.get(architecture, architecture), "vocab_size": embedding.shape[0],
        "dtype": "float32",
    }  # fmt: skip
    parts = [(part, tensor) for tensor in header.tensors if (part := _part(tensor)) is not None]
    if tied:
        parts.append(("lm_head", embedding))
    stored = [(_matrix(tensor, part), _coded_bytes(tensor)) for part, tensor in parts]
    sizes = read_sizes(text, name)
    check_experts(text, name, sizes)
    weights = DecoderWeights(
        tuple(matrix for matrix, _ in stored),
        vectors=sum(prod(tensor.shape) for tensor in header.tensors if len(tensor.shape) < 2),
        held=sum(prod(tensor.shape) for tensor in header.tensors if len(tensor.shape) > 1 and _part(tensor) is None),
        tied=tied, experts_per_token=sizes["experts_per_token"],
    )  # fmt: skip
    note = "transformers loads a .gguf file in float32 unless from_pretrained gets a dtype (here: --dtype)"
    quantised = QuantisedWeights.of_matrices("gguf", stored, AT_LOAD, (note,))
    return sizes | weights.widths(sizes) | weights.sizes() | {"quantised": quantised}


def _one(value: Any) -> int:
    """A size that may be given per layer.

    Raises:
        ValueError: layers differ.
    """
    values = value if isinstance(value, list) else [value]
    if len(set(values)) != 1:
        raise ValueError(f"layers of different sizes {sorted(set(values))[:4]} aren't supported; {_REMEDY}")
    return int(values[0])


def _latent(metadata: dict[str, Any], architecture: str) -> dict[str, int]:
    """Head sizes of latent attention; newer files have those of keys and values with the suffix ``_mla``."""
    keys = (f"{architecture}.attention.{kind}_length" for kind in ("key", "value"))
    key, value = (int(metadata.get(f"{name}_mla", metadata[name])) for name in keys)
    rope = int(metadata[f"{architecture}.rope.dimension_count"])
    return {"qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}


def _part(tensor: GgufTensor) -> str | None:
    """A matrix's part of a decoder; ``None`` for vectors and tables outside of layers."""
    name = tensor.name
    if len(tensor.shape) < 2 or not name.endswith(".weight"):
        return None
    if name.startswith("blk."):
        return "experts" if "_exps" in name else "feed_forward" if ".ffn_" in name else "attention"
    return {"token_embd.weight": "embedding", "output.weight": "lm_head"}.get(name)


def _matrix(tensor: GgufTensor, part: str) -> Matrix:
    *count, rows, columns = tensor.shape
    return Matrix(tensor.name.removesuffix(".weight"), part, rows, columns, count[0] if count else 1)


def _coded_bytes(tensor: GgufTensor) -> float | None:
    """Stored bytes, ``None`` for float32."""
    return None if tensor.kind == FLOAT32 else float(tensor.nbytes)
