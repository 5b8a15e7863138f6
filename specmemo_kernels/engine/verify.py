"""Verification: which candidates of a step are accepted."""

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
    """What a step accepted: the tensors of :func:`specmemo_kernels.ops.verify_tree_greedy`, and on the host

    ``emitted``: the tokens of each sequence; ``last``: the last node of its accepted path.
    """

    accept_index: Tensor
    accept_length: Tensor
    bonus_token: Tensor
    emitted: list[list[int]]
    last: list[int]


@dataclass(frozen=True)
class DeviceVerdict:
    """What a step accepted, on the device.

    ``rows`` ``[B, max_depth + 3]`` int64: the path's tokens (padded), ``accept_length`` and the last accepted node.
    """

    accept_index: Tensor
    accept_length: Tensor
    bonus_token: Tensor
    rows: Tensor


class Verifier(Protocol):
    """Decides which nodes are accepted. ``needs_logits``: it reads rows of logits, not only the best tokens."""

    needs_logits: bool

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict: ...

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether the verdict for these sequences depends on the target's best tokens alone."""


class GreedyVerifier:
    """Accepts the path that greedy decoding would have written."""

    needs_logits = False

    def __init__(self, target: TargetModel, backend: str | None) -> None:
        self.target, self.backend = target, backend

    def is_greedy(self, sequences: Sequence[SequenceState]) -> bool:
        return True

    def __call__(self, batch: TreeBatch, sequences: Sequence[SequenceState], output: TargetOutput) -> Verdict:
        found = self.verify_on_device(batch, output)
        emitted, last = read_rows(found.rows)  # the one transfer to the host
        return Verdict(found.accept_index, found.accept_length, found.bonus_token, emitted, last)

    def verify_on_device(self, batch: TreeBatch, output: TargetOutput) -> DeviceVerdict:
        """The verdict without a transfer to the host."""
        assert batch.parents is not None, "a prefill chunk has no tree to verify"
        target_tokens = self.target.argmax(output)
        if not batch.max_depth:  # single-node trees: nothing to verify
            length = torch.zeros(batch.num_trees, dtype=torch.int32, device=target_tokens.device)
            rows = torch.nn.functional.pad(target_tokens[:, None], (0, 2))
            return DeviceVerdict(length[:, None], length, target_tokens, rows)
        kernels = ops.kernels(self.backend, target_tokens.device)
        index, length, bonus = kernels.verify_tree_greedy(
            batch.tokens, target_tokens, batch.parents, batch.qo_indptr, batch.max_depth
        )
        # The path's own tokens are what the target wrote at each accepted node.
        node = (batch.qo_indptr[:-1, None] + index.clamp(min=0)).long()
        last = index.gather(1, length[:, None].long()).long()
        return DeviceVerdict(
            index, length, bonus, torch.cat([target_tokens[node], length[:, None].long(), last], dim=1)
        )


def read_rows(rows: Tensor) -> tuple[list[list[int]], list[int]]:
    """Each sequence's emitted tokens and its last accepted node, from :attr:`DeviceVerdict.rows`."""
    host_rows = rows.tolist()
    return [row[: row[-2] + 1] for row in host_rows], [row[-1] for row in host_rows]
