"""Which paths earn their place: brute-force enumeration and simulated heads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmemo_kernels.acceptance import (
    DEFAULT_ACCURACY,
    best_first_paths,
    expected_tokens_per_step,
    rank_probabilities,
)
from specmemo_kernels.tree import DraftTree

Heads = list[list[float]]


@st.composite
def accuracies(draw: st.DrawFn) -> Heads:
    """Cumulative accuracies of any shape: with ranks that are never right, and late ranks better than early ones."""
    heads = []
    for _ in range(draw(st.integers(1, 3))):
        weights = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        total = sum(weights) + draw(st.integers(1, 20))
        heads.append([sum(weights[: i + 1]) / total for i in range(len(weights))])
    return heads


def probability(path: tuple[int, ...], heads: Heads) -> float:
    return math.prod(heads[d][r] - (heads[d][r - 1] if r else 0.0) for d, r in enumerate(path))


def all_paths(heads: Heads) -> list[tuple[int, ...]]:
    """Every path that can be right."""
    ranks = [range(len(head)) for head in heads]
    paths = [p for depth in range(1, len(heads) + 1) for p in itertools.product(*ranks[:depth])]
    return [p for p in paths if probability(p, heads) > 0]


@settings(max_examples=150, deadline=None)
@given(accuracies(), st.integers(0, 45))
def test_best_first_is_the_best(heads: Heads, nodes: int) -> None:
    """The most probable of all paths, in falling order, as many as asked for or as there are, and a tree."""
    paths = best_first_paths(heads, nodes)
    every = sorted((probability(p, heads) for p in all_paths(heads)), reverse=True)
    assert [probability(p, heads) for p in paths] == pytest.approx(every[:nodes], rel=1e-9)
    assert len(set(paths)) == len(paths)
    DraftTree.from_paths(paths)


@settings(max_examples=50, deadline=None)
@given(accuracies())
def test_more_nodes_are_worth_more(heads: Heads) -> None:
    """Each tree continues the smaller one and is expected to give more tokens, each node less than the one before."""
    paths = best_first_paths(heads, 40)
    worth = [expected_tokens_per_step(paths[:n], heads) for n in range(len(paths) + 1)]
    gains = [b - a for a, b in itertools.pairwise(worth)]
    assert worth[0] == 1.0
    assert all(gain > 0 for gain in gains)
    assert all(b <= a * (1 + 1e-6) + 1e-12 for a, b in itertools.pairwise(gains))
    assert all(best_first_paths(heads, n) == paths[:n] for n in range(0, len(paths), 7))
    assert worth[-1] <= 1 + len(heads)


def simulated(paths: list[tuple[int, ...]], heads: Heads, steps: int) -> float:
    """Mean tokens per step when at each depth one rank is right, drawn on its own: walk while the tree has it."""
    g = torch.Generator().manual_seed(0)
    tree, tokens = set(paths), 0
    draws = [torch.rand(steps, generator=g).tolist() for _ in heads]
    for step in range(steps):
        path: tuple[int, ...] = ()
        for depth, head in enumerate(heads):
            rank = next((r for r, share in enumerate(head) if draws[depth][step] < share), None)
            if rank is None or (*path, rank) not in tree:
                break
            path = (*path, rank)
        tokens += len(path) + 1
    return tokens / steps


@pytest.mark.parametrize("nodes", [1, 4, 15, 63])
def test_expectation_is_what_a_simulation_finds(nodes: int) -> None:
    """20,000 simulated steps, to four standard errors (tokens per step lie between 1 and 6)."""
    heads = [list(row) for row in DEFAULT_ACCURACY]
    paths = best_first_paths(heads, nodes)
    assert simulated(paths, heads, 20_000) == pytest.approx(expected_tokens_per_step(paths, heads), abs=4 * 1.5 / 141)


def test_default_heads() -> None:
    """The published heads: their best guess is the first node, and 63 nodes go four deep."""
    paths = best_first_paths(DEFAULT_ACCURACY, 63)
    assert paths[:3] == [(0,), (0, 0), (1,)]
    assert max(map(len, paths)) == 4
    assert sum(len(path) == 1 for path in paths) == 5
    assert expected_tokens_per_step([(0,)], DEFAULT_ACCURACY) == pytest.approx(1.5604)
    assert expected_tokens_per_step([(0,), (0, 1)], DEFAULT_ACCURACY) == pytest.approx(1.5604 + 0.5604 * 0.1072)


def test_rank_probabilities_sum_to_the_accuracy() -> None:
    for row, ranks in zip(DEFAULT_ACCURACY, rank_probabilities(DEFAULT_ACCURACY), strict=True):
        assert list(itertools.accumulate(ranks)) == pytest.approx(list(row))


def test_a_rank_that_is_never_right_is_passed_over() -> None:
    """Rank 1 has no share, rank 2 the largest: the path through 2 comes first, the one through 1 never."""
    assert best_first_paths([[0.2, 0.2, 0.7]], 5) == [(2,), (0,)]


@pytest.mark.parametrize(
    "bad", [[], [0.5, 0.4], [0.5, 1.01], [-0.1, 0.5], [float("nan")], [0.2, float("nan"), 0.3], [0.3, float("inf")]]
)
def test_bad_accuracies_are_refused(bad: list[float]) -> None:
    """By head and value."""
    for use in (rank_probabilities, lambda a: best_first_paths(a, 3), lambda a: expected_tokens_per_step([(0,)], a)):
        with pytest.raises(ValueError, match=r"accuracy of head 1 must rise within 0..1, got \["):
            use([[0.5], bad])


def test_path_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path \[0, 0, 0\] needs 3 heads, accuracies are there for 2"):
        expected_tokens_per_step([(0, 0, 0)], [[0.5], [0.5]])


def test_rank_without_an_accuracy_is_worth_nothing() -> None:
    assert expected_tokens_per_step([(0,), (7,)], [[0.5, 0.6]]) == pytest.approx(1.5)
