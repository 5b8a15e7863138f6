"""Sizes of published drafters for plans, from their configurations and numbers of elements, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specmemo_kernels.drafting.published_config import (
    CloverConfig,
    DFlashConfig,
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    LayerSpec,
)
from specmemo_kernels.drafting.published_tensors import tensor_shapes
from specmemo_kernels.ops.weight_codes import packed_bytes
from specmemo_kernels.planning.feature_drafter_spec import BEAM, DEPTH, DrafterPart, FeatureDrafterSpec

#: Candidates per depth of DFlash. Expanding a node costs nothing there, so the beam may be as wide as a tree.
BLOCK_BEAM = 64
#: Launches of a decoder layer, and of its keys and values alone. As all launches here, counted by a dispatch mode.
_LAYER_OPERATORS, _KEY_OPERATORS = 30, 12


def drafter_spec(
    config: DrafterConfig, elements: Mapping[str, int], vocab_size: int, head_bits: int | None = None
) -> FeatureDrafterSpec:
    """The sizes of a drafter.

    Args:
        config: of a published drafter (:mod:`specmemo_kernels.drafting.published`).
        elements: the tensors' numbers of elements, by internal key.
        vocab_size: of the target.
        head_bits: 4 for matrices in 4-bit codes, ``None`` for the model's dtype.
    """
    if isinstance(config, CloverConfig):
        spec = _clover(config, elements, vocab_size)
    elif isinstance(config, DFlashConfig):
        spec = _dflash(config, elements, vocab_size)
    else:
        spec = _eagle3(config, elements) if isinstance(config, Eagle3Config) else _eagle(config, elements)
    return replace(spec, head_bits=head_bits)


def _eagle3(config: Eagle3Config, elements: Mapping[str, int]) -> FeatureDrafterSpec:
    layer, layers, hidden = config.layer, config.num_layers, config.layer.hidden_size
    stack, behind, fc = _count(elements, "layers."), _behind_attention(elements, layers), _count(elements, "fc.")
    features, vocab_rows = config.num_aux * config.target_hidden_size, 0
    if config.own_lm_head or config.own_embedding:
        vocab_rows = config.draft_vocab_size if config.own_lm_head else config.vocab_size
    # A row holds fc's normed input; then fc's output, the embedding, and the attention's input of twice the width.
    normed = features if config.norm_before_fc else 2 * features if config.fc_norm else 0
    inputs = (4 + config.norm_before_residual) * hidden
    embeds = not config.own_embedding
    return FeatureDrafterSpec(
        "EAGLE-3", DEPTH, min(BEAM, config.draft_vocab_size), **_sizes(config, elements), vocab_rows=vocab_rows,
        features=config.num_aux, held=len(set(config.aux_layer_ids or range(config.num_aux))),
        advance=DrafterPart(
            stack - behind + fc, 7 * layers - 3, 20 + layers * _LAYER_OPERATORS,
            activations=max(normed + hidden, 6 * hidden + 2 * layer.head_dim, inputs + _layer_row(layer, layers > 1)),
            attends=True, embeds=embeds,
        ),
        state=DrafterPart(behind, 4),
        draft=DrafterPart(
            stack, 7 * layers, 22 + layers * _LAYER_OPERATORS,
            activations=hidden + inputs + _layer_row(layer, True), inputs=hidden + inputs + _attended_row(layer),
            attends=True, embeds=embeds,
        ),
    )  # fmt: skip


def _eagle(config: EagleConfig, elements: Mapping[str, int]) -> FeatureDrafterSpec:
    layer, layers, hidden = config.layer, config.num_layers, config.layer.hidden_size
    stack, behind, fc = _count(elements, "layers."), _behind_attention(elements, layers), _count(elements, "fc.")
    # A row holds the embedding and fc's output; in a second layer, a normed input as well.
    inputs = (2 + (layers > 1)) * hidden
    rows = 2 * hidden + _layer_row(layer, layers > 1), inputs + _layer_row(layer, layers > 2)
    embeds = not config.own_embedding
    return FeatureDrafterSpec(
        "EAGLE", DEPTH, min(BEAM, config.vocab_size), **_sizes(config, elements), features=1, held=0,
        advance=DrafterPart(
            stack - behind + fc, 7 * layers - 3, 20 + layers * _LAYER_OPERATORS,
            activations=max(4 * hidden + 2 * layer.head_dim, *rows), attends=True, embeds=embeds,
        ),
        state=DrafterPart(behind, 4),
        draft=DrafterPart(
            stack + fc, 7 * layers + 1, 17 + layers * _LAYER_OPERATORS,
            activations=2 * hidden + inputs + _layer_row(layer, True),
            inputs=2 * hidden + inputs + _attended_row(layer), attends=True, embeds=embeds,
        ),
    )  # fmt: skip


def _clover(config: CloverConfig, elements: Mapping[str, int], vocab_size: int) -> FeatureDrafterSpec:
    layers, hidden = config.num_layers, config.layer.hidden_size
    stack, behind = _count(elements, "layers."), _behind_attention(elements, layers)
    first, others = _count(elements, "clover_head_mlp."), _count(elements, "clover_head_mlp2.", "clover_head_mlp_rnn2.")
    regressive = _count(elements, "clover_head_mlp_rnn.")
    return FeatureDrafterSpec(
        "Clover-2", config.num_heads, min(BEAM, vocab_size), **_sizes(config, elements), features=1, held=0,
        advance=DrafterPart(
            regressive + stack - behind, 7 * layers - 1, 40 + layers * _LAYER_OPERATORS,
            # A regressive block: the embedding, q, k and v, and three vectors in the cosine.
            activations=max(7 * hidden, 2 * hidden + _layer_row(config.layer, layers > 1)), attends=True,
        ),
        state=DrafterPart(behind + first, 5),
        draft=DrafterPart(others, 4, 30, activations=9 * hidden),
    )  # fmt: skip


def _dflash(config: DFlashConfig, elements: Mapping[str, int], vocab_size: int) -> FeatureDrafterSpec:
    layer, layers, hidden, ids = config.layer, config.num_layers, config.layer.hidden_size, config.target_layer_ids
    projections = [f"layers.{i}.self_attn.{name}_proj." for i in range(layers) for name in "kv"]
    keys = 6 * layer.num_kv_heads * layer.head_dim + 2 * layer.head_dim
    return FeatureDrafterSpec(
        "DFlash", config.block_size - 1, min(BLOCK_BEAM, vocab_size), **_sizes(config, elements),
        features=len(ids), held=len(set(ids)),
        advance=DrafterPart(
            _count(elements, "fc.", *projections), 1 + 2 * layers, 18 + layers * _KEY_OPERATORS,
            activations=hidden + max(hidden, keys),
        ),
        state=DrafterPart(),
        draft=DrafterPart(
            _count(elements, "layers."), 7 * layers, 30 + layers * _LAYER_OPERATORS,
            activations=2 * hidden + _layer_row(layer, True), attends=True, embeds=True,
        ),
        block_rows=config.block_size,
    )  # fmt: skip


def _sizes(config: DrafterConfig, elements: Mapping[str, int]) -> dict[str, Any]:
    """The fields that all kinds have from the same sources."""
    layer, indices = config.layer, elements.get("d2t", 0)
    shapes = [shape for key, shape in tensor_shapes(config).items() if key in elements and len(shape) == 2]
    return {
        "matrix_elements": sum(rows * columns for rows, columns in shapes),
        "packed_bytes": sum(packed_bytes(*shape) for shape in shapes),
        "elements": sum(elements.values()) - indices, "indices": indices, "hidden_size": layer.hidden_size,
        "num_layers": config.num_layers, "num_qo_heads": layer.num_qo_heads, "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
    }  # fmt: skip


def _count(elements: Mapping[str, int], *prefixes: str) -> int:
    """Elements of all tensors whose keys begin with one of ``prefixes``."""
    return sum(count for key, count in elements.items() if key.startswith(prefixes))


def _behind_attention(elements: Mapping[str, int], layers: int) -> int:
    """Elements of the last layer that only rows whose states are needed pass through."""
    last = f"layers.{layers - 1}."
    return _count(elements, f"{last}self_attn.o_proj.", f"{last}mlp.", f"{last}post_attention_layernorm.")


def _attended_row(layer: LayerSpec) -> int:
    """Elements that a row holds behind a layer's attention: the rotation, q, k, v and the result."""
    return 2 * layer.head_dim * (1 + layer.num_qo_heads + layer.num_kv_heads)


def _layer_row(layer: LayerSpec, whole: bool) -> int:
    """Most elements that a row holds in a layer, besides its inputs. ``whole``: it also passes through the MLP.

    Rotating q or k: itself (normed as well), two products, joined halves. MLP: sum and norm, then gate and up, or its
    result.
    """
    q, k, norm = layer.num_qo_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, int(layer.qk_norm)
    attended = _attended_row(layer)
    rotated = 2 * layer.head_dim + max((4 + norm) * q, q + (5 + norm) * k)
    mlp = 2 * layer.hidden_size + max(layer.hidden_size, 2 * layer.intermediate_size)
    return max(rotated, attended + mlp if whole else attended)
