"""Trees as paths: layers that read tokens in order run every path from a root to a leaf as a row of a batch."""

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

    ``rows``: ``[P, D]`` int64, the packed row of each node, the last one repeated behind a path's end. ``owner``:
    ``[P]`` int64, each path's tree. ``path``, ``depth``: ``[N]`` int64, a path and a place in it for each node.
    """

    rows: Tensor
    owner: Tensor
    path: Tensor
    depth: Tensor


def tree_paths(batch: TreeBatch) -> TreePaths:
    """The paths of a batch's trees. Reads the parents on the host."""
    assert batch.parents is not None, "the batch has trees"
    starts = batch.qo_indptr[: batch.num_trees + 1].tolist()
    return _paths(tuple(batch.parents.tolist()), tuple(starts), batch.tokens.device)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _paths(parents: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> TreePaths:
    paths: list[list[int]] = []
    owner: list[int] = []
    for tree, (start, end) in enumerate(pairwise(starts)):
        found = paths_to_leaves(parents[start:end])
        paths += [[start + node for node in path] for path in found]
        owner += [tree] * len(found)
    longest = max(map(len, paths))
    places = {node: (p, d) for p, path in reversed([*enumerate(paths)]) for d, node in enumerate(path)}
    path, depth = zip(*(places[node] for node in range(len(parents))), strict=True)
    rows = [path + path[-1:] * (longest - len(path)) for path in paths]
    with torch.inference_mode(False):
        return TreePaths(*(torch.tensor(part, device=device) for part in (rows, owner, path, depth)))


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
