"""The best paths of a tree, against brute-force enumeration and simulated heads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    best_first_paths,
    expected_tokens_per_step,
    extrapolated,
    rank_probabilities,
)
from specmemo_kernels.tree.draft_tree import DraftTree

Heads = list[list[float]]


@st.composite
def accuracies(draw: st.DrawFn) -> Heads:
    """Random cumulative accuracies, also with ranks that are never right and late ranks better than early ones."""
    heads = []
    for _ in range(draw(st.integers(1, 3))):
        weights = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        total = sum(weights) + draw(st.integers(1, 20))
        heads.append([sum(weights[: i + 1]) / total for i in range(len(weights))])
    return heads


def probability(path: tuple[int, ...], heads: Heads) -> float:
    return math.prod(heads[d][r] - (heads[d][r - 1] if r else 0.0) for d, r in enumerate(path))


def all_paths(heads: Heads) -> list[tuple[int, ...]]:
    """All paths with a probability above 0."""
    ranks = [range(len(head)) for head in heads]
    paths = [p for depth in range(1, len(heads) + 1) for p in itertools.product(*ranks[:depth])]
    return [p for p in paths if probability(p, heads) > 0]


@settings(max_examples=150, deadline=None)
@given(accuracies(), st.integers(0, 45))
def test_best_first_is_the_best(heads: Heads, nodes: int) -> None:
    """The most probable paths in falling order form a tree; their number is limited by the possible paths."""
    paths = best_first_paths(heads, nodes)
    every = sorted((probability(p, heads) for p in all_paths(heads)), reverse=True)
    assert [probability(p, heads) for p in paths] == pytest.approx(every[:nodes], rel=1e-9)
    assert len(set(paths)) == len(paths)
    DraftTree.from_paths(paths)


@settings(max_examples=50, deadline=None)
@given(accuracies())
def test_more_nodes_are_worth_more(heads: Heads) -> None:
    """Each tree extends the smaller one. Expected tokens rise, each node adding less than the one before."""
    paths = best_first_paths(heads, 40)
    worth = [expected_tokens_per_step(paths[:n], heads) for n in range(len(paths) + 1)]
    gains = [b - a for a, b in itertools.pairwise(worth)]
    assert worth[0] == 1.0
    assert all(gain > 0 for gain in gains)
    assert all(b <= a * (1 + 1e-6) + 1e-12 for a, b in itertools.pairwise(gains))
    assert all(best_first_paths(heads, n) == paths[:n] for n in range(0, len(paths), 7))
    assert worth[-1] <= 1 + len(heads)


def simulated(paths: list[tuple[int, ...]], heads: Heads, steps: int) -> float:
    """Mean tokens per step when at each depth one random rank is right: walk while the tree has it."""
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
    """Rank 1 has no share, rank 2 the largest: the path through 2 comes first, and no path goes through 1."""
    assert best_first_paths([[0.2, 0.2, 0.7]], 5) == [(2,), (0,)]


@pytest.mark.parametrize(
    "bad", [[], [0.5, 0.4], [0.5, 1.01], [-0.1, 0.5], [float("nan")], [0.2, float("nan"), 0.3], [0.3, float("inf")]]
)
def test_bad_accuracies_are_refused(bad: list[float]) -> None:
    """The error names head and value."""
    for use in (rank_probabilities, lambda a: best_first_paths(a, 3), lambda a: expected_tokens_per_step([(0,)], a)):
        with pytest.raises(ValueError, match=r"accuracy of head 1 must rise within 0..1, got \["):
            use([[0.5], bad])


def test_path_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path \[0, 0, 0\] needs 3 heads, the accuracy table has 2"):
        expected_tokens_per_step([(0, 0, 0)], [[0.5], [0.5]])


#: Published by FasterDecoding/Medusa: the tree of its MT-Bench runs, the heads' accuracies (assets/medusa_acc.csv), and
#: the totals of the 7B run's answer file. Steps are counted from 0 there, so each of the 160 turns took one more.
PUBLISHED_TREE = [
    [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0], [0, 5], [0, 0, 1], [5],
    [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], [9], [1, 0, 0], [0, 2, 0],
    [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5], [0, 0, 0, 0], [0, 1, 1], [0, 0, 6], [0, 3, 0], [5, 0],
    [1, 3], [0, 0, 7], [0, 0, 8], [0, 0, 9], [6, 0], [0, 4, 0], [1, 4], [7, 0], [0, 1, 2], [2, 0, 0], [3, 1], [2, 2],
    [8, 0], [0, 5, 0], [1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, 0], [0, 0, 0, 1], [1, 6], [0, 7, 0],
]  # fmt: skip
MEASURED_TOKENS, MEASURED_STEPS = 43754, 17058


def test_published_run() -> None:
    """Within 8 % of the published run's count, whether steps count from 0 or 1; for a tree and for its paths."""
    predicted = expected_tokens_per_step(PUBLISHED_TREE, DEFAULT_ACCURACY)
    assert predicted == pytest.approx(MEASURED_TOKENS / MEASURED_STEPS, rel=0.08)
    assert predicted == pytest.approx(MEASURED_TOKENS / (MEASURED_STEPS + 160), rel=0.08)
    assert expected_tokens_per_step(DraftTree.from_paths(PUBLISHED_TREE), DEFAULT_ACCURACY) == predicted


#: Top-1 to top-10 of heads that were measured to rank 10 (the bundled model's, on held-out files).
TEN_RANKS = [
    [0.3972, 0.5192, 0.5888, 0.631, 0.6623, 0.6866, 0.7078, 0.7243, 0.7375, 0.7494],
    [0.2773, 0.3925, 0.4634, 0.5119, 0.5483, 0.5766, 0.5998, 0.6204, 0.6375, 0.6525],
    [0.2222, 0.3261, 0.3958, 0.4422, 0.4776, 0.5046, 0.5297, 0.55, 0.5687, 0.5835],
    [0.1907, 0.2848, 0.3456, 0.3952, 0.4331, 0.4615, 0.4861, 0.507, 0.5256, 0.5425],
]


def test_extrapolation_finds_what_was_measured() -> None:
    """From the first five ranks the next five are predicted within 2 points, for measured heads."""
    found = extrapolated([row[:5] for row in TEN_RANKS], 10)
    for row, measured in zip(found, TEN_RANKS, strict=True):
        assert row[:5] == measured[:5]
        assert row == pytest.approx(measured, abs=0.02)


@settings(max_examples=100, deadline=None)
@given(accuracies(), st.integers(1, 12))
def test_extrapolated_tables_are_tables(heads: Heads, ranks: int) -> None:
    """Rows rise within 0..1 and begin with the given ranks."""
    found = extrapolated(heads, ranks)
    rank_probabilities(found)
    assert [len(row) for row in found] == [max(len(row), ranks) for row in heads]
    assert all(row[: len(given)] == given for row, given in zip(found, heads, strict=True))


def test_ranks_beyond_the_table() -> None:
    """By hand: misses 0.5, 0.4 fall by 0.4 / 0.5 per doubling. A single rank or a full table isn't extrapolated."""
    assert extrapolated([[0.5, 0.6]], 4)[0] == pytest.approx([0.5, 0.6, 1 - 0.4 * 1.5 ** math.log2(0.8), 0.68])
    assert extrapolated([[0.5], [0.4, 1.0]], 3) == [[0.5, 0.5, 0.5], [0.4, 1.0, 1.0]]
    assert expected_tokens_per_step([(0,), (3,)], [[0.5, 0.6]]) == pytest.approx(
        1.5 + 0.4 * (1.5 ** math.log2(0.8) - 0.8)
    )
