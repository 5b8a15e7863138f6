"""Cross-entropy of a drafter's predictions to the target's distribution, and the ranks of the target's tokens.

Logits exist for a few rows at a time; gradients are computed with them, in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor

#: Logits of a prediction that exist at a time: 2 MiB in float32. At least 32 rows, else products are slow.
_LOGITS = 1 << 19
_LEAST_ROWS = 32


@dataclass(frozen=True)
class Teacher:
    """The target's predictions of one token behind each of N places.

    Attributes:
        hidden: ``[N, hidden_size]``, the lm_head's input.
        weight, bias: the lm_head's, of the draft's vocabulary: ``[V, hidden_size]``, ``[V]`` or ``None``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, counted: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        depths, rows, _ = hidden.shape
        losses = torch.zeros(depths, device=hidden.device)
        by_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(rows, len(weight)):
            target = _logits(teacher.hidden[part], teacher.weight, teacher.bias).softmax(dim=-1)
            share = counted[part, None] / rows
            for depth in range(depths):
                logits = _logits(hidden[depth, part], weight, bias)
                log_p = logits.log_softmax(dim=-1)
                losses[depth] -= (target * log_p * share).sum()
                delta = ((log_p.exp() - target) * (share * scales[depth])).to(hidden.dtype)
                if by_hidden is not None:
                    by_hidden[depth, part] = delta @ weight
                if by_weight is not None:
                    by_weight += delta.T @ hidden[depth, part]
        ctx.by_hidden, ctx.by_weight = by_hidden, by_weight
        ctx.mark_non_differentiable(losses)
        return losses @ scales, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if each is None else each.mul_(grad) for each in (ctx.by_hidden, ctx.by_weight)]
        ctx.by_hidden = ctx.by_weight = None  # the graph may live longer
        return *grads, None, None, None, None


def distillation(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, counted: Tensor, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """Cross-entropy, in nats, of predictions at several depths to the teacher's distribution of the same tokens.

    Args:
        hidden: ``[D, N, H]``, the inputs of the drafter's vocabulary matrix. weight, bias: that matrix ``[V, H]``.
        scales: ``[D]``, weights of the depths in the sum.
        counted: ``[N]`` float, 1 for places that count and 0 for others; losses are divided by N.

    Returns:
        The weighted sum, and each depth's loss ``[D]`` (without a gradient).
    """
    result: tuple[Tensor, Tensor] = _Distillation.apply(hidden, weight, bias, scales, counted, teacher)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def ranks(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor) -> Tensor:
    """``[D, N]`` int64: how many tokens a prediction puts before ``tokens`` ``[N]``; V where a token is negative.

    ``hidden``, ``weight`` and ``bias`` as in :func:`distillation`.
    """
    result = torch.full(hidden.shape[:2], len(weight), device=hidden.device)
    for part in _parts(hidden.shape[1], len(weight)):
        known = tokens[part] >= 0
        index = tokens[part].clamp(min=0)[:, None]
        for depth in range(len(hidden)):
            logits = _logits(hidden[depth, part], weight, bias)
            before = (logits > logits.gather(1, index)).sum(dim=1)
            result[depth, part] = torch.where(known, before, len(weight))
    return result


@torch.no_grad()
def greedy_tokens(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[N]`` int64: the target's tokens by its lm_head's inputs ``[N, hidden_size]``."""
    parts = [_logits(hidden[part], weight, bias).argmax(dim=-1) for part in _parts(len(hidden), len(weight))]
    return torch.cat(parts)


def _parts(rows: int, vocabulary: int) -> Iterator[slice]:
    count = max(_LEAST_ROWS, _LOGITS // vocabulary)
    return (slice(first, first + count) for first in range(0, rows, count))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(hidden, weight, bias).float()
