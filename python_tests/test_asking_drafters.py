"""When a drafter is called: its cost, its missing prefill, and its benefit."""

from __future__ import annotations

import random

import pytest
from selection import sample
from test_drafters import toy_draft
from toy_model import PROMPTS, decoder, empty, finish, same_as_plain, start

from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.tree.acceptance import RunningAcceptance
from specmemo_kernels.tree.choice import DraftBacklog, PassSeconds, TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

CHAIN = DraftTree.chain(4)
TARGET = PassSeconds(((1, 3.0), (8, 3.4), (128, 12.0)))
DRAFT = PassSeconds(((1, 0.4), (128, 3.0)))
#: Real extra time of a pass of the draft model, beyond the measured time.
BESIDE = 0.6


def chooser_for(chance: float) -> TreeChooser:
    return TreeChooser(CHAIN, RunningAcceptance(CHAIN, [[chance]] * CHAIN.max_depth), TARGET, DRAFT)


class Clock:
    """Runs requests one after the other with simulated times of steps and of the draft model's passes.

    A guess is right with probability ``right``. ``asked``: steps that called the drafter. ``computed``: rows of the
    draft model.
    """

    def __init__(self, chooser: TreeChooser, right: float, prompt: int = 80, new: int = 48) -> None:
        self.chooser, self.right, self.prompt, self.new = chooser, right, prompt, new
        self.random, self.seconds, self.tokens, self.asked, self.computed = random.Random(1), 0.0, 0, 0, 0

    def request(self) -> None:
        """Run one request; the chooser gets the drafter's missing tokens and the remaining new tokens."""
        length, known, end = self.prompt + 1, 0, self.prompt + self.new
        while length < end:
            behind = length - 1 - known
            backlog = DraftBacklog(behind, end - length)
            tree = self.chooser.tree_for(1, lambda backlog=backlog: backlog).truncated(end - length - 1)
            accepted = 0
            while accepted < tree.max_depth and self.random.random() < self.right:
                accepted += 1
            target, drafting = TARGET.at(tree.size) + 0.2, tree.max_depth * (DRAFT.at(1) + BESIDE)
            if tree.max_depth:
                drafting += DRAFT.at(1 + behind) - DRAFT.at(1)
                self.computed, self.asked = self.computed + behind + tree.max_depth, self.asked + 1
                known = min(length + tree.max_depth - 1, length + accepted)
            self.seconds += target + drafting
            self.chooser.stepped(tree, [[accepted]], target, drafting, behind)
            length += 1 + accepted
            self.tokens += 1 + accepted

    def run(self, requests: int) -> Clock:
        for _ in range(requests):
            self.request()
        return self


def plain_seconds(tokens: int) -> float:
    return tokens * (TARGET.at(1) + 0.2)


@pytest.mark.parametrize("right", sample([0.0, 0.2, 0.3], [0.2]))
def test_a_drafter_that_does_not_pay_costs_hardly_anything(right: float) -> None:
    """By the measured times of a pass, a guess with probability 0.2 would pay; by the real times of drafting it
    doesn't. Later requests use what was learnt, and exploration stays within its share.
    """
    chooser = chooser_for(0.5)
    Clock(chooser, right).run(4)  # learns
    clock = Clock(chooser, right).run(200)
    assert clock.seconds <= 1.015 * plain_seconds(clock.tokens)
    assert 0 < clock.asked < 0.02 * clock.tokens, "it must be asked now and then"


@pytest.mark.parametrize("right", [0.7, 0.9, 1.0])
def test_a_drafter_that_pays_is_asked(right: float) -> None:
    chooser = chooser_for(0.5)
    Clock(chooser, right).run(4)
    clock = Clock(chooser, right).run(100)
    assert clock.asked * (1 + CHAIN.max_depth) > 0.95 * clock.tokens
    assert clock.seconds < 0.9 * plain_seconds(clock.tokens)


def test_it_is_found_out_when_the_text_changes() -> None:
    chooser = chooser_for(0.5)
    Clock(chooser, 0.0).run(100)
    Clock(chooser, 1.0).run(400)
    clock = Clock(chooser, 1.0).run(10)
    assert clock.tokens / clock.asked > 4
    Clock(chooser, 0.0).run(10)
    assert Clock(chooser, 0.0).run(20).asked < 0.02 * 20 * 48


def test_catching_up_pays_for_many_tokens_and_not_for_few() -> None:
    """The drafter is called exactly if the chain's speed on the remaining tokens makes up for the prompt's pass."""
    for behind in (0, 1, 30, 300, 3000):
        for remaining in (1, 4, 16, 64, 256):
            chooser = chooser_for(0.8)
            best = chooser.tree_for(1)
            tokens = sum(0.8**depth for depth in range(best.max_depth + 1))
            step = TARGET.at(best.size) + best.max_depth * DRAFT.at(1)
            catch_up = DRAFT.at(1 + behind) - DRAFT.at(1)
            pays = catch_up + remaining * step / tokens < remaining * TARGET.at(1)
            fresh = chooser_for(0.8)
            assert best.size > 1
            assert (fresh.tree_for(1, lambda b=behind, r=remaining: DraftBacklog(b, r)).size > 1) == pays


@pytest.mark.parametrize(("prompt", "new"), sample([(30, 200), (400, 48), (3000, 48)], [(400, 48)]))
def test_looks_are_rarer_the_more_has_to_be_computed_for_them(prompt: int, new: int) -> None:
    chooser = chooser_for(0.02)
    clock = Clock(chooser, 0.0, prompt, new).run(20_000 // new)
    lost = clock.seconds - plain_seconds(clock.tokens)
    assert clock.asked
    assert 0 < lost <= 0.011 * plain_seconds(clock.tokens)


def test_nothing_is_computed_for_a_drafter_that_is_not_asked() -> None:
    """No rows, no pages, no open sequences; the tokens are the model's own."""
    drafter = toy_draft(4)
    spec = decoder(CHAIN, drafter)
    drafter.allocate(64, 4, 4, 7)
    dear = PassSeconds(((1, 1.0), (101, 1e6)))
    spec.chooser = TreeChooser(CHAIN, RunningAcceptance(CHAIN, [[0.01]] * 4), dear, dear)
    states = [SequenceState(prompt, 30) for prompt in PROMPTS]
    finish(spec, [states])
    for state in states:
        same_as_plain(state)
    assert (drafter.rows_computed, drafter.page_bytes, drafter.num_pages) == (0, 0, 64)


def test_a_draft_model_that_is_asked_late() -> None:
    """Steps with and without drafts alternate: the draft model computes skipped tokens once, and its guesses are the
    same.
    """
    drafter = toy_draft(4)
    spec = decoder(CHAIN, drafter)
    drafter.allocate(64, 4, 4, 7)
    states = [SequenceState(prompt, 40) for prompt in PROMPTS]
    start(spec, states)
    for step in range(200):
        if not spec.sequences:
            break
        spec.max_tree = 1 if step % 5 < 3 else CHAIN.size
        behind = [drafter.behind(state.slot, state.tokens) for state in spec.sequences]
        before, count = drafter.rows_computed, len(spec.sequences)
        depth = min(spec.max_tree - 1, max(state.remaining for state in spec.sequences) - 1)
        spec.step()
        assert drafter.rows_computed - before == (sum(behind) + count * depth if depth else 0)
    for state in states:
        same_as_plain(state)
        assert state.accepted > 10
    assert drafter._pool is not None
    empty(drafter._pool)
