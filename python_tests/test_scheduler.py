"""Many sequences through one decoder: every output is plain decoding's, despite joins, aborts and preemption."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples
from test_decode import BUSHY, requests
from toy_model import PROMPTS, TARGET, VOCAB, ToyDrafter, ToyTarget, decoder, empty, plain, same_as_plain

from specmemo_kernels.cache.paged_kv import OutOfPages
from specmemo_kernels.engine.scheduler import Scheduler, submit_all
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree

CHAIN = DraftTree.chain(3)


def same_beginning(state: SequenceState) -> None:
    """An aborted sequence emitted the first tokens of plain decoding."""
    expected = plain(TARGET, state.prompt, state.max_new_tokens, state.eos_token_ids)
    assert state.new_tokens == expected[: state.emitted]


def check_books(scheduler: Scheduler) -> None:
    """Only active sequences hold pages, and every sequence is in exactly one list."""
    spec = scheduler.decoder
    spec.pool.check_integrity()
    held = {s.slot for s in (*spec.sequences, *spec.prefilling)}
    assert held == set(spec.pool._pages)
    assert len(held) == len(scheduler.active) <= scheduler.max_sequences
    assert all(s.slot == -1 for s in scheduler.waiting)
    arrivals = [s.arrival for s in scheduler.waiting]
    assert arrivals == sorted(arrivals)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[int, SequenceState]], dict[int, int]]:
    """Requests with the step at which each arrives, and aborts with their step."""
    coming = draw(st.lists(st.tuples(st.integers(0, 8), requests()), min_size=1, max_size=6))
    aborts = draw(st.dictionaries(st.integers(0, 20), st.integers(0, len(coming) - 1), max_size=2))
    return coming, aborts


@settings(max_examples=examples(150), deadline=None)
@given(
    schedule=schedules(),
    tree=st.sampled_from([BUSHY, CHAIN, DraftTree.chain(0)]),
    drafter=st.sampled_from(ToyDrafter.KINDS),
    page_size=st.integers(1, 9),
    spare_pages=st.integers(0, 12),
    prefill_chunk=st.integers(1, 30),
    places=st.integers(1, 4),
)
def test_any_schedule_writes_what_plain_decoding_writes(
    schedule: tuple[list[tuple[int, SequenceState]], dict[int, int]],
    tree: DraftTree,
    drafter: str,
    page_size: int,
    spare_pages: int,
    prefill_chunk: int,
    places: int,
) -> None:
    """Requests that arrive and are aborted at any time, with at least the pages of the largest."""
    coming, aborts = schedule
    states = [state for _, state in coming]
    most = max(len(s.prompt) + s.max_new_tokens for s in states) + tree.max_depth
    pages = -(-most // page_size) + spare_pages
    spec = decoder(tree, drafter, page_size=page_size, num_pages=pages, prefill_chunk=prefill_chunk)
    scheduler = Scheduler(spec, places)
    ended: list[SequenceState] = []
    for step in itertools.count():
        for when, state in coming:
            if when == step:
                scheduler.submit(state)
        if step in aborts:
            victim = states[aborts[step]]
            if victim.arrival:
                scheduler.abort(victim)
            check_books(scheduler)
        oldest = min((*scheduler.waiting, *scheduler.active), key=lambda s: s.arrival, default=None)
        before = oldest.preemptions if oldest else 0
        ended += scheduler.step()
        check_books(scheduler)
        assert oldest is None or oldest.preemptions == before, "the oldest was preempted"
        if scheduler.idle and step > 8:
            break
    empty(spec.pool)
    for state in states:
        if state.aborted:
            assert states.index(state) in aborts.values()
            same_beginning(state)
        else:
            same_as_plain(state)
            assert state in ended
    stats = spec.stats
    committed = sum(stats.accepted_at_depth) + stats.sequence_steps
    assert stats.slots_written == stats.prefill_tokens + stats.recomputed_tokens + committed
    if not stats.preemptions:
        assert stats.recomputed_tokens == 0


def test_preemption_and_restore_change_nothing() -> None:
    """Four sequences that fit at first and then outgrow the pool."""
    spec = decoder(CHAIN, "half", num_pages=14, page_size=4)
    states = [SequenceState([i, 3, i], 40) for i in range(4)]
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, states)
    scheduler.run()
    assert states[0].preemptions == 0
    assert sum(s.preemptions for s in states) == spec.stats.preemptions > 0
    assert spec.stats.recomputed_tokens > 0
    for state in states:
        same_as_plain(state)
    empty(spec.pool)


def test_a_preempted_sequence_waits_at_its_place() -> None:
    """It is queued before a younger one that has never run."""
    spec = decoder(CHAIN, "none", num_pages=14, page_size=4)
    states = [SequenceState([i, 3, i], 40) for i in range(3)]
    scheduler = Scheduler(spec, 2)
    submit_all(scheduler, states)
    ended: list[SequenceState] = []
    while not scheduler.idle:
        ended += scheduler.step()
        check_books(scheduler)
    assert states[1].preemptions > 0
    assert ended == states
    for state in states:
        same_as_plain(state)


def test_running_sequences_have_a_page_left_when_another_is_admitted() -> None:
    """Pages for the next step of both would suffice now, but one sequence would be preempted soon."""
    spec = decoder(CHAIN, "none", num_pages=7, page_size=4)
    first, second = SequenceState([1, 2, 3], 20), SequenceState([4], 12)
    scheduler = Scheduler(spec, 2)
    scheduler.submit(first)
    while spec.pool.free_pages > 2:
        scheduler.step()
    assert scheduler.demand.next_step(second) == 2
    scheduler.submit(second)
    scheduler.step()
    assert scheduler.active == (first,)
    scheduler.run()
    assert spec.stats.preemptions == 0
    for state in (first, second):
        same_as_plain(state)


def test_more_run_at_once_than_the_worst_case_allows() -> None:
    """Sequences that may become long but end early share pages that wouldn't hold all at full length."""
    text = plain(TARGET, PROMPTS[0], 8)
    states = [SequenceState(PROMPTS[0], 50, frozenset([text[-1]])) for _ in range(4)]
    spec = decoder(CHAIN, num_pages=24, page_size=4)
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, states)
    scheduler.step()
    assert len(scheduler.active) == 4
    assert 4 * scheduler.demand.to_end(states[0]) > 2 * spec.pool.num_pages
    scheduler.run()
    assert spec.stats.preemptions == 0
    for state in states:
        same_as_plain(state)


