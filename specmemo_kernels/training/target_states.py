"""The hidden states of a frozen model that a drafter learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specmemo_kernels.integrations.hf.features import find_taps
from specmemo_kernels.integrations.hf.mask import UnsupportedModel
from specmemo_kernels.integrations.hf.target import lm_head_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class TargetStates:
    """A forward pass over windows of text.

    Attributes:
        tokens: ``[B, L]`` int64.
        hidden: ``[B, L, hidden_size]``, the lm_head's input.
        features: ``[B, L, F]``, the states that the drafter reads, one after the other; F may be 0.
    """

    tokens: Tensor
    hidden: Tensor
    features: Tensor


class FrozenTarget:
    """A causal language model whose weights don't change.

    Args:
        model: of transformers, with an lm_head in a floating-point dtype.
        feature_ids: hidden states, see :attr:`specmemo_kernels.drafting.base.FeatureDrafter.feature_ids`.

    Attributes:
        weight, bias: of the lm_head, ``[V, hidden_size]`` and ``[V]`` or ``None``.

    Raises:
        UnsupportedModel: no lm_head, a quantised one, or layers that aren't found.
    """

    def __init__(self, model: Any, feature_ids: Sequence[int] = ()) -> None:
        self.model, self._head = model.eval().requires_grad_(False), lm_head_of(model)
        weight = getattr(self._head, "weight", None)
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
            raise UnsupportedModel(
                f"the lm_head of {type(model).__name__} is a {type(self._head).__name__} without a floating-point "
                "matrix on a device, from which drafters learn; load the model without quantising or offloading it"
            )
        self.weight, self.bias = weight.detach(), getattr(self._head, "bias", None)
        self.embedding: nn.Module = model.get_input_embeddings()
        self.taps = find_taps(model, feature_ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @torch.no_grad()
    def states(self, tokens: Tensor) -> TargetStates:
        """The states of windows ``tokens`` ``[B, L]``. The lm_head computes no logits."""
        captured: list[Tensor] = []

        def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            captured.append(args[0])
            return (args[0][:, :0], *args[1:])

        hook = self._head.register_forward_pre_hook(cut)
        try:
            with self.taps.captured() as states:
                self.model(input_ids=tokens, use_cache=False)
        finally:
            hook.remove()
        hidden = captured[-1]
        parts = [states[i].to(hidden.device) for i in self.taps.ids]
        return TargetStates(tokens, hidden, torch.cat(parts, dim=2) if parts else hidden[..., :0])
