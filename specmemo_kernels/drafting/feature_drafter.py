"""The drafter of a published checkpoint that reads hidden states, by the class of its configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specmemo_kernels.drafting.base import FeatureDrafter
from specmemo_kernels.drafting.clover import CloverDrafter
from specmemo_kernels.drafting.dflash import DFlashDrafter
from specmemo_kernels.drafting.eagle import EagleDrafter
from specmemo_kernels.drafting.published_config import CloverConfig, DrafterConfig, Eagle3Config, EagleConfig
from specmemo_kernels.drafting.vocabulary import TargetVocabulary


def feature_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: TargetVocabulary,
    target_layers: int,
    backend: str | None,
) -> FeatureDrafter:
    """Arguments as of :class:`specmemo_kernels.drafting.tensor_drafter.TensorDrafter`."""
    if isinstance(config, Eagle3Config | EagleConfig):
        return EagleDrafter(config, tensors, vocabulary, target_layers, backend)
    if isinstance(config, CloverConfig):
        return CloverDrafter(config, tensors, vocabulary, target_layers, backend)
    return DFlashDrafter(config, tensors, vocabulary, target_layers, backend)
