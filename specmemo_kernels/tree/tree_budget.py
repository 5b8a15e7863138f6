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
        whole = size == self.size or self.width >= self.size - 1
        width = min(self.width, size - 1 if whole else beam_of(size))
        return TreeBudget(min(size, most_nodes(depth, max(1, width))), depth, max(1, width))


#: The trees of a step: of one shape, or of one size.
Trees = DraftTree | TreeBudget


def beam_of(size: int) -> int:
    """Nodes per depth that are expanded for trees of ``size`` nodes, where expanding costs time: a third of them.

    In trees of 3 to 32 nodes of an EAGLE-3 drafter trained for the bundled model, the best beam of 1 to 10 nodes writes
    at most 0.6 % more tokens per step (``bench/bench_beams.py``), and wider beams often fewer.
    """
    return -(-size // 3)


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
