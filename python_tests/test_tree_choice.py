"""How much of a tree pays: more sequences, smaller trees; better guesses, larger ones."""

from __future__ import annotations

import pytest
import torch
from test_families import batch, greedy
from tiny_models import VOCAB, tiny_model
from toy_model import PROMPTS, decoder, finish, same_as_plain

import specmemo_kernels as sk
from specmemo_kernels.acceptance import DEFAULT_ACCURACY, best_first_paths, expected_tokens_per_step
from specmemo_kernels.decode import SequenceState
from specmemo_kernels.tree import DraftTree
from specmemo_kernels.tree_choice import PassSeconds, TreeChooser, chain_gains, node_gains

TREE = DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY, 31))
SLOPE = PassSeconds(((1, 1.0), (8, 1.1), (32, 2.0), (128, 8.0)))


def test_seconds_lie_on_lines() -> None:
    assert SLOPE.at(1) == SLOPE.at(0) == 1.0
    assert SLOPE.at(20) == pytest.approx(1.1 + 0.9 * 12 / 24)
    assert SLOPE.at(128) == pytest.approx(8.0)
    assert SLOPE.at(256) == pytest.approx(16.0)
    assert PassSeconds(((4, 0.5),)).at(100) == 0.5


def test_gains_sum_to_the_expected_tokens() -> None:
    paths = best_first_paths(DEFAULT_ACCURACY, 31)
    assert sum(node_gains(TREE, DEFAULT_ACCURACY)) == pytest.approx(expected_tokens_per_step(paths, DEFAULT_ACCURACY))


def test_the_best_size_is_the_best() -> None:
    """By trying all sizes; it falls as sequences are added, and one alone gets the whole tree."""
    gains = node_gains(TREE, DEFAULT_ACCURACY)
    chooser = TreeChooser(TREE, lambda: gains, SLOPE)
    sizes = [chooser.tree_for(n).size for n in range(2, 40)]
    for n, size in enumerate(sizes, start=2):
        speeds = [sum(gains[:s]) / SLOPE.at(n * s) for s in range(1, TREE.size + 1)]
        assert speeds[size - 1] >= 0.98 * max(speeds)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 3
    assert sizes[-1] == 1
    assert chooser.tree_for(1) is TREE


def test_a_chain_follows_what_is_accepted() -> None:
    """Steps that verified a shorter chain say nothing about deeper guesses; every sixteenth step looks."""
    assert chain_gains(3, [], []) == [1.0, 0.5, 0.25, 0.125]
    assert chain_gains(2, [96], [96])[1] == pytest.approx(100 / 104)
    assert chain_gains(3, [50, 25], [100, 100]) == pytest.approx([1.0, 0.5, 0.25, 0.125])
    accepted, offered = [0], [1000]
    chain = DraftTree.chain(8)
    draft = PassSeconds(((1, 0.2),))
    chooser = TreeChooser(chain, lambda: chain_gains(8, accepted, offered), SLOPE, draft, 1, explores=True)
    assert chooser.tree_for(1) is chain
    sizes = set()
    for _ in range(15):
        chooser.stepped()
        sizes.add(chooser.tree_for(1).size)
    assert sizes == {1}
    accepted[:], offered[:] = [950, 900, 860, 800, 760, 720, 680, 640], [1000] * 8
    chooser.stepped()
    assert chooser.tree_for(1) is chain
    chooser.stepped()
    assert chooser.tree_for(1).size > 4


def test_a_decoder_with_a_chooser_writes_the_same() -> None:
    """Trees change from step to step as sequences come and go."""
    tree = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    spec = decoder(tree, "half")
    spec.chooser = TreeChooser(tree, lambda: [1.0, 0.5, 0.3, 0.3, 0.2, 0.2], SLOPE)
    states = [SequenceState(PROMPTS[i % 4], 12 + 5 * i) for i in range(4)]
    finish(spec, [states[:1], states[1:3], states[3:]])
    for state in states:
        same_as_plain(state)


def test_who_gets_a_chooser() -> None:
    """Only where no tree was asked for."""
    model = tiny_model("llama", seed=3)
    heads = sk.MedusaHeads(32, VOCAB, 3)
    inputs = batch((9, 4, 30), seed=3)
    expected = greedy(model, inputs, 20)
    with sk.patch(model, heads) as handle:
        assert handle.chooser is not None
        rows = [rows for rows, _ in handle.chooser.seconds.points]
        assert rows == sorted(set(rows))
        assert torch.equal(greedy(model, inputs, 20), expected)
    with sk.patch(model, heads, tree=4) as handle:
        assert handle.chooser is None
