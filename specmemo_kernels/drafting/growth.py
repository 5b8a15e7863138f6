"""Fills trees from a drafter's log-probabilities: static trees by rank, dynamic trees best first, on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from specmemo_kernels.forward.batch import CACHED_LAYOUTS, DraftedTrees, tree_layout
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

Tensor = torch.Tensor
#: Log-probabilities (float32, never positive) and tokens (int64), ``[B, M, W]``: the best W children of M nodes, best
#: first.
Children = tuple[Tensor, Tensor]
#: Maps the states of a depth's parents to its nodes. Arguments: the depth; ``[B, M]`` int64, the index of each node's
#: parent among the nodes of the last call; the N = B * M nodes' tokens ``[N]``; the parents' states ``[N, S]``. Returns
#: the nodes' states ``[N, S]``, and the log-probabilities and tokens ``[N, W]`` of their best children.
Step = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
#: Computes the children of the nodes of one depth. Arguments: their depth; ``[B, M]`` int64, the index of each node's
#: parent among the nodes of the last call (0 for the root); ``[B, M]`` int64, their tokens.
Expand = Callable[[int, Tensor, Tensor], Children]


def grow(roots: Tensor, tree: Trees, first: Callable[[int], Children], expand: Expand) -> DraftedTrees:
    """Fill a tree for each of ``roots`` ``[B]``.

    Args:
        tree: a static tree, or the size of dynamic trees.
        first: the best children of the roots, ``[B, 1, W]`` for a width W.
        expand: their descendants, called once per depth.
    """
    if isinstance(tree, DraftTree):
        return _fill(roots, tree, first, expand)
    return _best_first(roots, tree, first, expand)


def grow_recurrent(
    roots: Tensor, states: Tensor, tree: Trees, predict: Callable[[int], tuple[Tensor, Tensor]], step: Step
) -> DraftedTrees:
    """:func:`grow` for a drafter with a state per node.

    Args:
        states: ``[B, S]``, of the roots.
        predict: log-probabilities and tokens ``[B, W]`` of the roots' best children, for a width W.
        step: from the states of one depth to the next.
    """
    last = states[:, None]  # of the last depth's nodes

    def first(width: int) -> Children:
        log_p, tokens = predict(width)
        return log_p[:, None], tokens[:, None]

    def expand(depth: int, parent: Tensor, tokens: Tensor) -> Children:
        nonlocal last
        above = last.gather(1, parent[..., None].expand(-1, -1, last.shape[2])).flatten(0, 1)
        hidden, log_p, children = step(depth, parent, tokens.flatten().clamp(min=0), above)
        last = hidden.view(*parent.shape, -1)
        return log_p.view(*parent.shape, -1), children.view(*parent.shape, -1)

    return grow(roots, tree, first, expand)


def _best_first(roots: Tensor, budget: TreeBudget, first: Callable[[int], Children], expand: Expand) -> DraftedTrees:
    """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): a beam of ``width`` nodes is expanded at each depth.

    A node's score is the sum of log-probabilities along its path. Of all children the best are the tree, sorted by
    score. With a beam of ``size - 1`` nodes or more these are the best of all nodes, as in DDTree.
    """
    if not budget.max_depth:
        return DraftedTrees(roots[:, None], torch.full_like(roots, -1).int()[:, None], torch.zeros_like(roots)[:, None])
    width = budget.width
    log_p, token = first(width)
    score, token = log_p.flatten(1), token.flatten(1)
    root, ranks, offsets = _constants(len(roots), budget, roots.device)
    scores, tokens, beams = [score], [token], [ranks]  # of each depth's candidates; their indices that are expanded
    beam_score, parent, beam_token = score, root, token
    for depth in range(1, budget.max_depth):
        log_p, token = expand(depth, parent, beam_token)
        score, token = (beam_score[..., None] + log_p).flatten(1), token.flatten(1)
        scores.append(score)
        tokens.append(token)
        if depth + 1 < budget.max_depth:
            beam_score, best = score.topk(width, dim=1)
            parent, beam_token = best // width, token.gather(1, best)
            beams.append(best)
    # No child's score is above its parent's, and equal scores are in the order of creation: parents come first.
    ranked = torch.cat(scores, dim=1).nan_to_num(nan=-torch.inf).sort(dim=1, descending=True, stable=True)
    chosen, order = ranked.values[:, : budget.size - 1], ranked.indices[:, : budget.size - 1]
    expanded = torch.cat(beams, dim=1) + offsets
    parents = expanded.gather(1, ((order - width) // width).clamp(min=0))
    nodes = _nodes(len(roots), order.shape[1], roots.device)
    node = torch.zeros_like(ranked.indices).scatter_(1, order, nodes)
    above = torch.where(order < width, 0, node.gather(1, parents))
    depths = (order + width * width - width) // (width * width) + 1  # after the first, a depth has width^2 candidates
    guesses = torch.where(chosen > -torch.inf, torch.cat(tokens, dim=1).gather(1, order), -1)
    return DraftedTrees(
        torch.cat([roots[:, None], guesses], dim=1),
        torch.nn.functional.pad(above, (1, 0), value=-1).int(),
        torch.nn.functional.pad(depths, (1, 0)),
    )


@lru_cache(maxsize=CACHED_LAYOUTS)
def _constants(sequences: int, budget: TreeBudget, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, width]`` zeros; ``[B, width]`` 0, 1, ...; and the first candidate of each expanded node's depth.

    The latter is ``[beams * width]``, for :func:`_best_first`'s numbering: ``width`` candidates, then ``width^2`` per
    depth.
    """
    width = budget.width
    with torch.inference_mode(False):
        ranks = torch.arange(width, device=device).expand(sequences, -1)
        firsts = [0, *(width + depth * width**2 for depth in range(budget.max_depth - 2))]
        offsets = torch.tensor(firsts, device=device)[:, None].expand(-1, width).flatten()
        return torch.zeros_like(ranks), ranks, offsets


