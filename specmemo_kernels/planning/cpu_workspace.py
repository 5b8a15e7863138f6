"""Buffers of the CPU's operators for a model that isn't loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specmemo_kernels import ops
from specmemo_kernels.cache.kv_storage import LayerKV, page_dtype
from specmemo_kernels.planning.drafter_spec import DrafterSpec
from specmemo_kernels.planning.feature_drafter_spec import FeatureDrafterSpec
from specmemo_kernels.planning.model_spec import ModelSpec


def cpu_workspace(spec: ModelSpec, heads: DrafterSpec, kv_dtype: str | None, tp: int = 1) -> int:
    """Bytes that the operators keep, at most, on one of ``tp`` ranks with as many threads as this process.

    A loaded model may need less: its norms and layers may not be modules that operators compute.
    """
    dtype = getattr(torch, spec.dtype)
    layer = LayerKV(spec.kv_heads_of_rank(tp), spec.head_dim, spec.v_head_dim, dtype, torch.device("cpu"))
    attention = ops.fixed_workspace("cpu", layer, max(1, spec.num_qo_heads // tp), page_dtype(kv_dtype))
    return attention + max(ops.linear_workspace("cpu", dtype, *product) for product in _products(spec, heads))


def _products(spec: ModelSpec, heads: DrafterSpec) -> Iterator[tuple[int, int]]:
    """Inputs of the products of a pass, each with the activations of a gated MLP, or 0."""
    yield spec.hidden_size, 0
    yield spec.num_qo_heads * spec.v_head_dim, 0
    if spec.mixers is not None:
        yield spec.mixers.inputs, 0
    dense = spec.intermediate_size if spec.dense_layers else 0
    for width in (dense, spec.shared_size):
        yield (spec.hidden_size, width) if spec.gated and width else (max(width, spec.hidden_size), 0)
    yield max(spec.expert_size, spec.hidden_size), 0
    if isinstance(heads, FeatureDrafterSpec):
        yield max(heads.features * spec.hidden_size, 2 * heads.hidden_size), 0
