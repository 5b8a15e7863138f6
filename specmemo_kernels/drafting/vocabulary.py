"""The target's embedding and lm_head as drafters use them, and log-probabilities of the best tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels import ops

Tensor = torch.Tensor


class TopLogProbs(Protocol):
    """The best ``k`` tokens of ``hidden`` ``[N, H]``, best first.

    Returns their log-probabilities ``[N, k]`` float32 and the tokens ``[N, k]`` int64. Logits are multiplied by
    ``scale``.
    """

    def __call__(self, hidden: Tensor, k: int, scale: float = 1.0) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class TargetVocabulary:
    """What a drafter shares with its target.

    Attributes:
        embed: embeddings ``[N, hidden_size]`` of tokens ``[N]``.
        top_log_probs: of the lm_head, whole also where ranks have its rows.
        vocab_size, hidden_size, dtype: of the lm_head.
    """

    embed: Callable[[Tensor], Tensor]
    top_log_probs: TopLogProbs
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype


def top_log_probs(
    hidden: Tensor, k: int, weight: Tensor, bias: Tensor | None, backend: str | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:class:`TopLogProbs` of a matrix ``[V, H]``."""
    kernels = ops.kernels(backend, hidden.device)
    scaled = hidden if scale == 1.0 else hidden * scale
    log_p, tokens, _ = kernels.lm_head_log_probs(scaled, weight, bias, k, None)
    return log_p, tokens
