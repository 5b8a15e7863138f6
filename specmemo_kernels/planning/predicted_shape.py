"""The memory of a model that isn't loaded, derived from its configuration."""

from __future__ import annotations

import math

import torch

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.planning.drafter_spec import DrafterSpec
from specmemo_kernels.planning.feature_drafter_spec import FeatureDrafterSpec
from specmemo_kernels.planning.footprint import KEPT_STATES, GenerationShape, draw_bytes
from specmemo_kernels.planning.model_spec import ModelSpec, ranks_share
from specmemo_kernels.planning.pass_bytes import PassBytes


def weight_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """The model's weights on one of ``tp`` ranks, by transformers' tensor parallel plan for Llama.

    Layers and the rows of embedding and lm_head are sharded; vectors are replicated, and so are KV heads where there
    are more ranks. (transformers up to 5.17 replicates the embedding.)
    """
    share = math.ceil(spec.layer_bytes() * (spec.layer_weights_of_rank(tp) / spec.layer_weights))
    return math.ceil(spec.vocab_bytes(tp)) + spec.replicated_bytes + share


def page_token_bytes(spec: ModelSpec, kv_dtype: str | None = None, tp: int = 1) -> int:
    """Bytes of a token in the pages of all layers, on one of ``tp`` ranks.

    Raises:
        ValueError: ``kv_dtype`` is not ``None``, ``"int8"`` or ``"fp8"``.
    """
    heads, dtype = spec.kv_heads_of_rank(tp), getattr(torch, spec.dtype)
    layer = LayerKV(heads, spec.head_dim, spec.v_head_dim, dtype, torch.device("meta"))
    return spec.attention_layers * layer.page_bytes_per_token(kv_dtype)


def pass_row_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """Peak bytes per row of a forward pass, up to the lm_head.

    H is the hidden size, Q, K and V the widths of queries, keys and values, I of the feed-forward layer, D the head
    size, s the bytes per element. transformers' Llama has these maxima, all with the embeddings and the layer's input:

    - norm, in float32: ``3 H s + 2 * 4 H``;
    - rotating queries: ``3 H s + (Q + K + V + 3 Q) s`` (q cos, rotated q, its product with sin);
    - rotating keys: ``3 H s + (Q + K + V + Q + 3 K) s`` (rotated queries included);
    - feed-forward: ``4 H s + 3 I s`` (gate, up, their product; 2 I without a gate, 4 I with a fused gate and up);
    - mixture of experts, k per token: ``4 H s + k (2 H + 4 I) s`` (grouped products; 9 I in gpt-oss);

    plus cos and sin, ``2 D s``. Norms and rotary embeddings of other families differ by some per cent (stablelm: an
    eighth); a loaded model is measured instead. With ``tp`` ranks, Q, K, V and I are sharded.
    """
    size, hidden = spec.dtype_bytes, spec.hidden_size
    q = -(-spec.num_qo_heads * spec.head_dim // tp)
    k, v = (spec.kv_heads_of_rank(tp) * dim for dim in (spec.head_dim, spec.v_head_dim))
    moments = [3 * hidden * size + 8 * hidden, (3 * hidden + q + k + v + max(3 * q, q + 3 * k)) * size]
    if spec.dense_layers:
        moments.append((4 * hidden + spec.ffn_tensors * -(-spec.intermediate_size // tp)) * size)
    if spec.moe_layers:
        grouped = spec.experts_per_token * (2 * hidden + spec.expert_tensors * -(-spec.expert_size // tp))
        moments.append((4 * hidden + grouped + 3 * -(-spec.shared_size // tp)) * size)
    return max(moments) + 2 * spec.head_dim * size


def check_ranks(spec: ModelSpec, tp: int) -> None:
    """Raise ``ValueError`` unless ``tp`` ranks can share the model's heads."""
    if not ranks_share(spec.num_qo_heads, spec.num_kv_heads, tp):
        raise ValueError(
            f"{spec.name} has {spec.num_qo_heads} query heads and {spec.num_kv_heads} KV heads; tp is {tp}, it must "
            f"divide {spec.num_qo_heads}, and divide {spec.num_kv_heads} or be a multiple of it"
        )


def predicted_shape(
    spec: ModelSpec,
    heads: DrafterSpec,
    depth: int,
    *,
    nodes: int = 1,
    tp: int = 1,
    workspace_bytes: int = 0,
    kv_dtype: str | None = None,
    page_objects: bool = False,
) -> GenerationShape:
    """The shape from a configuration, instead of measurements: one rank of ``tp``, drafting ``depth`` tokens ahead.

    Args:
        nodes: of a tree, root included.
        workspace_bytes: constant memory of the backend.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes, ``None`` for the model's dtype.
        page_objects: count the objects of pages, as on a CPU.

    Raises:
        ValueError: ``tp`` ranks can't share the heads.
    """
    check_ranks(spec, tp)
    target_row, hidden_size = pass_row_bytes(spec, tp), spec.hidden_size
    if depth:
        hidden_size = max(hidden_size, heads.hidden_size)
    mixers, unpacked = spec.mixers, -(-spec.unpacked_matrix_bytes // tp)
    forward = PassBytes(unpacked, heads.row_bytes(spec, target_row) if depth else target_row)
    of_trees, beside = PassBytes(), PassBytes()
    if mixers is not None:
        beside = PassBytes(unpacked, 4 * spec.hidden_size * spec.dtype_bytes)
        forward = forward.elementwise_max(mixers.chunk)
        of_trees = PassBytes(0, _most_paths(heads, nodes, depth) * mixers.path.at(depth + 1))
    return GenerationShape(
        kv_bytes_per_token=page_token_bytes(spec, kv_dtype, tp)
        + (heads.page_token_bytes(spec, kv_dtype) if depth else 0),
        scratch_bytes_per_node=page_token_bytes(spec, None, tp) + (0 if mixers is None else mixers.row_bytes),
        mixer_state_bytes=0 if mixers is None else mixers.state_bytes,
        mixers=of_trees,
        beside_mixers=beside,
        head_bytes=heads.nbytes(spec, depth, tp),
        forward=forward,
        draw=draw_bytes(spec.vocab_size, spec.dtype_bytes, tp),
        draft=PassBytes(0, heads.sequence_bytes(spec, depth, nodes) if depth else 0),
        state_bytes=KEPT_STATES * hidden_size * spec.dtype_bytes,
        workspace_bytes=workspace_bytes,
        page_objects=page_objects,
    )


def _most_paths(heads: DrafterSpec, nodes: int, depth: int) -> int:
    """Paths from the root to a leaf: any number in dynamic trees, at most one per two nodes in the best static ones."""
    return max(1, nodes - 1 if isinstance(heads, FeatureDrafterSpec) else min(nodes // 2, nodes - depth))
