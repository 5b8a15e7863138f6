"""Trees for layers that read tokens in order: as paths from a root to a leaf, or level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from specmemo_kernels.forward.batch import CACHED_LAYOUTS, TreeBatch

Tensor = torch.Tensor


@dataclass(frozen=True)
class TreePaths:
    """The paths of a batch's trees, P paths of at most D nodes.

    ``rows``: ``[P, D]`` int64, the packed row of each node, the last one repeated behind a path's end. ``starts``: the
    first path of each tree, and P. ``path``, ``depth``: ``[N]`` int64, a path and a place in it for each node.
    ``levels``: of each depth, the packed rows of its nodes and the place of their parents among those of the depth
    above (of a root: its tree), ``[M]`` int64 each.
    """

    rows: Tensor
    starts: tuple[int, ...]
    path: Tensor
    depth: Tensor
    levels: tuple[tuple[Tensor, Tensor], ...]

    def to(self, device: torch.device) -> TreePaths:
        """The same on ``device``."""
        if device == self.rows.device:
            return self
        levels = tuple((rows.to(device), above.to(device)) for rows, above in self.levels)
        rows, path, depth = (part.to(device) for part in (self.rows, self.path, self.depth))
        return TreePaths(rows, self.starts, path, depth, levels)


def tree_paths(batch: TreeBatch) -> TreePaths:
    """The paths of a batch's trees. Reads the parents on the host."""
    assert batch.parents is not None, "the batch has trees"
    starts = batch.qo_indptr[: batch.num_trees + 1].tolist()
    return _paths(tuple(batch.parents.tolist()), tuple(starts), batch.tokens.device)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _paths(parents: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> TreePaths:
    paths: list[list[int]] = []
    firsts = [0]
    for start, end in pairwise(starts):
        paths += [[start + node for node in path] for path in paths_to_leaves(parents[start:end])]
        firsts.append(len(paths))
    longest = max(map(len, paths))
    places = {node: (p, d) for p, path in reversed([*enumerate(paths)]) for d, node in enumerate(path)}
    path, depth = zip(*(places[node] for node in range(len(parents))), strict=True)
    rows = [path + path[-1:] * (longest - len(path)) for path in paths]
    above = {node: before for path in paths for before, node in pairwise(path)}
    levels: list[tuple[list[int], list[int]]] = [([*starts[:-1]], [*range(len(starts) - 1)])]
    for d in range(1, longest):
        place = {node: i for i, node in enumerate(levels[-1][0])}
        nodes = [node for node in range(len(parents)) if depth[node] == d]
        levels.append((nodes, [place[above[node]] for node in nodes]))
    with torch.inference_mode(False):
        pairs = ((torch.tensor(nodes, device=device), torch.tensor(places, device=device)) for nodes, places in levels)
        tensors = [torch.tensor(part, device=device) for part in (rows, path, depth)]
        return TreePaths(tensors[0], tuple(firsts), tensors[1], tensors[2], tuple(pairs))


def chain_paths(rows: Tensor) -> TreePaths:
    """The path of a tree that is a chain of packed ``rows`` ``[N]``."""
    zero = torch.zeros_like(rows)
    return TreePaths(rows[None], (0, 1), zero, rows.argsort(), tuple((row[None], zero[:1]) for row in rows))


def paths_to_leaves(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of each path from the root to a leaf, in the leaves' order. ``parents``: of one tree, -1 for roots."""
    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
    return paths
