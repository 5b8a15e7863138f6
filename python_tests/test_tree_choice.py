"""The best part of a tree: smaller with more sequences, larger with better guesses; and the cost of exploration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selection import sample
from test_families import batch, greedy
from tiny_models import VOCAB, OracleDrafter, tiny_model
from toy_model import PROMPTS, decoder, finish, same_as_plain

import specmemo_kernels as sk
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.hf.pool import GraphUse
from specmemo_kernels.planning.memory_plan import MemoryPlan
from specmemo_kernels.tree.acceptance import (
    DEFAULT_ACCURACY,
    Accuracy,
    RunningAcceptance,
    best_first_paths,
    expected_tokens_per_step,
)
from specmemo_kernels.tree.choice import PassSeconds, TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

TREE = DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY, 31))
SLOPE = PassSeconds(((1, 1.0), (8, 1.1), (32, 2.0), (128, 8.0)))
STEEP = PassSeconds(((1, 1.0), (101, 101.0)))


def chooser_for(tree: DraftTree = TREE, accuracy: Accuracy = DEFAULT_ACCURACY, **options: object) -> TreeChooser:
    return TreeChooser(tree, RunningAcceptance(tree, accuracy), **({"seconds": SLOPE} | options))


class Text:
    """Accepts each rank of a depth with its own probability, given that its parent was accepted."""

    def __init__(self, chances: list[list[float]], seed: int = 0) -> None:
        self.chances, self.random = chances, random.Random(seed)

    def last(self, tree: DraftTree) -> int:
        """The last accepted node of one step over ``tree``."""
        path: tuple[int, ...] = ()
        place = {(): 0} | {p: node for node, p in enumerate(tree.paths, start=1)}
        for row in self.chances:
            rank = self.random.choices([*range(len(row)), -1], [*row, 1 - sum(row)])[0]
            if (*path, rank) not in place:
                break
            path = (*path, rank)
        return place[path]


def test_seconds_lie_on_lines() -> None:
    assert SLOPE.at(1) == SLOPE.at(0) == 1.0
    assert SLOPE.at(20) == pytest.approx(1.1 + 0.9 * 12 / 24)
    assert SLOPE.at(128) == pytest.approx(8.0)
    assert SLOPE.at(256) == pytest.approx(16.0)
    assert PassSeconds(((4, 0.5),)).at(100) == 0.5


def test_the_estimate_starts_from_the_accuracies() -> None:
    gains = RunningAcceptance(TREE, DEFAULT_ACCURACY).gains()
    assert sum(gains) == pytest.approx(expected_tokens_per_step(TREE, DEFAULT_ACCURACY))
    assert RunningAcceptance(DraftTree.chain(3), [[0.5]] * 3).gains() == [1.0, 0.5, 0.25, 0.125]


def test_the_estimate_finds_the_chances() -> None:
    """From steps over any parts of the tree; nodes that were never verified keep their prior."""
    tree = DraftTree.from_paths([[0], [1], [0, 0], [2], [0, 1], [1, 0]])
    text, acceptance = Text([[0.3, 0.4, 0.1], [0.6, 0.2]]), RunningAcceptance(tree, [[0.7, 0.8, 0.9], [0.5, 0.6]])
    parts = [tree.part(nodes) for nodes in ([0, 1], [0, 2, 6], [0, 1, 2, 3, 5, 6])]
    for part in itertools.islice(itertools.cycle(parts), 3000):
        acceptance.record(part, [[text.last(part)]])
    gains = acceptance.gains()
    expected = [1.0, 0.3, 0.4, 0.3 * 0.6, 0.1, 0.3 * 0.2, 0.4 * 0.6]
    seen = [0, 1, 2, 3, 5, 6]
    assert [gains[i] for i in seen] == pytest.approx([expected[i] for i in seen], abs=0.1)
    assert gains[4] == pytest.approx(0.1)
    assert all(gains[tree.parents[node]] >= gains[node] for node in range(1, tree.size))


def test_the_estimate_counts_a_batch_and_forgets() -> None:
    tree = DraftTree.chain(1)
    acceptance = RunningAcceptance(tree, [[0.5]])
    acceptance.record(tree, [[0, 1], [0, 1], [0], [0, 1]])
    assert acceptance.gains()[1] == pytest.approx((4 + 3) / (8 + 4), rel=0.02)
    for _ in range(1000):
        acceptance.record(tree, [[0, 1]])
    assert acceptance.gains()[1] > 0.99
    for _ in range(300):
        acceptance.record(tree, [[0]])
    assert acceptance.gains()[1] < 0.15


def all_parts(tree: DraftTree) -> list[list[int]]:
    """Every set of nodes that is a tree, by brute force."""
    parts = [[0]]
    for node in range(1, tree.size):
        parts += [[*part, node] for part in parts if tree.parents[node] in part]
    return parts


@pytest.mark.parametrize("draft_seconds", [None, PassSeconds(((1, 0.2), (8, 0.3)))])
@pytest.mark.parametrize("sequences", [1, 2, 5, 16])
def test_the_best_part_is_the_best(sequences: int, draft_seconds: PassSeconds | None) -> None:
    """Among all parts of a tree of 12 nodes, after timed steps; up to the tolerated tie."""
    tree = DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY, 11))
    chooser = chooser_for(tree, draft_seconds=draft_seconds)
    text = Text([[0.2, 0.5], [0.1, 0.1, 0.6]])
    for _ in range(160):
        step = chooser.tree_for(sequences)
        drafting = 0.1 * (step.size > 1)
        if draft_seconds is not None:
            drafting = step.max_depth * (draft_seconds.at(sequences) + 0.1)
        seconds = SLOPE.at(sequences * step.size) + 0.7
        chooser.stepped(step, [[text.last(step)]] * sequences, seconds, drafting)
    gains = chooser.acceptance.gains()

    def speed(part: list[int]) -> float:
        seconds, depth = SLOPE.at(sequences * len(part)) + 0.7, max(tree.depths[node] for node in part)
        seconds += 0.1 * min(depth, 1) if draft_seconds is None else depth * (draft_seconds.at(sequences) + 0.1)
        return sum(gains[node] for node in part) / seconds

    chosen = chooser.tree_for(sequences)
    nodes = [0, *(tree.paths.index(path) + 1 for path in chosen.paths)]
    best = max(map(speed, all_parts(tree)))
    assert speed(nodes) >= best / (1.02 if draft_seconds is None else 1.05)


@pytest.mark.parametrize("seconds_per_path", [0.0, 0.8])
def test_chains_where_paths_cost_time(seconds_per_path: float) -> None:
    """Passes were measured over chains. Where each path takes time of its own, a chain is found within a few steps."""
    tree, sure = DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY, 7)), [[0.6, 0.15], [0.6, 0.1], [0.6]]
    seconds = PassSeconds(((1, 1.0), (8, 1.2)))
    chooser = TreeChooser(tree, RunningAcceptance(tree, DEFAULT_ACCURACY, chains=True), seconds, by_depth=True)
    text, chains = Text(sure), []
    for _ in range(128):
        step = chooser.tree_for(1)
        assert isinstance(step, DraftTree)
        leaves = step.size - len({parent for parent in step.parents if parent >= 0})
        chains.append(leaves == 1)
        true = seconds.at(step.size) + seconds_per_path * (leaves - 1)
        chooser.stepped(step, [[*ancestors(step, text.last(step))]], true, 0.0)
    assert step.size > 1
    late = sum(chains[32:]) / len(chains[32:])
    assert late > 0.9 if seconds_per_path else late < 0.1


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """The path from the root to a node."""
    return [*ancestors(tree, tree.parents[node]), node] if node else [0]


def test_more_sequences_get_less() -> None:
    chooser = chooser_for()
    sizes = [chooser.tree_for(n).size for n in range(1, 40)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 3
    assert sizes[-1] == 1


def run(chooser: TreeChooser, text: Text, steps: int, real: PassSeconds | None = None) -> tuple[float, list[int]]:
    """Tokens per second of some steps of one sequence, and the verified sizes.

    ``real``: true pass times, if the chooser has others.
    """
    tokens, seconds, sizes = 0, 0.0, []
    for _ in range(steps):
        tree = chooser.tree_for(1)
        node = text.last(tree)
        took = (real or chooser.seconds).at(tree.size)
        chooser.stepped(tree, [[node]], took)
        tokens, seconds = tokens + 1 + tree.depths[node], seconds + took
        sizes.append(tree.size)
    return tokens / seconds, sizes


def test_it_follows_the_text() -> None:
    """Guesses that are always right, then never, then right again."""
    right, wrong = Text([[1.0]] * 8), Text([[0.0]] * 8)
    chooser = chooser_for(DraftTree.chain(8), [[0.5]] * 8)
    assert run(chooser, right, 400)[1][-1] == 9
    sizes = run(chooser, wrong, 600)[1]
    assert sizes[-16:].count(1) >= 15
    assert run(chooser, right, 2000)[1][-1] == 9


@pytest.mark.parametrize("chances", [[[0.6, 0.1], [0.4, 0.1], [0.3]], [[0.05], [0.05]], [[0.9], [0.9], [0.9], [0.9]]])
@pytest.mark.parametrize("seconds", [SLOPE, STEEP])
def test_never_much_worse_than_the_best_that_stays(chances: list[list[float]], seconds: PassSeconds) -> None:
    """Compared with every fixed prefix of the tree, in expectation: exploration costs 1 %, wrong estimates and learning
    hardly more.
    """
    tree = TREE.pruned(16)
    speed, _ = run(chooser_for(tree, seconds=seconds), Text(chances), 6000)
    best = max(
        expected_tokens_per_step(tree.pruned(size), [list(itertools.accumulate(row)) for row in pad(chances, tree)])
        / seconds.at(size)
        for size in range(1, tree.size + 1)
    )
    assert speed >= 0.97 * best  # 6000 steps: half a per cent of sampling noise


@pytest.mark.parametrize("told", sample([1.15, 1.0, 0.7], [1.15]))
def test_pass_times_that_were_measured_wrongly(told: float) -> None:
    """Steps correct the time of a pass by its rows: here eight rows take hardly longer than four."""
    tree, chances = TREE.pruned(8), [[0.6, 0.1], [0.4, 0.1], [0.3]]
    real = PassSeconds(((1, 1.0), (4, 1.3), (8, 1.34)))
    wrong = PassSeconds(((1, 1.0), (4, 1.2), (8, 1.34 * told)))
    alone, _ = run(chooser_for(tree, seconds=real), Text(chances), 6000)
    speed, _ = run(chooser_for(tree, seconds=wrong), Text(chances), 6000, real)
    assert speed >= 0.98 * alone


def pad(chances: list[list[float]], tree: DraftTree) -> list[list[float]]:
    """The same probabilities for all depths and ranks of a tree."""
    rows = chances + [[0.0]] * (tree.max_depth - len(chances))
    return [row + [0.0] * (tree.width - len(row)) for row in rows]


def test_looking_costs_one_per_cent() -> None:
    """If the whole tree takes 12 times as long, it is verified that much more rarely."""
    chooser = chooser_for(TREE, [[0.01]] * 5, seconds=STEEP)
    _, sizes = run(chooser, Text([[0.0]] * 5), 20000)
    looks = [i for i, size in enumerate(sizes) if size == TREE.size]
    assert looks
    assert (sum(sizes) - len(sizes)) / len(sizes) <= 0.012


def test_a_decoder_with_a_chooser_writes_the_same() -> None:
    """Trees change from step to step as sequences come and go; the estimate has the steps' results."""
    tree = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    spec = decoder(tree, "half")
    spec.chooser = chooser_for(tree, [[0.5, 0.8], [0.5, 0.8], [0.5]])
    states = [SequenceState(PROMPTS[i % 4], 12 + 5 * i) for i in range(4)]
    finish(spec, [states[:1], states[1:3], states[3:]])
    for state in states:
        same_as_plain(state)


