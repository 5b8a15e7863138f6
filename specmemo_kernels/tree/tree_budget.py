"""Sizes of trees whose shape the drafter decides in each step, for each sequence (dynamic trees)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specmemo_kernels.arguments import as_integer, integer
from specmemo_kernels.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class TreeBudget:
    """The size of dynamic trees. Nodes are sorted by the drafter's score, so every prefix of a tree is a tree.

    Attributes:
        size: nodes per tree, the root included.
        max_depth: maximum of drafts that one step can accept.
        width: nodes per depth that the drafter expands (the beam), and children of each.
    """

    size: int
    max_depth: int
    width: int

    def __post_init__(self) -> None:
        integer("TreeBudget.size", self.size), integer("TreeBudget.width", self.width)
        integer("TreeBudget.max_depth", self.max_depth, 0)
        least, most = self.max_depth + 1, most_nodes(self.max_depth, self.width)
        if not least <= self.size <= most:
            raise ValueError(
                f"a tree of depth {self.max_depth} from a beam of {self.width} has {least} to {most} nodes, "
                f"not {self.size}"
            )

    def pruned(self, size: int) -> TreeBudget:
        """The budget of the best ``size`` nodes."""
        if not 1 <= size <= self.size:
            raise ValueError(f"can't prune a tree of {self.size} nodes to {size}; size must be from 1 to {self.size}")
        return self.limited(size, self.max_depth)

    def truncated(self, depth: int) -> TreeBudget:
        """The budget of trees that are at most ``depth`` deep."""
        return self if depth >= self.max_depth else self.limited(self.size, depth)

    def limited(self, size: int, depth: int) -> TreeBudget:
        """At most ``size`` nodes and ``depth``."""
        depth = min(self.max_depth, depth, size - 1)
        width = min(self.width, size - 1 if self.width >= self.size - 1 else half_beam(size))
        return TreeBudget(min(size, most_nodes(depth, max(1, width))), depth, max(1, width))


#: The trees of a step: of one shape, or of one size.
Trees = DraftTree | TreeBudget


def half_beam(size: int) -> int:
    """Nodes per depth that are expanded for trees of ``size`` nodes, where expanding costs time.

    With a beam of all nodes, steps of 8 nodes at 125M take 1.06 to 1.10 times as long as with a static tree, with half
    of them 1.01 to 1.03 (``bench_drafters``, with and without ``--full-beam``). The best static trees for Medusa's
    published accuracies have fewer nodes with children per depth: 2 of 8, 4 of 24, 10 of 64.
    """
    return (size + 1) // 2


def most_nodes(depth: int, width: int) -> int:
    """Nodes that a beam of ``width`` creates down to ``depth``, the root included."""
    return 1 + width + (depth - 1) * width**2 if depth else 1


def tree_argument(tree: Any) -> Trees | int | None:
    """Check the argument ``tree`` of :func:`specmemo_kernels.patch`; rank paths become a tree.

    Raises:
        TypeError, ValueError: ``tree`` is not a tree, a budget, rank paths, a number of nodes or ``None``.
    """
    if tree is None or isinstance(tree, DraftTree | TreeBudget):
        return tree
    if as_integer(tree) is not None or not isinstance(tree, Iterable) or isinstance(tree, str | bytes):
        return integer("tree", tree, or_else=" (or a DraftTree, a TreeBudget, or a list of rank paths)")
    return DraftTree.from_paths(tree)
