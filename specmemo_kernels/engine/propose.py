"""Drafting: the drafter's candidates as one tree per running sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from specmemo_kernels.arguments import wrong_type
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, DraftInput
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch, tree_batch
from specmemo_kernels.forward.target import TargetModel
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


def propose(
    drafter: Drafter,
    tree: DraftTree,
    sequences: Sequence[SequenceState],
    pool: PagedKVPool,
    target: TargetModel,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[TreeBatch, float]:
    """Fill the tree with the drafter's candidates; values outside the vocabulary become -1.

    A one-node tree skips the drafter.

    Args:
        agree: maps this process's candidates ``[B, T]`` to those that all ranks of the target verify.

    Returns:
        The trees, and the seconds that the drafter took.

    Raises:
        TypeError: the drafter didn't return a tensor.
        ValueError: its tensor isn't ``[sequences, tree nodes]`` int64.
    """
    slots, tokens = [s.slot for s in sequences], [s.tokens for s in sequences]
    columns = [slots, [t[-1] for t in tokens], [len(t) - 1 for t in tokens]]
    rows, roots, lengths = torch.tensor(columns, device=target.device)
    longest = max(map(len, tokens)) - 1
    if tree.size == 1:
        return tree_batch(tree, roots[:, None], lengths.int(), pool.block_table[rows], longest), 0.0
    hidden = torch.stack([s.hidden for s in sequences if s.hidden is not None])
    started = time.perf_counter()
    draft = drafter.propose(DraftInput(tree, roots, hidden, tokens, slots))
    seconds = time.perf_counter() - started
    expected = (len(sequences), tree.size)
    if not isinstance(draft, Tensor):
        raise wrong_type(
            f"the answer of {type(drafter).__name__}.propose", draft, f"a torch.int64 tensor of shape {expected}"
        )
    if tuple(draft.shape) != expected or draft.dtype != torch.int64:
        raise ValueError(
            f"{type(drafter).__name__}.propose returned {tuple(draft.shape)} {draft.dtype}, "
            f"expected {expected} torch.int64 (sequences, tree nodes)"
        )
    draft = only_tokens(draft if agree is None else agree(draft), target.vocab_size)
    if draft.device.type == "cpu":  # reading it from a GPU would block the host
        tree, draft = _without_empty_depths(tree, draft)
    draft = draft.to(target.device)
    draft[:, 0] = roots
    return tree_batch(tree, draft, lengths.int(), pool.block_table[rows], longest), seconds


def only_tokens(draft: Tensor, vocab_size: int) -> Tensor:
    """Replace values outside the vocabulary by -1."""
    return torch.where((draft < 0) | (draft >= vocab_size), -1, draft)


def _without_empty_depths(tree: DraftTree, draft: Tensor) -> tuple[DraftTree, Tensor]:
    """Truncate the tree at the deepest candidate of any sequence."""
    guessed = (draft >= 0).any(0).tolist()
    deepest = max((depth for depth, has_guess in zip(tree.depths, guessed, strict=True) if has_guess), default=0)
    nodes = [node for node, depth in enumerate(tree.depths) if depth <= deepest]
    return tree.truncated(deepest), draft[:, nodes] if len(nodes) < tree.size else draft
