"""What the loop needs of the model whose tokens count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention

Tensor = torch.Tensor


@dataclass(frozen=True)
class TargetOutput:
    """Of the kept rows: the lm_head's input ``[K, hidden_size]``, and the logits ``[K, V]`` if the model made them."""

    hidden: Tensor
    logits: Tensor | None

    def rows(self, count: int) -> TargetOutput:
        """The first ``count`` rows."""
        return TargetOutput(self.hidden[:count], None if self.logits is None else self.logits[:count])


class TargetModel(Protocol):
    """The model whose tokens count."""

    device: torch.device
    vocab_size: int
    #: Whether forward and argmax read nothing but tensors and leave nothing but their results, so that a graph can
    #: hold them.
    static: bool

    def forward(self, batch: TreeBatch, attention: StepAttention, keep: Tensor | None, logits: bool) -> TargetOutput:
        """Run all layers on the batch's nodes; ``keep`` (``[K]`` int64, default all) are the rows wanted.

        ``logits``: :meth:`row_logits` will be asked for.
        """

    def argmax(self, output: TargetOutput) -> Tensor:
        """The target's token ``[K]`` int64 for each row of ``forward``'s output."""

    def row_logits(self, output: TargetOutput, row: int) -> Tensor:
        """The logits ``[V]`` of one row of ``forward``'s output."""
