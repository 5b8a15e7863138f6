"""Acceptance probabilities of draft trees: the best tree for given head accuracies, and a running estimate."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

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
#: The same of drafters that read their own drafts, at any depth behind right ones. The first rank is EAGLE-3's for
#: Llama-3.1-8B-Instruct on MT-Bench, greedy, with chains of seven (github.com/vllm-project/vllm, issue 26191): 0.74 of
#: the first drafts are right, and 0.73 to 0.76 of those behind right ones. Other ranks aren't published: of the misses,
#: they have as many as those of Medusa's first head.
RECURRENT_ACCURACY: Accuracy = ((0.74, 0.806, 0.839, 0.858, 0.870),)


def deepened(cumulative: Accuracy, depth: int) -> list[Sequence[float]]:
    """The first ``depth`` rows of a table; its last row stands for all deeper ones."""
    rows = list(cumulative[:depth])
    return rows + [cumulative[-1]] * (depth - len(rows))


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


@dataclass(frozen=True)
class TreePart:
    """A part of the planned tree: its size and depth, its expected tokens per step, and a function that makes it."""

    size: int
    depth: int
    tokens: float
    make: Callable[[], Trees]


class Acceptance(Protocol):
    """A running estimate of the tokens per step of the planned tree and of its parts."""

    def record(self, tree: Trees, paths: Sequence[Sequence[int]]) -> None:
        """Count a step over ``tree``, a part of the planned one; ``paths[b]``: accepted nodes, root first."""

    def parts(self, sizes: Container[int]) -> Iterator[TreePart]:
        """The likeliest part of each of ``sizes``, and the whole tree as the last."""


class RunningAcceptance:
    """Running estimate of each node's acceptance probability, from head accuracies (the prior) and accepted paths.

    A node is offered in a step if it was verified and its parent was accepted. The share of accepted offers estimates
    its probability given its parent, independent of the other verified nodes. Old offers fade, because texts change.

    Args:
        tree: the tree whose parts will be verified.
        cumulative: the prior, as for :func:`expected_tokens_per_step`; heads are assumed independent.
        chains: the likeliest chains are parts, too (for recurrent layers, which compute each path by itself).
    """

    def __init__(self, tree: DraftTree, cumulative: Accuracy, *, chains: bool = False) -> None:
        self._chains = chains
        max_rank = max((rank for path in tree.paths for rank in path), default=0)
        prior = rank_probabilities(extrapolated(cumulative, max_rank + 1))
        self._tree, self._paths = tree, tree.paths
        self._offered = {path: float(PRIOR_OFFERS) for path in self._paths}
        self._accepted = {path: PRIOR_OFFERS * prior[len(path) - 1][path[-1]] for path in self._paths}

    def record(self, tree: Trees, paths: Sequence[Sequence[int]]) -> None:
        """See :class:`Acceptance`. Node 0 is the root, node i has the path ``tree.paths[i - 1]``."""
        assert isinstance(tree, DraftTree), "the planned tree is static"
        children = _children(tree)
        for *_, node in paths:
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

    def parts(self, sizes: Container[int]) -> Iterator[TreePart]:
        """See :class:`Acceptance`."""
        tree, gains = self._tree, self.gains()
        if self._chains:
            yield from self._chain_parts(gains, sizes)
        tokens, depth = 0.0, 0
        order = sorted(range(tree.size), key=lambda node: (-gains[node], node))  # parents before children
        for size, node in enumerate(order, start=1):
            tokens += gains[node]
            depth = max(depth, tree.depths[node])
            if size in sizes or size == tree.size:
                yield TreePart(size, depth, tokens, partial(tree.part, order[:size]))

    def _chain_parts(self, gains: Sequence[float], sizes: Container[int]) -> Iterator[TreePart]:
        """The first nodes of the likeliest chain, for each size."""
        tree, chain, tokens = self._tree, [0], 1.0
        while below := [node for node in range(1, tree.size) if tree.parents[node] == chain[-1]]:
            chain.append(max(below, key=lambda node: (gains[node], -node)))
            tokens += gains[chain[-1]]
            if len(chain) in sizes:
                yield TreePart(len(chain), len(chain) - 1, tokens, partial(tree.part, chain[:]))


class RankAcceptance:
    """Running estimate for dynamic trees, whose nodes are sorted by the drafter's score.

    It estimates the acceptance of the i-th best node, and the share of steps that accept at least d drafts. A tree of
    fewer nodes has the same best nodes. The tokens of a tree of less depth are a lower bound: what deeper nodes
    contributed is subtracted, though other nodes take their places.

    Args:
        budget: the planned size.
        cumulative: the prior, as for :func:`expected_tokens_per_step`, of the best static tree of that size. The last
            row stands for all deeper ones.
    """

    def __init__(self, budget: TreeBudget, cumulative: Accuracy) -> None:
        self._budget = budget
        table = extrapolated(deepened(cumulative, budget.max_depth), budget.width)
        prior, paths = rank_probabilities(table), best_first_paths(table, budget.size - 1)
        gains = [math.prod(prior[depth][rank] for depth, rank in enumerate(path)) for path in paths]
        self._nodes = [1.0, *gains, *[0.0] * (budget.size - 1 - len(gains))]
        self._depths = [1.0] + [0.0] * budget.max_depth
        for path, gain in zip(paths, gains, strict=True):
            self._depths[len(path)] += gain
        self._offers = [PRIOR_OFFERS] * budget.size, [PRIOR_OFFERS] * (budget.max_depth + 1)

    def record(self, tree: Trees, paths: Sequence[Sequence[int]]) -> None:
        """See :class:`Acceptance`."""
        for path in paths:
            accepted = set(path)
            for node in range(1, tree.size):
                _average(self._nodes, self._offers[0], node, node in accepted)
            for depth in range(1, tree.max_depth + 1):
                _average(self._depths, self._offers[1], depth, depth < len(path))

    def parts(self, sizes: Container[int]) -> Iterator[TreePart]:
        """See :class:`Acceptance`."""
        budget, drafts, total = self._budget, 0.0, sum(self._nodes[1:])
        for size in range(1, budget.size + 1):
            drafts += self._nodes[size - 1] if size > 1 else 0.0
            if size not in sizes and size != budget.size:
                continue
            deepest = min(budget.max_depth, size - 1)
            for depth in range(deepest + 1):
                if depth in sizes or depth == deepest:
                    lost = sum(self._depths[depth + 1 : deepest + 1]) * (drafts / total if total else 0.0)
                    part = partial(budget.limited, size, depth)
                    yield TreePart(size, depth, 1.0 + max(0.0, drafts - lost), part)


def _average(means: list[float], offers: list[int], index: int, hit: bool) -> None:
    """Add a sample to a running mean, whose oldest samples fade as in :class:`RunningAcceptance`."""
    offers[index] = min(offers[index] + 1, MEMORY)
    means[index] += (hit - means[index]) / offers[index]


@lru_cache(maxsize=64)
def _children(tree: DraftTree) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in tree.paths:
        children.setdefault(path[:-1], []).append(path)
    return children