@settings(max_examples=examples(80), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=4),
    tree=st.sampled_from([CHAIN, DraftTree.chain(0)]),
    page_size=st.integers(1, 9),
)
@example(sizes=[(5, 1)] * 4, tree=CHAIN, page_size=9)  # none of them ever needs a second page
def test_whose_worst_cases_fit_run_at_once(sizes: list[tuple[int, int]], tree: DraftTree, page_size: int) -> None:
    """Exactly the pages for all at full length: all start in the first step, none is preempted."""
    states = [SequenceState([i + 1] * prompt, new) for i, (prompt, new) in enumerate(sizes)]
    pages = sum(-(-(prompt + new + tree.max_depth) // page_size) for prompt, new in sizes)
    spec = decoder(tree, "half", page_size=page_size, num_pages=pages)
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, states)
    scheduler.step()
    assert not scheduler.waiting
    scheduler.run()
    assert spec.stats.preemptions == 0
    for state in states:
        same_as_plain(state)
    empty(spec.pool)


def test_first_come_first_served() -> None:
    """Equal requests finish in the order of arrival, for any batch size."""
    spec = decoder(CHAIN, "none", sequences=2)
    states = [SequenceState([i], 6) for i in range(7)]
    scheduler = Scheduler(spec, 2)
    submit_all(scheduler, states)
    ended: list[SequenceState] = []
    while not scheduler.idle:
        ended += scheduler.step()
    assert ended == states


class Watching(ToyTarget):
    """Records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[TreeBatch] = []

    def forward(
        self, batch: TreeBatch, attention: StepAttention, keep: torch.Tensor | None, logits: bool
    ) -> TargetOutput:
        self.batches.append(batch)
        return super().forward(batch, attention, keep, logits)


def test_prefill_runs_beside_decode() -> None:
    """A long prompt is computed in chunks within the steps of a running sequence, which is never delayed."""
    target = Watching()
    spec = decoder(CHAIN, "right", target=target, prefill_chunk=8, sequences=2, num_pages=128)
    scheduler = Scheduler(spec, 2)
    first, late = SequenceState(PROMPTS[0], 80), SequenceState(PROMPTS[2] * 3, 10)
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(late)
    progress = [len(first.tokens)]
    while not late.emitted:
        scheduler.step()
        progress.append(len(first.tokens))
    assert len(progress) > 3
    assert all(after - before == 4 for before, after in itertools.pairwise(progress))
    mixed = [b for b in target.batches if b.num_trees and b.num_trees < len(b.seq_lens)]
    assert len(mixed) == len(progress) - 1
    assert max(len(b.tokens) for b in target.batches) <= max(8, spec.pool.max_nodes)
    scheduler.run()
    same_as_plain(first)
    same_as_plain(late)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tree", [BUSHY, DraftTree.chain(70)], ids=["bushy", "two words"])
def test_mixed_steps_on_backends(backend: str, tree: DraftTree) -> None:
    """Chunks beside trees whose mask has fewer bits than the chunk has rows, in float32."""
    single = ToyTarget(dtype=torch.float32, backend=backend)
    spec = decoder(tree, "half", target=single, backend=backend, num_pages=400, prefill_chunk=150)
    scheduler = Scheduler(spec, 4)
    states = [SequenceState(PROMPTS[2], 30), SequenceState((PROMPTS[2] + PROMPTS[0]) * 8, 20), SequenceState([4], 9)]
    scheduler.submit(states[0])
    scheduler.step()
    submit_all(scheduler, states[1:])
    scheduler.run()
    for state in states:
        same_as_plain(state)
        assert min(TARGET.margin(state.tokens[:i]) for i in range(len(state.prompt), len(state.tokens))) > 1e-4


@pytest.mark.parametrize("when", ["waiting", "prefill", "running", "ended"])
def test_abort_at_any_time(when: str) -> None:
    """Pages are free on return, emitted tokens stay, other sequences continue."""
    spec = decoder(CHAIN, "right", prefill_chunk=4, sequences=2)
    scheduler = Scheduler(spec, 2)
    other, gone = SequenceState(PROMPTS[0], 20), SequenceState(PROMPTS[2], 12)
    scheduler.submit(other)
    scheduler.submit(gone)
    ended: list[SequenceState] = []
    reached = {
        "waiting": lambda: True,
        "prefill": lambda: 0 < gone.computed < len(gone.prompt),
        "running": lambda: gone.emitted > 2,
        "ended": lambda: gone.finished,
    }[when]
    while not reached():
        ended += scheduler.step()
    tokens, free = list(gone.tokens), spec.pool.free_pages
    held = len(spec.pool._pages.get(gone.slot, []))
    scheduler.abort(gone)
    assert gone.aborted == (when != "ended")
    assert spec.pool.free_pages == free + held
    check_books(scheduler)
    scheduler.run()
    assert gone.tokens == tokens
    same_as_plain(other)
    empty(spec.pool)


def test_abort_from_a_stop_function() -> None:
    """A sequence aborts another one, or itself, inside a step."""
    spec = decoder(CHAIN, "right")
    scheduler = Scheduler(spec, 4)
    victim = SequenceState(PROMPTS[1], 30)

    def stop(tokens: list[int]) -> bool:
        if len(tokens) == 9:
            scheduler.abort(victim)
            scheduler.abort(killer)
        return False

    killer = SequenceState(PROMPTS[0], 30, stop=stop)
    third = SequenceState(PROMPTS[3], 30)
    submit_all(scheduler, [killer, victim, third])
    scheduler.run()
    assert killer.aborted
    assert len(killer.tokens) == 9, "also where the step has more tokens"
    assert victim.aborted
    same_beginning(victim)
    assert killer.new_tokens == plain(TARGET, killer.prompt, 30)[: killer.emitted]
    same_as_plain(third)
    empty(spec.pool)


def test_abort_from_another_thread() -> None:
    """Other threads abort requests while steps run: no page is lost, and all other tokens are right."""
    spec = decoder(CHAIN, "none", num_pages=40)
    scheduler = Scheduler(spec, 4)
    states = [SequenceState([i % VOCAB, 5], 60) for i in range(8)]
    submit_all(scheduler, states)
    started = threading.Event()

    def aborting() -> None:
        started.wait()
        for state in states[::2]:
            scheduler.abort(state)

    thread = threading.Thread(target=aborting)
    thread.start()
    scheduler.step()
    started.set()
    thread.join()
    scheduler.run()
    for state in states[::2]:
        assert state.aborted
        same_beginning(state)
    for state in states[1::2]:
        same_as_plain(state)
    empty(spec.pool)


def test_what_can_never_run_is_refused() -> None:
    spec = decoder(CHAIN, num_pages=5, page_size=4)
    scheduler = Scheduler(spec, 4)
    with pytest.raises(OutOfPages, match=r"a prompt of 5 and 13 new tokens may take 21 slots, the pool has 20"):
        submit_all(scheduler, [SequenceState([1], 3), SequenceState(PROMPTS[0], 13)])
    assert scheduler.idle
    with pytest.raises(ValueError, match=r"0 prompt tokens and max_new_tokens 3; both must be at least 1"):
        scheduler.submit(SequenceState([], 3))
    with pytest.raises(ValueError, match=r"max_sequences is 5, the pool has 4 rows"):
        Scheduler(spec, 5)
    scheduler.submit(SequenceState(PROMPTS[0], 12))
    scheduler.run()
    empty(spec.pool)


def test_an_exception_frees_everything() -> None:
    def stop(tokens: list[int]) -> bool:
        raise ZeroDivisionError

    spec = decoder(CHAIN)
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, [SequenceState(PROMPTS[0], 9), SequenceState(PROMPTS[1], 9, stop=stop)])
    with pytest.raises(ZeroDivisionError):
        scheduler.run()
    assert scheduler.idle
    empty(spec.pool)


def test_no_row_is_ever_copied() -> None:
    """Slots written to pages are the committed tokens, despite joins and exits: nothing is realigned."""
    spec = decoder(BUSHY, "half", num_pages=200)
    states = [SequenceState(PROMPTS[i % 4], 5 + 3 * i) for i in range(9)]
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, states)
    scheduler.run()
    assert spec.stats.preemptions == 0
    committed = sum(len(s.tokens) - 1 for s in states)  # the last one is never computed
    accepted = sum(s.accepted + s.steps for s in states)
    cut = sum(len(s.prompt) + 1 for s in states) + accepted - sum(len(s.tokens) for s in states)
    assert spec.stats.slots_written == committed + cut
    assert cut < sum(CHAIN.size + 1 for _ in states), "beyond a limit at most one path is written"
