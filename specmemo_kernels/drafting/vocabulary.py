"""The target's embedding and lm_head as drafters use them, and log-probabilities of the best tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class TargetVocabulary:
    """What a drafter shares with its target.

    Attributes:
        embed: embeddings ``[N, hidden_size]`` of tokens ``[N]``.
        top_log_probs: log-probabilities ``[N, k]`` float32 and tokens ``[N, k]`` int64, best first, of ``hidden``
            ``[N, hidden_size]`` and ``k``, by the whole lm_head, also where ranks have its rows.
        vocab_size, dtype: of the lm_head.
    """

    embed: Callable[[Tensor], Tensor]
    top_log_probs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    vocab_size: int
    dtype: torch.dtype
