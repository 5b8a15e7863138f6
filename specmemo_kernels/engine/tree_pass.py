"""The pass that every step makes: forward, verify, commit.

:mod:`specmemo_kernels.engine.decode` runs it from the host, :mod:`specmemo_kernels.engine.device_step` from a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.engine.prefill import Chunk
from specmemo_kernels.forward.batch import TreeBatch, concat_batches
from specmemo_kernels.forward.step_attention import StepAttention, commit_accepted
from specmemo_kernels.forward.target import TargetModel, TargetOutput

Tensor = torch.Tensor


class Accepted(Protocol):
    """``accept_index`` and ``accept_length`` of :func:`specmemo_kernels.ops.verify_tree_greedy`."""

    @property
    def accept_index(self) -> Tensor: ...
    @property
    def accept_length(self) -> Tensor: ...


Verdict = TypeVar("Verdict", bound=Accepted)


def tree_pass(
    target: TargetModel,
    pool: PagedKVPool,
    backend: str | None,
    trees: TreeBatch | None,
    chunk: Chunk | None,
    verify: Callable[[TreeBatch, TargetOutput], Verdict],
    *,
    logits: bool = False,
) -> tuple[Verdict | None, Tensor]:
    """Compute trees and a prompt chunk in one forward pass, verify the trees, and commit their accepted nodes.

    Only pages and scratch slots behind the sequences' ends change, so a pass that fails can be repeated.

    Args:
        trees, chunk: one of them may be ``None``.
        verify: called with the trees and the target's output for their nodes. Behind ``trees`` it gets a single-node
            tree for each prompt that the chunk completes, in the order of ``chunk.fresh``.
        logits: ``verify`` reads rows of logits.

    Returns:
        What ``verify`` returned (``None`` where there was nothing to verify), and the hidden states
        ``[num_trees + len(chunk.ended), hidden_size]`` of the last accepted nodes and of the completed prompts' last
        tokens.
    """
    batch = _joined(trees, None if chunk is None else chunk.batch)
    verified = _joined(trees, None if chunk is None else chunk.first_trees)
    assert batch is not None, "there is nothing to compute"
    nodes, keep = 0 if trees is None else trees.num_tree_nodes, None
    if chunk is not None:
        keep = torch.cat([torch.arange(nodes, device=target.device), nodes + chunk.last_rows])
    output = target.forward(batch, StepAttention(pool, batch, backend), keep, logits=logits)
    verdict = None if verified is None else verify(verified, output.rows(len(verified.tokens)))
    if trees is None or verdict is None or not trees.max_depth:  # the roots of single-node trees were appended
        return verdict, output.hidden
    index, length = verdict.accept_index[: trees.num_trees], verdict.accept_length[: trees.num_trees]
    commit_accepted(pool, trees, index, length, backend)
    last = trees.last_rows(index, length)
    if chunk is not None:
        ended = torch.arange(nodes, len(output.hidden), dtype=last.dtype, device=last.device)
        last = torch.cat([last, ended])
    return verdict, output.hidden.index_select(0, last)


def _joined(trees: TreeBatch | None, other: TreeBatch | None) -> TreeBatch | None:
    return concat_batches(trees, other) if trees is not None and other is not None else trees or other