@lru_cache(maxsize=CACHED_LAYOUTS)
def _nodes(sequences: int, count: int, device: torch.device) -> Tensor:
    """``[B, count]`` int64: 1, 2, ..."""
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, device=device).expand(sequences, -1)


def _fill(roots: Tensor, tree: DraftTree, first: Callable[[int], Children], expand: Expand) -> DraftedTrees:
    """A static tree: a node of rank r has the token of rank r among its parent's children."""
    sequences = len(roots)
    layout = tree_layout(tree, sequences, roots.device)
    shape = sequences, tree.size
    levels = [roots[:, None]]
    _, token = first(tree.width) if tree.max_depth else (None, roots[:, None, None])
    for depth in range(1, tree.max_depth + 1):
        child, parent = _level(tree, depth, roots.device)
        tokens = token.flatten(1).index_select(1, child)
        levels.append(tokens)
        if depth < tree.max_depth:
            _, token = expand(depth, parent.expand(sequences, -1), tokens)
    order = _by_depth(tree, roots.device)
    return DraftedTrees(
        torch.cat(levels, dim=1).index_select(1, order), layout.parents.view(shape), layout.depths.view(shape)
    )


@lru_cache(maxsize=64)
def _level(tree: DraftTree, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The nodes of a depth: their index among all children of the depth above, and their parent's index there."""
    above = [node for node, d in enumerate(tree.depths) if d == depth - 1]
    nodes = [node for node, d in enumerate(tree.depths) if d == depth]
    parents = [above.index(tree.parents[node]) for node in nodes]
    children = [parent * tree.width + tree.ranks[node] for parent, node in zip(parents, nodes, strict=True)]
    with torch.inference_mode(False):
        return torch.tensor(children, device=device), torch.tensor(parents, device=device)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _by_depth(tree: DraftTree, device: torch.device) -> Tensor:
    """``[T]`` int64: each node's place in the list of nodes sorted by depth."""
    order = sorted(range(tree.size), key=lambda node: tree.depths[node])
    with torch.inference_mode(False):
        return torch.tensor(order, device=device).argsort()
