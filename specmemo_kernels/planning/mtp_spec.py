"""Sizes of a model's multi-token prediction (MTP) layer, from its configuration."""

from __future__ import annotations

from specmemo_kernels.planning.cost import OPERATORS_BESIDE, OPERATORS_PER_LAYER
from specmemo_kernels.planning.feature_drafter_spec import BEAM, DEPTH, DrafterPart, FeatureDrafterSpec
from specmemo_kernels.planning.model_spec import ModelSpec


def mtp_spec(spec: ModelSpec) -> FeatureDrafterSpec:
    """The sizes of the first MTP layer: a projection of two states, one layer of the model, three norms.

    Its attention is the mean layer's. It is a mixture where the model has mixtures. These sizes aren't quantised.

    Raises:
        ValueError: the model has no MTP layer.
    """
    if not spec.mtp_layers:
        raise ValueError(f"{spec.name} has no MTP layers (num_nextn_predict_layers); use another drafter")
    hidden, layers = spec.hidden_size, spec.num_layers
    used = spec.attention_weights // layers + 2 * hidden**2
    if spec.moe_layers:
        dense = spec.dense_layers * 3 * hidden * spec.intermediate_size
        used += (spec.feed_forward_weights - dense) // spec.moe_layers
        experts = spec.experts_weights // spec.moe_layers
        whole, used = used + experts, used + experts * spec.experts_per_token // spec.num_experts
        width, tensors = spec.experts_per_token * spec.expert_size + spec.shared_size, spec.expert_tensors
    else:
        used += spec.feed_forward_weights // layers
        whole, width, tensors = used, spec.intermediate_size, spec.ffn_tensors
    queries = spec.num_qo_heads * spec.head_dim
    layer = DrafterPart(
        used, 5 + 3 * (1 + spec.experts_per_token), OPERATORS_PER_LAYER + OPERATORS_BESIDE,
        activations=8 * hidden + max(tensors * width, 4 * queries), inputs=8 * hidden, attends=True, embeds=True,
    )  # fmt: skip
    return FeatureDrafterSpec(
        "MTP", DEPTH, min(BEAM, spec.vocab_size), whole + spec.vector_weights // layers + 3 * hidden,
        indices=0, hidden_size=hidden, num_layers=1, num_qo_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads,
        head_dim=-(-(spec.head_dim + spec.v_head_dim) // 2), features=1, held=0, advance=layer, state=DrafterPart(),
        draft=layer,
    )  # fmt: skip
