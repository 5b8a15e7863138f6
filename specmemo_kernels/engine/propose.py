"""What a step verifies: the drafter's guesses in the tree of every running sequence."""

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
    """Let the drafter fill the tree; what isn't a token becomes -1 for the walk and 0 for the embedding.

    A tree of the root alone needs no drafter. ``agree`` turns this process's guesses ``[B, T]`` into those that all
    processes of the target verify.

    Returns:
        The trees, and the seconds that the drafter took.

    Raises:
        TypeError: the drafter's answer isn't a tensor.
        ValueError: it isn't ``[sequences, tree nodes]`` int64.
    """
    slots, tokens = [s.slot for s in sequences], [s.tokens for s in sequences]
    known = [slots, [t[-1] for t in tokens], [len(t) - 1 for t in tokens]]
    rows, roots, lengths = torch.tensor(known, device=target.device)
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
    if draft.device.type == "cpu":  # elsewhere a look at it would make the host wait
        tree, draft = _without_empty_depths(tree, draft)
    draft = draft.to(target.device)
    draft[:, 0] = roots
    return tree_batch(tree, draft, lengths.int(), pool.block_table[rows], longest), seconds


def only_tokens(draft: Tensor, vocab_size: int) -> Tensor:
    """-1 in place of what isn't a token."""
    return torch.where((draft < 0) | (draft >= vocab_size), -1, draft)


def _without_empty_depths(tree: DraftTree, draft: Tensor) -> tuple[DraftTree, Tensor]:
    """The tree down to the deepest guess of any sequence (what an earlier guess is missing for can't be accepted)."""
    guessed = (draft >= 0).any(0).tolist()
    deepest = max((depth for depth, there in zip(tree.depths, guessed, strict=True) if there), default=0)
    kept = [node for node, depth in enumerate(tree.depths) if depth <= deepest]
    return tree.truncated(deepest), draft[:, kept] if len(kept) < tree.size else draft
