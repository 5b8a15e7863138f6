"""Cached pages have the right content, and sequences with the same prefix take or share them (toy model)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from selection import examples
from test_scheduler import empty
from toy_model import PROMPTS, TARGET, ToyDrafter, same_as_plain

import specmemo_kernels as sk
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import OutOfPages, PagedKVPool
from specmemo_kernels.cache.state_pool import MixerSpec
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.scheduler import Scheduler, submit_all
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import GreedyVerifier

LAYER = LayerKV(1, 1, 1, torch.float64, torch.device("cpu"))


def content(tokens: list[int]) -> list[float]:
    """A number that stands for a token's key; it depends on the token and all tokens before it."""
    values, value = [], 0.0
    for token in tokens:
        value = (7 * value + token + 1) % 100003
        values.append(value)
    return values


class Texts(RuleBasedStateMachine):
    """Sequences open, grow, close and share prefixes, in a pool that is too small for all.

    Every slot of every page must hold its token's content whenever a sequence can read it.
    """

    mixers: ClassVar[list[MixerSpec]] = []

    def new_pool(self, num_pages: int, page_size: int) -> PagedKVPool:
        sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "max_sequences": 3, "max_nodes": 1}
        return PagedKVPool([LAYER], **sizes, keep=True, mixers=self.mixers)

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 4))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = self.new_pool(num_pages, page_size)
        self.open: dict[int, list[int]] = {}
        self.said: list[list[int]] = [[]]

    def write(self, slot: int, first: int) -> None:
        """Write content for the tokens from ``first`` on."""
        tokens, size = self.open[slot], self.pool.page_size
        for place, value in list(enumerate(content(tokens)))[first:]:
            self.pool.k_pages[0][self.pool.block_table[slot, place // size], place % size] = value

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, data: st.DataObject, more: list[int]) -> None:
        """Open a sequence with an earlier text, or a prefix of it, and new tokens."""
        if not self.pool.fits_sequences(1):
            return
        earlier = data.draw(st.sampled_from(self.said))
        tokens = earlier[: data.draw(st.integers(0, len(earlier)))] + more
        expected = self.pool.cached_prefix_len(tokens)
        slot, known = self.pool.open_with(tokens)
        assert known == expected < len(tokens)
        try:
            self.pool.reserve(slot, len(tokens))
        except OutOfPages:
            self.pool.close(slot, tokens[:known])
            return
        self.open[slot] = tokens
        self.write(slot, known)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        if not self.open:
            return
        slot = data.draw(st.sampled_from(sorted(self.open)))
        before = len(self.open[slot])
        try:
            self.pool.reserve(slot, before + len(more))
        except OutOfPages:
            return
        self.open[slot] = self.open[slot] + more
        self.write(slot, before)

    @rule(data=st.data(), unlabelled=st.integers(0, 3))
    def close(self, data: st.DataObject, unlabelled: int) -> None:
        if not self.open:
            return
        slot = data.draw(st.sampled_from(sorted(self.open)))
        tokens = self.open.pop(slot)
        self.close_with(slot, tokens, unlabelled)
        self.said.append(tokens)

    def close_with(self, slot: int, tokens: list[int], unlabelled: int) -> None:
        self.pool.close(slot, tokens[: len(tokens) - unlabelled])

    @rule(num_pages=st.integers(2, 12))
    def move(self, num_pages: int) -> None:
        """Move the cache to a new pool, larger or smaller, while no sequence is open."""
        if self.open:
            return
        pool = self.new_pool(num_pages, self.pool.page_size)
        known = [self.pool.cached_prefix_len(tokens) for tokens in self.said]
        pool.take_cached(self.pool)
        assert pool.cached_pages == min(num_pages, self.pool.cached_pages)
        if self.pool.cached_pages <= num_pages:
            assert [pool.cached_prefix_len(tokens) for tokens in self.said] == known
        self.pool = pool

    @rule()
    def forget(self) -> None:
        if self.open:
            with pytest.raises(RuntimeError, match=f"{len(self.open)} sequences are open"):
                self.pool.clear_cache()
            return
        self.pool.clear_cache()
        assert self.pool.cached_pages == 0
        assert not any(self.pool.cached_prefix_len(tokens) for tokens in self.said)

    @invariant()
    def everybody_reads_his_own_text(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for slot, tokens in self.open.items():
            pages = self.pool.block_table[slot, : self.pool.pages_for(len(tokens))].long()
            held = self.pool.k_pages[0][pages].flatten()[: len(tokens)].tolist()
            assert held == content(tokens)
        if not self.open:
            assert self.pool.free_pages == self.pool.num_pages


class TextsWithStates(Texts):
    """The same with a recurrent layer, whose state stands for all tokens in it."""

    mixers: ClassVar[list[MixerSpec]] = [MixerSpec((((1,), torch.float64),), 1, torch.float64, torch.device("cpu"))]

    def write(self, slot: int, first: int) -> None:
        """Computes the tokens from ``first`` on: the state must have those before them."""
        super().write(slot, first)
        states = self.pool.states
        assert states is not None
        assert states.started(slot) == (first > 0)
        assert states.states[0][0][slot] == sum(content(self.open[slot][:first])[-1:])
        with states.during_pass([slot], []):
            states.change([slot])
            states.states[0][0][slot] = content(self.open[slot])[-1]

    def close_with(self, slot: int, tokens: list[int], unlabelled: int) -> None:
        """Its last tokens, up to two, are rows that the state doesn't have yet; with three, its last pass failed."""
        states = self.pool.states
        assert states is not None
        held = tokens[: len(tokens) - unlabelled]
        if unlabelled < 3 and held:
            states.states[0][0][slot] = content(held)[-1]
            with states.during_pass([slot], []) as accepted:
                accepted[slot] = list(range(unlabelled))
            self.pool.close(slot, [*tokens, 0], len(tokens))
            # Its end may lie in the middle of another text's page, which can't be taken in part.
            assert self.pool.cached_prefix_len([*held, 0]) in (0, len(held))
            assert states.cached[slot] == held
        else:
            with suppress(MemoryError), states.during_pass([slot], []):
                states.change([slot])
                raise MemoryError
            assert states.lost == {slot}
            self.pool.close(slot, tokens)
            assert slot not in states.cached


TestTextsWithStates = TextsWithStates.TestCase
TestTextsWithStates.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def test_kept_pages_go_oldest_first_and_texts_from_their_end() -> None:
    pool = PagedKVPool([LAYER], num_pages=6, page_size=2, max_sequences=2, max_nodes=1, keep=True)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    for tokens in (old, new):
        slot = pool.open()
        pool.reserve(slot, len(tokens))
        pool.close(slot, tokens)
    assert (pool.cached_pages, pool.free_pages) == (5, 6)
    slot = pool.open()
    for pages, spared in ((1, 6), (2, 4), (3, 2), (4, 0)):
        pool.reserve(slot, 2 * pages)
        assert (pool.cached_prefix_len([*old, 0]), pool.cached_prefix_len([*new, 0])) == (spared, 4)
    pool.close(slot)
    pool.check_integrity()


def keeping_decoder(num_pages: int = 64, drafter: str = "half") -> SpecDecoder:
    """The toy model's decoder over a pool with prefix reuse."""
    tree = sk.DraftTree.chain(3)
    pool = PagedKVPool(
        TARGET.layers, num_pages=num_pages, page_size=4, max_sequences=4, max_nodes=4 * tree.size, keep=True
    )
    verifier = GreedyVerifier(TARGET, "reference")
    return SpecDecoder(TARGET, ToyDrafter(drafter, TARGET), tree, pool, verifier, prefill_chunk=7, backend="reference")


def test_sequences_that_share_pages_write_what_they_write_alone() -> None:
    """Prefixes are shared by several sequences; pages are scarce, so some are preempted and readmitted."""
    spec = keeping_decoder(num_pages=16)
    start = PROMPTS[2]
    scheduler = Scheduler(spec, 4)
    for wave in range(2):
        states = [SequenceState([*start, *PROMPTS[i % 4], wave], 10 + 2 * i) for i in range(5)]
        submit_all(scheduler, states)
        while not scheduler.idle:
            scheduler.step()
            spec.pool.check_integrity()
        for state in states:
            same_as_plain(state)
    assert spec.stats.preemptions > 0
    assert spec.stats.reused_tokens >= 5 * 16, "the common beginning fills four pages"
    empty(spec.pool)


def test_shared_pages_are_not_needed_twice() -> None:
    """Two sequences with the same cached prefix run at once with pages for a single copy of it."""
    begun = PROMPTS[2][:16]
    apart = 3  # pages of each beyond the four of its beginning: 16 + 1 + 8 tokens and a path of three
    spec = keeping_decoder(num_pages=4 + 2 * apart)
    scheduler = Scheduler(spec, 4)
    first = SequenceState(begun, 1)
    scheduler.submit(first)
    scheduler.run()
    assert spec.pool.shared_pages([*begun, 0]) == 0, "nobody has the kept pages now"
    states = [SequenceState([*begun, token], 8) for token in (1, 2)]
    submit_all(scheduler, states)
    scheduler.step()
    assert not scheduler.waiting
    assert spec.pool.shared_pages([*begun, 0]) == 4
    scheduler.run()
    assert spec.stats.preemptions == 0
    for state in states:
        same_as_plain(state)
    empty(spec.pool)


def test_a_preempted_sequence_finds_its_pages() -> None:
    """Its pages weren't reused meanwhile, so only the last page is recomputed."""
    spec = keeping_decoder()
    scheduler = Scheduler(spec, 4)
    states = [SequenceState(PROMPTS[0], 20), SequenceState(PROMPTS[2], 20)]
    submit_all(scheduler, states)
    while states[1].emitted < 8:
        scheduler.step()
    scheduler._preempt(states[1])
    scheduler.run()
    for state in states:
        same_as_plain(state)
    assert 0 < spec.stats.recomputed_tokens <= 4


def test_an_exception_leaves_only_what_is_right() -> None:
    """A stop function fails inside a step, after tokens were committed that no sequence has."""

    def stop(tokens: list[int]) -> bool:
        if len(tokens) == 14:
            raise ZeroDivisionError
        return False

    spec = keeping_decoder(drafter="right")
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, [SequenceState(PROMPTS[0], 20, stop=stop), SequenceState(PROMPTS[2], 20)])
    with pytest.raises(ZeroDivisionError):
        scheduler.run()
    again = [SequenceState(PROMPTS[0], 20), SequenceState(PROMPTS[2], 20)]
    submit_all(scheduler, again)
    scheduler.run()
    for state in again:
        same_as_plain(state)
    assert spec.stats.reused_tokens > 0
    empty(spec.pool)


@pytest.mark.parametrize(("of_drafter", "cached"), [(False, 4), (True, 3)])
def test_a_drafters_keys_depend_on_the_next_token(of_drafter: bool, cached: int) -> None:
    """Where two texts part, the slot of the last common token has what the first text's drafter read behind it."""
    layer = replace(LAYER, of_drafter=of_drafter)
    pool = PagedKVPool([layer], num_pages=8, page_size=1, max_sequences=2, max_nodes=1, keep=True)
    slot = pool.open()
    pool.reserve(slot, 6)
    pool.close(slot, [1, 2, 3, 4, 5, 6])
    assert pool.cached_prefix_len([1, 2, 3, 4, 9, 9, 9]) == cached
    assert pool.cached_prefix_len([1, 2, 3, 4, 5, 9, 9]) == cached + 1
