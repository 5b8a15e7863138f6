"""Names and shapes of a decoder's matrices, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Families whose matrices are fused: queries, keys and values; gate and up.
_FUSED_QKV, _FUSED_GATE = {"phi3"}, {"phi3", "glm", "glm4"}


@dataclass(frozen=True)
class Matrix:
    """A matrix, or ``count`` matrices of equal shape (experts), with the name that transformers' Llama would give it.

    Attributes:
        part: ``"attention"``, ``"feed_forward"`` (shared experts and routers included), ``"experts"``, ``"lm_head"``
            or ``"embedding"``.
        rows, columns: output and input features.
        linear: whether transformers 5 has an ``nn.Linear`` for it; experts and routers are plain parameters.
    """

    name: str
    part: str
    rows: int
    columns: int
    count: int = 1
    linear: bool = True

    @property
    def elements(self) -> int:
        """Of all ``count`` matrices."""
        return self.rows * self.columns * self.count


def decoder_matrices(text: Mapping[str, Any], sizes: Mapping[str, Any]) -> tuple[Matrix, ...]:
    """All matrices of a decoder, in the order of its layers.

    Expert 0 stands for all experts of its layer. Matrices of recurrent layers aren't listed.

    Args:
        text: a text configuration.
        sizes: the result of :func:`specmemo_kernels.planning.model_config.read_sizes` for it.
    """
    vocabulary = sizes["vocab_size"], sizes["hidden_size"]
    matrices = [Matrix("model.embed_tokens", "embedding", *vocabulary, linear=False)]
    dense = _dense_layers(text, sizes)
    for layer in range(sizes["num_layers"]):
        prefix = f"model.layers.{layer}"
        matrices += _attention(text, sizes, f"{prefix}.self_attn")
        matrices += _feed_forward(text, sizes, f"{prefix}.mlp", layer in dense)
    return *matrices, Matrix("lm_head", "lm_head", *vocabulary)


def _dense_layers(text: Mapping[str, Any], sizes: Mapping[str, Any]) -> set[int]:
    """Layers without experts."""
    if not sizes["num_experts"]:
        return set(range(sizes["num_layers"]))
    return set(range(int(text.get("first_k_dense_replace") or 0))) | set(text.get("mlp_only_layers") or ())


def _attention(text: Mapping[str, Any], sizes: Mapping[str, Any], name: str) -> Iterator[Matrix]:
    hidden, heads, dim, value = (sizes[key] for key in ("hidden_size", "num_qo_heads", "head_dim", "v_head_dim"))
    if text.get("kv_lora_rank"):
        latent, rope, query = (int(text.get(key) or 0) for key in ("kv_lora_rank", "qk_rope_head_dim", "q_lora_rank"))
        if query:
            yield Matrix(f"{name}.q_a_proj", "attention", query, hidden)
        yield Matrix(f"{name}.q_b_proj" if query else f"{name}.q_proj", "attention", heads * dim, query or hidden)
        yield Matrix(f"{name}.kv_a_proj_with_mqa", "attention", latent + rope, hidden)
        yield Matrix(f"{name}.kv_b_proj", "attention", heads * (dim - rope + value), latent)
        yield Matrix(f"{name}.o_proj", "attention", hidden, heads * value)
        return
    keys = sizes["num_kv_heads"]
    rows = {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * value}
    if text.get("model_type") in _FUSED_QKV:
        rows = {"qkv_proj": sum(rows.values())}
    for kind, count in rows.items():
        yield Matrix(f"{name}.{kind}", "attention", count, hidden)
    yield Matrix(f"{name}.o_proj", "attention", hidden, heads * value)


def _feed_forward(text: Mapping[str, Any], sizes: Mapping[str, Any], name: str, dense: bool) -> Iterator[Matrix]:
    hidden = sizes["hidden_size"]
    fused, gated = text.get("model_type") in _FUSED_GATE, sizes["gated"]

    def mlp(name: str, part: str, width: int, count: int = 1, linear: bool = True) -> Iterator[Matrix]:
        if gated and not fused:
            yield Matrix(f"{name}.gate_proj", part, width, hidden, count, linear)
        kind, rows = ("gate_up_proj", 2 * width) if gated and fused else ("up_proj", width)
        yield Matrix(f"{name}.{kind}", part, rows, hidden, count, linear)
        yield Matrix(f"{name}.down_proj", part, hidden, width, count, linear)

    if dense:
        yield from mlp(name, "feed_forward", sizes["intermediate_size"])
        return
    yield Matrix(f"{name}.gate", "feed_forward", sizes["num_experts"], hidden, linear=False)
    yield from mlp(f"{name}.experts.0", "experts", sizes["expert_size"], sizes["num_experts"], linear=False)
    if sizes["shared_size"]:
        shared = "shared_experts" if text.get("n_shared_experts") else "shared_expert"
        yield from mlp(f"{name}.{shared}", "feed_forward", sizes["shared_size"])