def test_a_decoder_tells_what_was_accepted() -> None:
    """With guesses that are always right (the first sibling is taken), and right in the last siblings only."""
    tree = DraftTree.from_paths([[0], [1], [1, 0], [1, 1]])
    for kind, expected in (("right", [1, 0, 0]), ("last", [0, 1, 1])):
        spec = decoder(tree, kind)
        spec.chooser = chooser_for(tree, [[0.4, 0.8], [0.4, 0.8]], seconds=PassSeconds(((1, 1.0),)))
        finish(spec, [[SequenceState(PROMPTS[0], 40)]])
        spec.chooser.review()
        gains = spec.chooser.acceptance.gains()
        assert [round(gains[node]) for node in (1, 2, 4)] == expected


def test_who_gets_a_chooser() -> None:
    """Only patches without a given tree."""
    model = tiny_model("llama", seed=3)
    heads = sk.MedusaHeads(32, VOCAB, 3)
    inputs = batch((9, 4, 30), seed=3)
    expected = greedy(model, inputs, 20)
    with sk.patch(model, heads) as handle:
        assert handle.chooser is not None
        assert handle.chooser.tree is handle.plan.tree
        rows = [rows for rows, _ in handle.chooser.seconds.points]
        assert rows == sorted(set(rows))
        assert torch.equal(greedy(model, inputs, 20), expected)
    with sk.patch(model, heads, tree=4) as handle:
        assert handle.chooser is None


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize("graph", [None, False])
def test_passes_are_timed_as_steps_run(device: str, graph: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded where steps are: the host hides what a row costs in eager passes of a GPU or of a small model."""
    recorded, capture_of = [], GraphUse.capture_of

    def counted(graphs: GraphUse, target: torch.device, plan: MemoryPlan) -> Callable[[], Any] | None:
        make = capture_of(graphs, target, plan)
        if make is None:
            return None

        def capture(run: Callable[[], None]) -> Callable[[], None]:
            recorded.append(run)
            return make()(run)

        capture.pads = False  # type: ignore[attr-defined]
        return lambda: capture

    monkeypatch.setattr(GraphUse, "capture_of", counted)
    with sk.patch(tiny_model("llama").to(device), sk.MedusaHeads(32, VOCAB, 3).to(device), graph=graph) as handle:
        assert handle.chooser is not None
        assert len(recorded) == (len(handle.chooser.seconds.points) if graph is None else 0)


@pytest.mark.parametrize("share", sample([0.0, 1.0], [1.0]))
def test_a_model_with_a_drafter_that_learns_nothing_and_one_that_knows_all(share: float) -> None:
    """The estimate converges to the drafter's accuracy; the tokens are the model's own."""
    model = tiny_model("llama", seed=4)
    ids = torch.tensor([[5, 9, 3, 4]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy(model, inputs, 200)
    with sk.patch(model, OracleDrafter([expected[0].tolist()], share, max_depth=3)) as handle:
        assert handle.chooser is not None
        handle.chooser.seconds = PassSeconds(((1, 10.0),))  # beside which nothing here takes long
        assert torch.equal(greedy(model, inputs, 200), expected)
        first = handle.chooser.acceptance.gains()[1]
        assert first > 0.9 if share else first < 0.4
