"""What a target model is to the loop, and how the loop decides which candidates are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specmemo_kernels import ops
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """What a step accepted (see :func:`ops.verify_tree_greedy`).

    On the host: ``emitted``, the tokens of each sequence, and ``last``, the last node of its accepted path.
    """

    accept_index: Tensor
    accept_length: Tensor
    bonus_token: Tensor
    emitted: list[list[int]]
    last: list[int]


class Verifier(Protocol):
    """Decides which nodes are accepted. ``needs_logits``: it asks for rows of logits, not for the best tokens alone."""

    needs_logits: bool

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict: ...

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether for these sequences nothing counts but the target's best tokens."""


class GreedyVerifier:
    """Accepts the path that greedy decoding would have written."""

    needs_logits = False

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.backend = target, backend

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return True

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        index, length, bonus, found = self.decide(batch, output)
        emitted, last = read_rows(found)  # the one transfer to the host
        return Verdict(index, length, bonus, emitted, last)

    def decide(self, batch: TreeBatch, output: TargetOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The verdict's tensors, and ``[B, max_depth + 3]`` int64 for the host (:func:`read_rows`)."""
        assert batch.parents is not None, "a prefill chunk has no tree to verify"
        target_tokens = self.target.argmax(output)
        if not batch.max_depth:  # roots alone: there is nothing to walk
            length = torch.zeros(batch.num_trees, dtype=torch.int32, device=target_tokens.device)
            return length[:, None], length, target_tokens, torch.nn.functional.pad(target_tokens[:, None], (0, 2))
        index, length, bonus = ops.verify_tree_greedy(
            batch.tokens, target_tokens, batch.parents, batch.qo_indptr, max_depth=batch.max_depth, backend=self.backend
        )
        # The path's own tokens are what the target wrote at each accepted node.
        node = (batch.qo_indptr[:-1, None] + index.clamp(min=0)).long()
        last = index.gather(1, length[:, None].long()).long()
        return index, length, bonus, torch.cat([target_tokens[node], length[:, None].long(), last], dim=1)


def read_rows(found: Tensor) -> tuple[list[list[int]], list[int]]:
    """Of each sequence the emitted tokens and the last accepted node, from what :meth:`GreedyVerifier.decide` found."""
    rows = found.tolist()
    return [row[: row[-2] + 1] for row in rows], [row[-1] for row in rows]
