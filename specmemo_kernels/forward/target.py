"""The target model's interface to the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention

Tensor = torch.Tensor
#: Rows of logits that are computed at once, and held until they are read. With two threads of an Emerald Rapids 8 rows
#: take 1.25 times as long as one (1B, bfloat16).
LOGIT_ROWS = 8


@dataclass(frozen=True)
class TargetOutput:
    """Results of a forward pass.

    ``hidden``: ``[K, hidden_size]``, the kept rows' lm_head inputs. ``logits``: their logits ``[K, V]`` if the model
    computed them. ``features``: ``[N, F]``, the hidden states of all rows that a drafter reads, if it does.
    """

    hidden: Tensor
    logits: Tensor | None
    features: Tensor | None = None

    def rows(self, count: int, first: int = 0) -> TargetOutput:
        """``hidden`` and ``logits`` of ``count`` rows from ``first`` on."""
        part = slice(first, first + count)
        return TargetOutput(self.hidden[part], None if self.logits is None else self.logits[part])


class TargetModel(Protocol):
    """The model whose output is generated."""

    device: torch.device
    #: Tokens below it may be drafted.
    vocab_size: int
    #: Whether forward and argmax depend only on tensors and have no side effects, so that a graph can capture them.
    static: bool
    #: Whether argmax and row_logits need the hidden states of a pass alone, not its logits.
    reads_hidden: bool
    #: Whether a row's result has the same bits in any pass; attention is computed so too.
    invariant: bool

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        """Run all layers on the batch's nodes and return the rows ``keep`` (``[K]`` int64; ``None``: all).

        ``logits``: :meth:`row_logits` will be called.
        """

    def argmax(self, output: TargetOutput) -> Tensor:
        """The target's token ``[K]`` int64 for each row of ``forward``'s output."""

    def row_logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        """The logits ``[R, V]`` of up to :data:`LOGIT_ROWS` rows of ``forward``'s output."""
