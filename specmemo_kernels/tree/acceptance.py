"""From head accuracies to trees: how likely each path of guesses is, and which nodes earn their place."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Protocol

Accuracy = Sequence[Sequence[float]]

#: Cumulative top-1..5 accuracy of Medusa-1 heads on Vicuna-7B v1.3 (published with FasterDecoding/Medusa),
#: used for heads that come without figures of their own.
DEFAULT_ACCURACY: Accuracy = (
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799),
    (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169),
    (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
    (0.1175, 0.1866, 0.2346, 0.2721, 0.2998),
)


def rank_probabilities(cumulative: Accuracy) -> list[list[float]]:
    """``p[h][r]``: how often head ``h``'s guess of rank ``r`` is right, from cumulative top-k accuracies."""
    for head, row in enumerate(cumulative):
        # Asked this way round, a NaN is refused as well.
        if not row or not all(a <= b <= 1 for a, b in zip((0.0, *row), row, strict=False)):
            raise ValueError(f"accuracy of head {head} must rise within 0..1, got {list(row)}")
    return [[b - a for a, b in zip((0.0, *row), row, strict=False)] for row in cumulative]


def best_first_paths(cumulative: Accuracy, nodes: int) -> list[tuple[int, ...]]:
    """The ``nodes`` most probable rank paths, best first, parents always before children.

    A path's probability is the product of its heads' rank probabilities: heads are taken as independent
    (Medusa, arXiv 2401.10774, section 2.3.3). Fewer come back when the heads have no more ranks to offer.
    """
    # Measured on little text, a rank may be right more often than one before it, or never: each head's best come first.
    heads = [
        sorted(((math.log(p), r) for r, p in enumerate(row) if p > 0), key=lambda x: (-x[0], x[1]))
        for row in rank_probabilities(cumulative)
    ]
    heap: list[tuple[float, tuple[int, ...], int, float]] = []

    def offer(prefix: tuple[int, ...], place: int, log_prefix: float) -> None:
        if len(prefix) < len(heads) and place < len(heads[len(prefix)]):
            log_chance, rank = heads[len(prefix)][place]
            heapq.heappush(heap, (-(log_prefix + log_chance), (*prefix, rank), place, log_prefix))

    offer((), 0, 0.0)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < nodes:
        cost, path, place, log_prefix = heapq.heappop(heap)
        paths.append(path)
        offer(path[:-1], place + 1, log_prefix)
        offer(path, 0, -cost)
    return paths


def extrapolated(cumulative: Accuracy, ranks: int) -> list[list[float]]:
    """The same table with at least ``ranks`` columns, longer rows as they are.

    Beyond a row's last rank n its misses ``1 - c[k]`` are taken to fall on as a power of the rank, at the pace of the
    later half of the table: ``1 - c[k] = (1 - c[n]) * (k / n) ** -a`` with ``a`` from ranks ``n // 2`` and n. This
    never leaves 0..1 and continues the table without a step. A row of a single rank tells no pace; nothing is added
    to its accuracy.

    Raises:
        ValueError: a row that doesn't rise within 0..1.
    """
    rank_probabilities(cumulative)  # refuses what isn't a table
    return [[*row, *(_beyond(row, rank) for rank in range(len(row) + 1, ranks + 1))] for row in cumulative]


def _beyond(row: Sequence[float], rank: int) -> float:
    """The accuracy of the best ``rank`` guesses, ``rank`` past the end of ``row`` (see :func:`extrapolated`)."""
    last, half = len(row), len(row) // 2
    if not half or row[-1] >= 1:
        return row[-1]
    pace = math.log((1 - row[half - 1]) / (1 - row[-1])) / math.log(last / half)
    return max(row[-1], 1.0 - (1.0 - row[-1]) * math.pow(rank / last, -pace))  # rounding must not make it fall


class RankTree(Hashable, Protocol):
    """What is used here of a draft tree: the rank path of each node, root excluded."""

    @property
    def paths(self) -> Sequence[Sequence[int]]: ...


def expected_tokens_per_step(tree: RankTree | Sequence[Sequence[int]], cumulative_topk_accuracy: Accuracy) -> float:
    """``1 + sum over nodes of the chance that the walk reaches them``, heads taken as independent.

    Args:
        tree: a :class:`specmemo_kernels.tree.draft_tree.DraftTree`, or its rank paths as Medusa publishes them.
        cumulative_topk_accuracy: ``[head][k]``, how often one of the head's best ``k + 1`` guesses is right. Ranks
            beyond the table are extrapolated (:func:`extrapolated`).

    Raises:
        ValueError: a path deeper than there are heads, or a table that doesn't rise within 0..1.
    """
    paths = tree if isinstance(tree, Sequence) else tree.paths
    widest = max((rank for path in paths for rank in path), default=0)
    chance = rank_probabilities(extrapolated(cumulative_topk_accuracy, widest + 1))
    total = 1.0
    for path in paths:
        if len(path) > len(chance):
            raise ValueError(f"path {list(path)} needs {len(path)} heads, accuracies are there for {len(chance)}")
        total += math.prod(chance[d][r] for d, r in enumerate(path))
    return total


#: Steps that the running estimate starts from: as if each node had been offered this often with its prior's success.
PRIOR_OFFERS = 8
#: An offer's weight falls by 1/e in as many more offers of the same node.
MEMORY = 128


class RunningAcceptance:
    """How often a step accepts each node of a tree: the heads' accuracies at first, then what was really accepted.

    A node is offered in a step if it was verified and its parent is on the accepted path; the share of offers in which
    it was accepted as well estimates its chance given its parent. That holds whatever other nodes a step verifies, so
    steps over parts of the tree count like those over all of it. Older offers fade, because texts change.

    Args:
        tree: of which parts will be verified.
        cumulative: the prior, as for :func:`expected_tokens_per_step`; heads are taken as independent.
    """

    def __init__(self, tree: RankTree, cumulative: Accuracy) -> None:
        widest = max((rank for path in tree.paths for rank in path), default=0)
        chance = rank_probabilities(extrapolated(cumulative, widest + 1))
        self._paths = [tuple(path) for path in tree.paths]
        self._offered = {path: float(PRIOR_OFFERS) for path in self._paths}
        self._accepted = {path: PRIOR_OFFERS * chance[len(path) - 1][path[-1]] for path in self._paths}

    def record(self, tree: RankTree, last: Sequence[int]) -> None:
        """Count a step over ``tree``, a part of this one, in which the path to node ``last[b]`` was accepted.

        Node 0 is the root, node i the one of ``tree.paths[i - 1]``.
        """
        children = _children(tree)
        for node in last:
            reached = tuple(tree.paths[node - 1]) if node else ()
            for depth in range(len(reached) + 1):
                for path in children.get(reached[:depth], ()):
                    hit = path == reached[: depth + 1]
                    self._offered[path] += 1 - self._offered[path] / MEMORY
                    self._accepted[path] += hit - self._accepted[path] / MEMORY

    def gains(self) -> list[float]:
        """The share of steps that would accept each node if it was verified: 1 for the root, no child above its parent.

        Their sum over a tree is its expected tokens per step.
        """
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for path in self._paths:
            found[path] = found[path[:-1]] * min(1.0, self._accepted[path] / self._offered[path])
        return list(found.values())


@lru_cache(maxsize=64)
def _children(tree: RankTree) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """The paths that continue each path of a tree by one rank."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in map(tuple, tree.paths):
        found.setdefault(path[:-1], []).append(path)
    return found
