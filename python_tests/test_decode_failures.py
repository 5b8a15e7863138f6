"""Counters of the speculative loop, its errors, and its state after errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selection import sample
from toy_model import PROMPTS, TARGET, VOCAB, ToyDrafter, ToyTarget, decoder, empty, finish, plain, same_as_plain, start

from specmemo_kernels.cache.paged_kv import OutOfPages
from specmemo_kernels.drafting import DraftInput
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree

TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])


def requests(new_tokens: int = 12) -> list[SequenceState]:
    return [SequenceState(prompt, new_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_stats_when_all_is_right(depth: int) -> None:
    """Each step of a chain emits ``depth + 1`` tokens, the last step the rest; nothing else is counted."""
    spec, prompt, wanted = decoder(DraftTree.chain(depth)), PROMPTS[2], 20
    finish(spec, [[SequenceState(prompt, wanted)]])
    left, accepted = wanted - 1, []
    while left:
        accepted.append(min(depth, left - 1))
        left -= accepted[-1] + 1
    stats = spec.stats
    assert (stats.steps, stats.sequence_steps, stats.tokens) == (len(accepted), len(accepted), wanted - 1)
    assert stats.prefill_tokens == len(prompt)
    assert stats.drafted == sum(accepted)
    assert stats.accepted_at_depth == [sum(a > d for a in accepted) for d in range(max(accepted))]
    assert stats.slots_written == len(prompt) + wanted - 1
    assert stats.tokens_per_step == (wanted - 1) / len(accepted)
    assert stats.acceptance_by_depth == [n / len(accepted) for n in stats.accepted_at_depth]


@pytest.mark.parametrize("drafter", ["none", "outside"])
def test_stats_when_nothing_is_right(drafter: str) -> None:
    """One token and one slot per step, for any tree."""
    spec = decoder(TREE, drafter)
    states = [SequenceState(PROMPTS[0], 6), SequenceState(PROMPTS[1], 9)]
    finish(spec, [states])
    stats = spec.stats
    assert (stats.steps, stats.sequence_steps, stats.tokens) == (8, 13, 13)
    assert stats.accepted_at_depth == [] == stats.acceptance_by_depth
    assert stats.tokens_per_step == 1.0
    assert stats.slots_written == len(PROMPTS[0]) + len(PROMPTS[1]) + 13


def test_stats_cut_at_eos() -> None:
    """Tokens end with EOS; accepted tokens beyond it still count as accepted."""
    text = plain(TARGET, PROMPTS[0], 10)
    place = next(i for i in (2, 3) if text[i] not in text[:i])
    spec = decoder(DraftTree.chain(4))
    finish(spec, [[SequenceState(PROMPTS[0], 10, frozenset([text[place]]))]])
    assert (spec.stats.steps, spec.stats.tokens, spec.stats.accepted_at_depth) == (1, place, [1, 1, 1, 1])


def test_stats_reset() -> None:
    """A reset zeroes all counters; no list is shared with other objects."""
    stats = DecodeStats()
    stats.record_step([2, 0], 10)
    assert (stats.drafted, stats.accepted_at_depth, stats.slots_written) == (8, [1, 1], 4)
    stats.reset()
    assert stats == DecodeStats()
    assert stats.tokens_per_step == 0.0
    assert stats.acceptance_by_depth == []
    stats.record_step([1], 2)
    assert DecodeStats().accepted_at_depth == []


def test_a_step_without_work_for_deep_nodes() -> None:
    """With at most three tokens left, nodes deeper than two are neither drafted nor verified; a root alone skips the
    drafter.
    """
    drafter = ToyDrafter("none", TARGET)
    spec = decoder(DraftTree.chain(9), drafter)
    finish(spec, [[SequenceState(PROMPTS[0], 4), SequenceState(PROMPTS[1], 2)]])
    assert [call.tree.max_depth for call in drafter.calls] == [2, 1]
    assert [len(call.token_ids) for call in drafter.calls] == [2, 1]


class Shaped(ToyDrafter):
    """A drafter whose right answer ``make`` changes."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__("right", TARGET)
        self.make = make

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        return self.make(super().propose(inputs))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: x[:, 1:], r"\(4, 5\) torch.int64"),
        (lambda x: x[:1], r"\(1, 6\) torch.int64"),
        (lambda x: x.flatten(), r"\(24,\) torch.int64"),
        (lambda x: x.int(), r"\(4, 6\) torch.int32"),
        (lambda x: x.float(), r"\(4, 6\) torch.float32"),
    ],
    ids=["nodes", "sequences", "flat", "int32", "float"],
)
def test_drafts_of_another_shape_are_refused(make: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    """The message names the drafter, its result and the expected shape; the loop can be ended and used again."""
    spec = decoder(TREE, Shaped(make))
    start(spec, requests())
    with pytest.raises(ValueError, match=rf"Shaped.propose returned {what}, expected \(4, 6\) torch.int64"):
        spec.step()
    works_again(spec)


def test_drafts_are_not_written_to() -> None:
    """A drafter may return a tensor that it keeps."""
    kept = torch.full((1, TREE.size), VOCAB + 3)
    spec = decoder(TREE, Shaped(lambda _: kept))
    start(spec, [SequenceState(PROMPTS[0], 12)])
    spec.step()
    assert kept.unique().tolist() == [VOCAB + 3]


def works_again(spec: Any) -> None:
    """After ``abort`` nothing is allocated, and the same decoder generates correctly."""
    spec.abort()
    assert spec.sequences == []
    empty(spec.pool)
    spec.drafter = ToyDrafter("half", TARGET)
    states = requests()
    finish(spec, [states[:2], states[2:]])
    for state in states:
        same_as_plain(state)


class Failing(ToyTarget):
    """Raises in the forward pass number ``when``."""

    def __init__(self) -> None:
        super().__init__()
        self.when: int | None = None

    def forward(
        self, batch: TreeBatch, attention: StepAttention, keep: torch.Tensor | None, logits: bool
    ) -> TargetOutput:
        output = super().forward(batch, attention, keep, logits)
        if self.when is not None:
            self.when -= 1
            if self.when < 0:
                self.when = None
                raise KeyboardInterrupt
        return output


@pytest.mark.parametrize("when", sample(range(9), [0, 4, 8]))
def test_an_exception_in_the_target(when: int) -> None:
    """In any pass (four prefill chunks, then steps): pages are freed and a new generation works."""
    target = Failing()
    spec = decoder(TREE, "half", target=target)
    target.when = when
    with pytest.raises(KeyboardInterrupt):
        finish(spec, [requests()])
    spec.pool.check_integrity()
    works_again(spec)


def test_an_exception_in_a_prefill_leaves_others_running() -> None:
    """Running sequences continue as if the failed sequence had never been started."""
    target = Failing()
    spec = decoder(TREE, "half", target=target)
    early, late = requests()[:2], requests()[2:]
    start(spec, early)
    spec.step()
    target.when = 1
    with pytest.raises(KeyboardInterrupt):
        start(spec, late)
    spec.pool.check_integrity()
    assert spec.sequences == early
    finish(spec, [])
    for state in early:
        same_as_plain(state)


@pytest.mark.parametrize("when", [1, 4, 10])
def test_roots_alone_wait_for_no_verdict(when: int) -> None:
    """Single-node trees are written to pages like prompt chunks, without scratch; a step that fails afterwards is
    retried.
    """
    target = Failing()
    spec = decoder(DraftTree.chain(0), target=target)
    spec.pool.resize_scratch(0)
    states = requests()
    start(spec, states[:1])
    spec.admit(states[1:])
    target.when = when
    failures = 0
    while spec.sequences or spec.prefilling:
        try:
            spec.step()
        except KeyboardInterrupt:
            failures += 1
        spec.pool.check_integrity()
    assert failures == 1
    for state in states:
        same_as_plain(state)
    assert spec.stats.slots_written == sum(len(s.prompt) + len(s.new_tokens) - 1 for s in states)
    empty(spec.pool)


def test_a_prompt_that_does_not_fit() -> None:
    """No sequence of the call starts, not even one that would fit; running sequences continue."""
    spec = decoder(TREE, num_pages=10, page_size=4)
    running = SequenceState(PROMPTS[0], 12)
    start(spec, [running])
    free = spec.pool.free_pages
    with pytest.raises(OutOfPages, match="40 tokens need 10 more pages of 4 tokens, 7 of 10 are free"):
        start(spec, [SequenceState([1], 5), SequenceState([2] * 40, 5)])
    spec.pool.check_integrity()
    assert spec.sequences == [running]
    assert spec.pool.free_pages == free
    finish(spec, [])
    same_as_plain(running)


def test_more_sequences_than_rows() -> None:
    spec = decoder(TREE, sequences=2)
    with pytest.raises(OutOfPages, match="all 2 sequences of the pool are in use"):
        start(spec, requests()[:3])
    empty(spec.pool)


def test_a_pool_that_runs_full() -> None:
    """A step that may not fit raises and emits nothing, once no other sequence can free pages."""
    spec = decoder(DraftTree.chain(3), num_pages=10, page_size=4)
    short, long = SequenceState(PROMPTS[0], 3), SequenceState(PROMPTS[2], 40)
    start(spec, [short, long])
    before: list[int] = []

    def run() -> None:
        for _ in range(40):
            before[:] = long.tokens
            spec.step()

    with pytest.raises(OutOfPages, match="0 of 10 are free; shorten the prompt"):
        run()
    spec.pool.check_integrity()
    assert long.tokens == before
    assert short.finished
    assert len(long.tokens) + 3 > 40
    assert long.new_tokens == plain(TARGET, long.prompt, 40)[: len(long.new_tokens)]
    spec.abort()
    empty(spec.pool)


@pytest.mark.parametrize("place", [1, 2, 4])
def test_an_exception_in_the_stop_function(place: int) -> None:
    """User code fails at the first token, or inside a step: pages are freed."""

    def stop(tokens: list[int]) -> bool:
        if len(tokens) == len(PROMPTS[0]) + place:
            raise ZeroDivisionError
        return False

    spec = decoder(TREE)
    with pytest.raises(ZeroDivisionError):
        finish(spec, [[SequenceState(PROMPTS[1], 12), SequenceState(PROMPTS[0], 12, stop=stop)]])
    works_again(spec)
