"""Layers for ``kernelize``: they replace the ``forward`` of a model's own modules, whose attributes they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specmemo_kernels.ops import gated_mlp, rms_norm

#: Activations of :func:`gated_mlp` by their names in configurations.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class LlamaRMSNorm(nn.Module):
    """For ``LlamaRMSNorm`` and its equals in Mistral, Qwen2, Qwen3 and others."""

    has_backward = False
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class GemmaRMSNorm(nn.Module):
    """For ``GemmaRMSNorm``, ``Gemma2RMSNorm`` and ``Gemma3RMSNorm``: the weight is stored minus 1."""

    has_backward = False
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0, round_first=False)


class LlamaMLP(nn.Module):
    """For ``LlamaMLP`` and its equals; runs the module's own layers if one of them isn't a plain ``nn.Linear``."""

    has_backward = False
    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    config: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        activation = _ACTIVATIONS.get(self.config.hidden_act)
        if activation is None or not type(gate) is type(up) is type(down) is nn.Linear:
            result: torch.Tensor = down(self.act_fn(gate(x)) * up(x))
            return result
        return gated_mlp(x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias, activation=activation)
