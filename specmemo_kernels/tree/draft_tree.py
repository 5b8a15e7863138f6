"""Draft trees: the candidates of a step, their depths and their attention mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from specmemo_kernels.arguments import integer, integers, wrong_type

WORD = 64


@dataclass(frozen=True)
class DraftTree:
    """A tree of candidates; node 0 is the root (the newest emitted token), parents come before children.

    Every prefix of the node list is a tree, so a list sorted best first is pruned by a cut (:meth:`pruned`).

    Args:
        parents: one per node, -1 for the root.
        ranks: rank of each node among its head's candidates (0: the best); 0 for the root.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", _integers("parents", self.parents))
        object.__setattr__(self, "ranks", _integers("ranks", self.ranks))
        if len(self.parents) != len(self.ranks) or not self.parents:
            raise ValueError(
                f"a tree needs one rank per node, got {len(self.parents)} parents, {len(self.ranks)} ranks"
            )
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if (parent != -1) if node == 0 else not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; the root has -1, others an earlier node")
            if rank < 0:
                raise ValueError(f"node {node} has rank {rank}, it must be at least 0")

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """A tree from rank paths as Medusa publishes them: ``[0, 2]`` is head 1's third guess under head 0's best.

        Raises:
            TypeError: ``paths`` is not a list of lists of integers.
            ValueError: a negative rank, an empty path, a path given twice or before its parent.
        """
        if not isinstance(paths, Iterable) or isinstance(paths, str | bytes):
            raise wrong_type("tree", paths, "a list of rank paths, each a list of integers")
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for given in paths:
            path = _integers(f"path {len(parents) - 1} of the tree", given)
            if not path:
                raise ValueError(f"path {len(parents) - 1} of the tree is empty; leave the root out, it has no rank")
            if min(path) < 0:
                raise ValueError(f"tree: path {list(path)} has a rank below 0")
            if path in index or path[:-1] not in index:
                parent = list(path[:-1])
                problem = "is given twice; remove one" if path in index else f"must come after its parent {parent}"
                raise ValueError(f"tree: path {list(path)} {problem}")
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
            index[path] = len(parents) - 1
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def chain(cls, depth: int) -> DraftTree:
        """The root and a chain of ``depth`` drafts; ``chain(0)`` is plain decoding."""
        depth = integer("depth", depth, 0)
        return cls(tuple(range(-1, depth)), (0,) * (depth + 1))

    @property
    def size(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Maximum of drafts that one step can accept."""
        return max(self.depths)

    @cached_property
    def width(self) -> int:
        """Candidates needed from the drafter per depth."""
        return max(self.ranks) + 1

    def pruned(self, size: int) -> DraftTree:
        """The tree of the first ``size`` nodes."""
        if not 1 <= size <= self.size:
            raise ValueError(f"can't prune a tree of {self.size} nodes to {size}; size must be from 1 to {self.size}")
        return self if size == self.size else DraftTree(self.parents[:size], self.ranks[:size])

    def truncated(self, depth: int) -> DraftTree:
        """The tree of the nodes down to ``depth``."""
        return self if depth >= self.max_depth else _truncated(self, depth)

    def part(self, nodes: Iterable[int]) -> DraftTree:
        """The tree of a subset of nodes that has the root and each node's parent."""
        subset = sorted(nodes)
        new_id = {node: i for i, node in enumerate(subset)} | {-1: -1}
        return DraftTree(tuple(new_id[self.parents[n]] for n in subset), tuple(self.ranks[n] for n in subset))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Rank path of each node but the root; inverse of :meth:`from_paths`."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths[1:])

    @cached_property
    def mask(self) -> torch.Tensor:
        """``tree_mask`` ``[T, ceil(T/64)]`` int64: bit j of row i is set if node j is i or an ancestor of i."""
        rows: list[int] = []
        for node, parent in enumerate(self.parents):
            rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
        words = -(-self.size // WORD)
        return torch.tensor(
            [[_signed(row >> WORD * word) for word in range(words)] for row in rows], dtype=torch.int64, device="cpu"
        )


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if type(values) is tuple and all(type(value) is int for value in values):  # fast path: trees are made in each step
        return values
    checked = integers(values)
    if checked is None:
        raise wrong_type(name, values, "a list of integers")
    return tuple(checked)


def _signed(word: int) -> int:
    """Reinterpret the low 64 bits as int64."""
    word &= (1 << WORD) - 1
    return word - (1 << WORD) if word >> (WORD - 1) else word


@lru_cache(maxsize=256)
def _truncated(tree: DraftTree, depth: int) -> DraftTree:
    return tree.part(node for node, d in enumerate(tree.depths) if d <= depth)
