"""Mixtures of experts by our product of groups of rows, instead of transformers' ``grouped_mm``.

The experts modules of transformers that its :func:`use_experts_implementation` decorates have the same attributes:
whether they have a gate, biases and (in later versions) a norm, and in which order their weights lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specmemo_kernels.ops import Kernels

Tensor = torch.Tensor

#: Attributes that the decorator sets.
_FLAGS = ("has_gate", "has_bias", "is_transposed")


def is_mixture(module: nn.Module) -> bool:
    """Whether a module has the attributes and weights that :func:`mixture` reads, and all experts."""
    flags = vars(module)
    if not all(isinstance(flags.get(flag), bool) for flag in _FLAGS) or flags.get("_is_expert_parallel", False):
        return False
    parameters = map(module._parameters.get, weight_names(module))
    return all(parameter is not None and parameter.ndim == 3 for parameter in parameters)


def weight_names(module: Any) -> tuple[str, str]:
    """The parameters of a mixture: into the experts (gate and up, or up), and out of them."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def matrices(module: Any) -> tuple[Tensor, Tensor]:
    """The experts' weights ``[experts, outputs, inputs]``, into the experts and out of them; compressed as stored."""
    inner, outer = (module._parameters[name] for name in weight_names(module))
    return (inner.mT, outer.mT) if module.is_transposed else (inner, outer)


def mixture(module: Any, kernels: Kernels, x: Tensor, experts: Tensor, scores: Tensor, invariant: bool) -> Tensor:
    """The sum of each row's experts, weighted: rounded as by transformers' ``grouped_mm_experts_forward``.

    Args:
        x: ``[N, hidden]``. experts: ``[N, k]``, each row's experts. scores: ``[N, k]``, their weights.

    Returns:
        ``[N, hidden]`` in x's dtype.
    """
    inner, outer = matrices(module)
    inner_bias = outer_bias = None
    if module.has_bias:
        inner_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        outer_bias = module.down_proj_bias
    ids, order = experts.reshape(-1).sort()
    ends = torch.searchsorted(ids, torch.arange(len(inner), device=x.device, dtype=ids.dtype), right=True)
    rows = kernels.grouped_linear(x[order // experts.shape[1]], inner, inner_bias, ends, invariant)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = kernels.grouped_linear(rows.to(x.dtype), outer, outer_bias, ends, invariant)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    rows = rows * scores.reshape(-1, 1)[order]
    by_token = torch.empty_like(rows).index_copy_(0, order, rows)
    return by_token.view(*experts.shape, by_token.shape[1]).sum(dim=1).to(x.dtype)
