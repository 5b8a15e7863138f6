"""Names and shapes of a decoder's matrices. :func:`llama_weights` derives those of a Llama-like decoder from sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Parts of a decoder's layers.
LAYER_PARTS = ("attention", "feed_forward", "experts")


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


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a decoder.

    Attributes:
        matrices: of its layers, in their order, the embedding and the lm_head.
        vectors: elements of norms and biases. held: elements that a pass doesn't read, or only rows of: tables of
            positions or per-layer embeddings, vision and audio towers.
        tied: whether the lm_head is the embedding. experts_per_token: 0 without mixtures.
    """

    matrices: tuple[Matrix, ...]
    vectors: int
    tied: bool
    held: int = 0
    experts_per_token: int = 0

    def elements(self, *parts: str) -> int:
        """Of the matrices of these parts."""
        return sum(matrix.elements for matrix in self.matrices if matrix.part in parts)

    def sizes(self) -> dict[str, Any]:
        """The fields of a ``ModelSpec`` that count elements."""
        parts = {f"{part}_weights": self.elements(part) for part in (*LAYER_PARTS, "embedding", "lm_head")}
        return parts | {"vector_weights": self.vectors, "held_weights": self.held, "tied": self.tied}

    def widths(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a ``ModelSpec`` about feed-forward layers and mixtures, which say what a pass computes.

        Args:
            sizes: ``hidden_size``, ``num_layers`` and ``intermediate_size``.
        """
        hidden, layers = sizes["hidden_size"], sizes["num_layers"]
        experts = [matrix for matrix in self.matrices if matrix.part == "experts"]
        others = [matrix for matrix in self.matrices if matrix.part == "feed_forward"]
        shared = {matrix.name for matrix in others if experts and re.search("shared|shexp", matrix.name)}
        dense = _width([matrix for matrix in others if matrix.name not in shared], hidden)
        beside = _width([matrix for matrix in others if matrix.name in shared], hidden)
        each = _width(experts, hidden)
        numbers = (re.search(r"\.(\d+)\.", matrix.name) for matrix in experts)
        mixtures = len({number[1] for number in numbers if number})
        gated = (dense if dense.size else each).gated
        return {
            "intermediate_size": dense.size or sizes["intermediate_size"], "dense_layers": max(0, layers - mixtures),
            "gated": gated, "ffn_tensors": 2 if not gated else 4 if dense.fused else 3,
            "num_experts": max((matrix.count for matrix in experts), default=0),
            "experts_per_token": self.experts_per_token if experts else 0, "expert_size": each.size,
            "shared_size": beside.size,
        }  # fmt: skip


class _Width(NamedTuple):
    """The width of a feed-forward layer, and whether it has a gate, in one matrix with the other one."""

    size: int = 0
    gated: bool = True
    fused: bool = False


def _width(matrices: Sequence[Matrix], hidden: int) -> _Width:
    """Of the widest layer, whose last matrix has ``hidden`` rows."""
    last = max((m for m in matrices if m.rows == hidden), key=lambda m: m.columns, default=None)
    if last is None:
        return _Width()
    layer = [m for m in matrices if m.name.rpartition(".")[0] == last.name.rpartition(".")[0]]
    gated = sum(m.rows * m.columns for m in layer) > 2.5 * hidden * last.columns
    return _Width(last.columns, gated, any(m.rows == 2 * last.columns for m in layer))


def llama_weights(text: Mapping[str, Any], sizes: Mapping[str, Any]) -> DecoderWeights:
    """The weights of a Llama-like decoder. Matrices of recurrent layers aren't included.

    Expert 0 stands for all experts of its layer.

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
    matrices.append(Matrix("lm_head", "lm_head", *vocabulary))
    biases = sizes["head_dim"] * (sizes["num_qo_heads"] + 2 * sizes["num_kv_heads"]) if _biased(text) else 0
    vectors = sizes["num_layers"] * (2 * sizes["hidden_size"] + biases) + sizes["hidden_size"]
    tied = bool(text.get("tie_word_embeddings", text.get("tie_embedding")))
    return DecoderWeights(tuple(matrices), vectors, tied, experts_per_token=sizes["experts_per_token"])


def _biased(text: Mapping[str, Any]) -> bool:
    return bool(text.get("attention_bias") or text.get("use_qkv_bias"))


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
    for kind, count in rows.items():
        yield Matrix(f"{name}.{kind}", "attention", count, hidden)
    yield Matrix(f"{name}.o_proj", "attention", hidden, heads * value)


def _feed_forward(text: Mapping[str, Any], sizes: Mapping[str, Any], name: str, dense: bool) -> Iterator[Matrix]:
    hidden = sizes["hidden_size"]

    def mlp(name: str, part: str, width: int, count: int = 1, linear: bool = True) -> Iterator[Matrix]:
        for kind in ("gate_proj", "up_proj"):
            yield Matrix(f"{name}.{kind}", part, width, hidden, count, linear)
        yield Matrix(f"{name}.down_proj", part, hidden, width, count, linear)

    if dense:
        yield from mlp(name, "feed_forward", sizes["intermediate_size"])
        return
    yield Matrix(f"{name}.gate", "feed_forward", sizes["num_experts"], hidden, linear=False)
    yield from mlp(f"{name}.experts.0", "experts", sizes["expert_size"], sizes["num_experts"], linear=False)
    if sizes["shared_size"]:
        shared = "shared_experts" if text.get("n_shared_experts") else "shared_expert"
        yield from mlp(f"{name}.{shared}", "feed_forward", sizes["shared_size"])
