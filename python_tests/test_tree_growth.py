"""Dynamic trees equal EAGLE-2's and DDTree's rules on random inputs, and are trees whatever the scores are."""

from __future__ import annotations

import pytest
import torch
from drafter_oracles import ddtree, eagle2_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from specmemo_kernels.drafting.growth import Children, grow
from specmemo_kernels.forward.batch import DraftedTrees
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, RankAcceptance
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, most_nodes, tree_argument

Tensor = torch.Tensor
VOCAB = 11


class Tables:
    """Random log-probabilities behind every path of each sequence.

    ``rounded``: to few values, so that scores tie, and some are 0 or minus infinity.
    """

    def __init__(self, sequences: int, seed: int, rounded: bool = False, by_depth: bool = False) -> None:
        self.sequences, self.seed, self.rounded, self.by_depth = sequences, seed, rounded, by_depth
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in range(sequences)]

    def log_p(self, row: int, path: tuple[int, ...]) -> Tensor:
        key = (self.seed, row, len(path)) if self.by_depth else (self.seed, row, *path)
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        values = torch.rand(VOCAB, generator=generator, dtype=torch.float64)
        if self.rounded:
            return torch.tensor([0.0, -1.0, -2.0, -torch.inf])[(values * 4).long()].float()
        return (values * 4).log_softmax(0).float()

    def _children(self, width: int) -> Children:
        log_p = torch.stack([torch.stack([self.log_p(r, p) for p in paths]) for r, paths in enumerate(self._paths)])
        order = log_p.sort(dim=2, descending=True, stable=True)
        return order.values[..., :width], order.indices[..., :width]

    def grow(self, tree: DraftTree | TreeBudget) -> DraftedTrees:
        self._paths = [[()] for _ in range(self.sequences)]

        def expand(depth: int, parent: Tensor, tokens: Tensor) -> Children:
            self._paths = [
                [(*self._paths[row][p], t) for p, t in zip(parent[row].tolist(), tokens[row].tolist(), strict=True)]
                for row in range(self.sequences)
            ]
            assert {len(path) for paths in self._paths for path in paths} == {depth}
            return self._children(tree.width)

        return grow(torch.arange(self.sequences) + 100, tree, self._children, expand)


def paths_of(drafted: DraftedTrees, row: int) -> list[tuple[int, ...]]:
    """Token paths; checks the structure."""
    tokens, parents, depths = (x[row].tolist() for x in (drafted.tokens, drafted.parents, drafted.depths))
    assert tokens[0] == 100 + row
    assert (parents[0], depths[0]) == (-1, 0)
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1
        paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


budgets = st.tuples(st.integers(0, 5), st.integers(1, 6), st.floats(0, 1)).map(
    lambda x: TreeBudget(x[0] + 1 + round(x[2] * (most_nodes(x[0], x[1]) - x[0] - 1)), x[0], x[1])
)


@settings(max_examples=examples(150), deadline=None)
@given(budget=budgets, seed=st.integers(0, 999), sequences=st.integers(1, 3))
def test_trees_by_the_rule_of_eagle2(budget: TreeBudget, seed: int, sequences: int) -> None:
    tables = Tables(sequences, seed)
    drafted = tables.grow(budget)
    for row in range(sequences):
        paths = paths_of(drafted, row)
        if budget.max_depth:
            expected = eagle2_tree(
                lambda p, row=row: tables.log_p(row, p), budget.size, budget.max_depth - 1, budget.width
            )
            assert set(paths) == expected
            scores = [sum(float(tables.log_p(row, p[:i])[p[i]]) for i in range(len(p))) for p in paths]
            assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-5), "best first"
        assert len(paths) == budget.size - 1


@settings(max_examples=examples(60), deadline=None)
@given(depth=st.integers(1, 4), size=st.integers(2, 12), seed=st.integers(0, 999))
def test_trees_by_the_rule_of_ddtree(depth: int, size: int, seed: int) -> None:
    """Distributions that don't depend on the path, and a beam of all nodes."""
    width = min(VOCAB, size - 1)
    depth = min(depth, size - 1)
    tables = Tables(2, seed, by_depth=True)
    drafted = tables.grow(TreeBudget(size, depth, width))
    for row in range(2):
        table = torch.stack([tables.log_p(row, (0,) * d) for d in range(depth)])
        assert set(paths_of(drafted, row)) == ddtree(table, size, width)


@settings(max_examples=examples(80), deadline=None)
@given(budget=budgets, seed=st.integers(0, 999))
def test_ties_and_impossible_tokens(budget: TreeBudget, seed: int) -> None:
    """Children that are as likely as their parents, and candidates without any probability: still trees."""
    drafted = Tables(2, seed, rounded=True).grow(budget)
    for row in range(2):
        tokens = drafted.tokens[row].tolist()
        paths_of(drafted, row)
        assert all(-1 <= token < VOCAB for token in tokens[1:])


