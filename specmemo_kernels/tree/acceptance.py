"""Acceptance probabilities of draft trees: the best tree for given head accuracies, and a running estimate."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from specmemo_kernels.tree.draft_tree import DraftTree

Accuracy = Sequence[Sequence[float]]

#: Cumulative top-1..5 accuracy of Medusa-1 heads on Vicuna-7B v1.3 (published with FasterDecoding/Medusa),
#: for heads without published accuracies.
DEFAULT_ACCURACY: Accuracy = (
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799),
    (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169),
    (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
    (0.1175, 0.1866, 0.2346, 0.2721, 0.2998),
)


def rank_probabilities(cumulative: Accuracy) -> list[list[float]]:
    """``p[h][r]``: probability that head ``h``'s guess of rank ``r`` is right, from cumulative top-k accuracies.

    Raises:
        ValueError: a row that doesn't rise within 0..1.
    """
    for head, row in enumerate(cumulative):
        # ``not all(<=)`` also rejects NaN.
        if not row or not all(a <= b <= 1 for a, b in zip((0.0, *row), row, strict=False)):
            raise ValueError(f"accuracy of head {head} must rise within 0..1, got {list(row)}")
    return [[b - a for a, b in zip((0.0, *row), row, strict=False)] for row in cumulative]


def best_first_paths(cumulative: Accuracy, nodes: int) -> list[tuple[int, ...]]:
    """The ``nodes`` most probable rank paths (or all there are), best first, parents before children.

    A path's probability is the product of its heads' rank probabilities; heads are assumed independent (Medusa, arXiv
    2401.10774, section 2.3.3).
    """
    # Measured on little text, probabilities need not fall with the rank.
    heads = [
        sorted(((math.log(p), r) for r, p in enumerate(row) if p > 0), key=lambda x: (-x[0], x[1]))
        for row in rank_probabilities(cumulative)
    ]
    heap: list[tuple[float, tuple[int, ...], int, float]] = []

    def push(prefix: tuple[int, ...], index: int, log_prefix: float) -> None:
        if len(prefix) < len(heads) and index < len(heads[len(prefix)]):
            log_p, rank = heads[len(prefix)][index]
            heapq.heappush(heap, (-(log_prefix + log_p), (*prefix, rank), index, log_prefix))

    push((), 0, 0.0)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < nodes:
        cost, path, index, log_prefix = heapq.heappop(heap)
        paths.append(path)
        push(path[:-1], index + 1, log_prefix)
        push(path, 0, -cost)
    return paths


def extrapolated(cumulative: Accuracy, ranks: int) -> list[list[float]]:
    """Extend the rows of a table to at least ``ranks`` columns.

    Beyond a row's last rank n the misses ``1 - c[k]`` follow a power law fitted to ranks ``n // 2`` and n:
    ``1 - c[k] = (1 - c[n]) * (k / n) ** -a``. A row of one rank is extended by its last value.

    Raises:
        ValueError: a row that doesn't rise within 0..1.
    """
    rank_probabilities(cumulative)  # checks the table
    return [[*row, *(_extrapolate(row, rank) for rank in range(len(row) + 1, ranks + 1))] for row in cumulative]


def _extrapolate(row: Sequence[float], rank: int) -> float:
    last, half = len(row), len(row) // 2
    if not half or row[-1] >= 1:
        return row[-1]
    exponent = math.log((1 - row[half - 1]) / (1 - row[-1])) / math.log(last / half)
    return max(row[-1], 1.0 - (1.0 - row[-1]) * math.pow(rank / last, -exponent))  # max(): rounding errors


def expected_tokens_per_step(tree: DraftTree | Sequence[Sequence[int]], cumulative_topk_accuracy: Accuracy) -> float:
    """``1 + sum of the nodes' acceptance probabilities``; heads are assumed independent.

    Args:
        tree: a draft tree, or its rank paths as Medusa publishes them.
        cumulative_topk_accuracy: ``[head][k]``, probability that one of the head's best ``k + 1`` guesses is right.
            Ranks beyond the table are extrapolated (:func:`extrapolated`).

    Raises:
        ValueError: a path longer than the number of heads, or a table that doesn't rise within 0..1.
    """
    paths = tree if isinstance(tree, Sequence) else tree.paths
    max_rank = max((rank for path in paths for rank in path), default=0)
    p = rank_probabilities(extrapolated(cumulative_topk_accuracy, max_rank + 1))
    total = 1.0
    for path in paths:
        if len(path) > len(p):
            raise ValueError(
                f"path {list(path)} needs {len(path)} heads, the accuracy table has {len(p)}; "
                "add rows or shorten the path"
            )
        total += math.prod(p[depth][rank] for depth, rank in enumerate(path))
    return total


#: Weight of the prior, in offers of each node.
PRIOR_OFFERS = 8
#: An offer's weight falls by 1/e in this many further offers of the same node.
MEMORY = 128


class RunningAcceptance:
    """Running estimate of each node's acceptance probability, from head accuracies (the prior) and accepted paths.

    A node is offered in a step if it was verified and its parent was accepted. The share of accepted offers estimates
    its probability given its parent, independent of the other verified nodes. Old offers fade, because texts change.

    Args:
        tree: the tree whose parts will be verified.
        cumulative: the prior, as for :func:`expected_tokens_per_step`; heads are assumed independent.
    """

    def __init__(self, tree: DraftTree, cumulative: Accuracy) -> None:
        max_rank = max((rank for path in tree.paths for rank in path), default=0)
        prior = rank_probabilities(extrapolated(cumulative, max_rank + 1))
        self._paths = tree.paths
        self._offered = {path: float(PRIOR_OFFERS) for path in self._paths}
        self._accepted = {path: PRIOR_OFFERS * prior[len(path) - 1][path[-1]] for path in self._paths}

    def record(self, tree: DraftTree, last: Sequence[int]) -> None:
        """Count a step over ``tree``, a part of the planned one; node ``last[b]`` ends the accepted path of sequence b.

        Node 0 is the root, node i has the path ``tree.paths[i - 1]``.
        """
        children = _children(tree)
        for node in last:
            accepted = tree.paths[node - 1] if node else ()
            for depth in range(len(accepted) + 1):
                for path in children.get(accepted[:depth], ()):
                    hit = path == accepted[: depth + 1]
                    self._offered[path] += 1 - self._offered[path] / MEMORY
                    self._accepted[path] += hit - self._accepted[path] / MEMORY

    def gains(self) -> list[float]:
        """Acceptance probability of each node, root first (1); their sum over a tree is its tokens per step."""
        gains: dict[tuple[int, ...], float] = {(): 1.0}
        for path in self._paths:
            gains[path] = gains[path[:-1]] * min(1.0, self._accepted[path] / self._offered[path])
        return list(gains.values())


@lru_cache(maxsize=64)
def _children(tree: DraftTree) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in tree.paths:
        children.setdefault(path[:-1], []).append(path)
    return children