@settings(max_examples=examples(60), deadline=None)
@given(budget=budgets, seed=st.integers(0, 99))
def test_the_mask_has_all_ancestors(budget: TreeBudget, seed: int) -> None:
    layout = Tables(3, seed).grow(budget).layout(budget.max_depth)
    size = budget.size
    for row in range(3):
        part = slice(row * size, (row + 1) * size)
        words = layout.tree_mask[part].tolist()
        for node, parent in enumerate(layout.parents[part].tolist()):
            bits = {i for i in range(size) if words[node][i // 64] >> (i % 64) & 1}
            above = set() if parent < 0 else {i for i in range(size) if words[parent][i // 64] >> (i % 64) & 1}
            assert bits == {node} | above
    assert layout.qo_indptr.tolist() == [0, size, 2 * size, 3 * size]
    assert layout.row.tolist() == [0] * size + [1] * size + [2] * size


def test_nan_scores() -> None:
    """A drafter's NaN costs acceptance only."""
    nan = torch.full((1, 1, 3), torch.nan)

    def expand(depth: int, parent: Tensor, tokens: Tensor) -> Children:
        count = parent.shape[1]
        return nan.expand(1, count, 3), torch.arange(3).expand(1, count, 3)

    drafted = grow(torch.tensor([100]), TreeBudget(8, 3, 3), lambda _: (nan, torch.arange(3)[None, None]), expand)
    assert drafted.tokens.tolist() == [[100, *[-1] * 7]]
    paths_of(drafted, 0)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(1, 12))
def test_static_trees(seed: int, size: int) -> None:
    """Nodes in any order: a node of rank r has the r-th best token behind its parent."""
    generator = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = []
    while len(paths) < size - 1:
        above = [(), *(p for p in paths if len(p) < 4)][
            int(torch.randint(0, len(paths) + 1, (), generator=generator)) % (1 + sum(len(p) < 4 for p in paths))
        ]
        path = (*above, int(torch.randint(0, 4, (), generator=generator)))
        if path not in paths:
            paths.append(path)
    tree, tables = DraftTree.from_paths(paths), Tables(2, seed)
    drafted = tables.grow(tree)
    for row in range(2):
        found = dict(zip(tree.paths, paths_of(drafted, row), strict=True))
        for path, tokens in found.items():
            ranked = tables.log_p(row, tokens[:-1]).sort(descending=True, stable=True).indices
            assert tokens[-1] == int(ranked[path[-1]])
            assert tokens[:-1] == found.get(path[:-1], ())


# --- sizes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(budget=budgets, size=st.integers(1, 200), depth=st.integers(0, 9))
def test_smaller_budgets(budget: TreeBudget, size: int, depth: int) -> None:
    if size <= budget.size:
        pruned = budget.pruned(size)
        assert pruned.size == size or pruned.size == most_nodes(pruned.max_depth, pruned.width)
        assert pruned.max_depth == min(budget.max_depth, size - 1)
    else:
        with pytest.raises(ValueError, match=f"to {size}; size must be from 1 to {budget.size}"):
            budget.pruned(size)
    cut = budget.truncated(depth)
    assert (cut is budget) == (depth >= budget.max_depth)
    assert cut.max_depth == min(depth, budget.max_depth)
    assert cut.size <= budget.size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 0, 1), r"TreeBudget\.size.*0"),
        ((2, 2, 1), "depth 2 from a beam of 1 has 3 to 3 nodes, not 2"),
        ((5, 1, 3), "depth 1 from a beam of 3 has 2 to 4 nodes, not 5"),
        ((2, -1, 3), r"TreeBudget\.max_depth.*-1"),
        ((2, 1, 0), r"TreeBudget\.width.*0"),
    ],
)
def test_impossible_budgets(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeBudget(*sizes)


def test_a_budget_is_a_tree_argument() -> None:
    budget = TreeBudget(8, 3, 4)
    assert tree_argument(budget) is budget


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_the_estimate_follows_accepted_paths() -> None:
    """Node 3 is accepted in half of the steps, behind node 1, which always is; nothing else ever is."""
    budget = TreeBudget(6, 3, 3)
    acceptance = RankAcceptance(budget, DEFAULT_ACCURACY)
    whole = list(acceptance.parts(range(100)))[-1]
    assert (whole.size, whole.depth) == (6, 3)
    assert 1.5 < whole.tokens < 3
    assert whole.make() == budget
    for step in range(2000):
        acceptance.record(budget, [[0, 1, 3] if step % 2 else [0, 1]])
    parts = {(part.size, part.depth): part.tokens for part in acceptance.parts(range(100))}
    assert parts[1, 0] == 1
    assert parts[2, 1] == pytest.approx(2, abs=0.05)
    assert parts[4, 2] == pytest.approx(2.5, abs=0.1)
    assert parts[6, 3] == pytest.approx(2.5, abs=0.1)
    assert parts[6, 1] == pytest.approx(2, abs=0.1), "depth 2 is lost"


def test_steps_over_parts_leave_the_rest_alone() -> None:
    budget = TreeBudget(6, 3, 3)
    acceptance = RankAcceptance(budget, DEFAULT_ACCURACY)
    before = {(p.size, p.depth): p.tokens for p in acceptance.parts(range(100))}
    for _ in range(500):
        acceptance.record(budget.limited(2, 1), [[0]])
    after = {(p.size, p.depth): p.tokens for p in acceptance.parts(range(100))}
    assert after[2, 1] < 1.05
    assert after[6, 3] - after[2, 1] == pytest.approx(before[6, 3] - before[2, 1], abs=1e-9)
