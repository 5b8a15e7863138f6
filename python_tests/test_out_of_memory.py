"""Memory runs out at every allocation of a step: the step is retried, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from failing_allocations import FailingAllocations, failing_everywhere
from selection import sample
from test_decode import BUSHY
from toy_model import VOCAB, WIDTH, ToyTarget, empty

from specmemo_kernels import MedusaHeads, Sampling, TypicalAcceptance
from specmemo_kernels.cache.paged_kv import OutOfPages, PagedKVPool
from specmemo_kernels.drafting import Drafter, DraftInput
from specmemo_kernels.drafting.base import PagedDrafter
from specmemo_kernels.drafting.draft_model import DraftModelDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.pressure import DegradationLevel, MemoryPressureController, is_out_of_memory, levels
from specmemo_kernels.engine.scheduler import Scheduler, submit_all
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import SampledVerifier
from specmemo_kernels.tree.draft_tree import DraftTree

TARGET = ToyTarget(dtype=torch.float32, backend="cpu")
CHAIN = DraftTree.chain(3)
Answers = list[list[int]]


class Knowing:
    """Guesses the right tokens, and every third time a wrong one."""

    max_depth, nbytes = 9, 0

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def propose(self, inputs: DraftInput) -> torch.Tensor:
        rows = []
        for tokens in inputs.token_ids:
            answer = next((a for a in self.answers if a[: len(tokens)] == tokens), [])
            future = [*answer[len(tokens) - 1 :], *[-1] * self.max_depth]
            rows.append([future[d] if (len(tokens) + d) % 3 else 0 for d in inputs.tree.depths])
        return torch.tensor(rows)


def medusa(_: Answers) -> Drafter:
    torch.manual_seed(3)
    heads = MedusaHeads(WIDTH, VOCAB, 3, own_lm_head=False)
    for parameter in heads.parameters():
        parameter.data.normal_()
    return MedusaDrafter(heads, (TARGET.lm_head, None), "cpu")


def draft_model(_: Answers) -> Drafter:
    return DraftModelDrafter(TARGET, TARGET.layers, max_depth=3, weight_bytes=0, backend="cpu")


@dataclass(frozen=True)
class Run:
    """A small generation: prompts in chunks of 5 tokens, three sequences at once, in a given number of pages."""

    drafter: Callable[[Answers], Drafter] = Knowing
    tree: DraftTree = CHAIN
    pages: int = 40
    samplings: tuple[Sampling | None, ...] = (None,) * 3
    kv_dtype: str | None = None
    new_tokens: int = 6
    prompts: tuple[tuple[int, ...], ...] = ((3, 1, 4), (9,), (2, 6))

    def states(self) -> list[SequenceState]:
        return [
            SequenceState(list(prompt), self.new_tokens, sampling=sampling)
            for prompt, sampling in zip(self.prompts, self.samplings, strict=True)
        ]

    def scheduler(self, answers: Answers, memory_pressure: MemoryPressureController | None = None) -> Scheduler:
        pool = PagedKVPool(
            TARGET.layers, num_pages=self.pages, page_size=4, max_sequences=3, max_nodes=3 * self.tree.size,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        drafter, verifier = self.drafter(answers), SampledVerifier(TARGET, "cpu")
        if isinstance(drafter, PagedDrafter):
            drafter.allocate(self.pages, 4, 3, 5)
        spec = SpecDecoder(TARGET, drafter, self.tree, pool, verifier, prefill_chunk=5, backend="cpu")
        return Scheduler(spec, 3, memory_pressure=memory_pressure)

    def undisturbed(self) -> Answers:
        """All tokens of each sequence without failures; without drafts unless they affect the tokens."""
        plain = self if self.samplings is TYPICAL else replace(self, tree=DraftTree.chain(0), pages=40)
        states, scheduler = self.states(), plain.scheduler([])
        submit_all(scheduler, states)
        scheduler.run()
        return [state.tokens for state in states]


def patient(swap: bool = False) -> MemoryPressureController:
    """Any number of retries, none of them degraded."""
    return MemoryPressureController([DegradationLevel(99, 5, True, True, 3)] * 10_000, swap=swap)


SAMPLED = (Sampling(seed=1), None, Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=2))
TYPICAL = (Sampling(seed=4, typical=TypicalAcceptance(epsilon=0.01, alpha=0.1)), None, Sampling(seed=5))
RUNS = {
    "bushy": Run(tree=BUSHY),
    "roots alone": Run(tree=DraftTree.chain(0)),
    "sampled": Run(samplings=SAMPLED),
    "typical": Run(medusa, samplings=TYPICAL),
    "medusa": Run(medusa),
    "lookup": Run(lambda _: PromptLookupDrafter()),
    "draft model": Run(draft_model),
    # In nine pages of four tokens all begin, and not all can go on.
    "preempted": Run(pages=9, new_tokens=14),
    "quantised": Run(pages=9, new_tokens=14, kv_dtype="int8"),
}


@pytest.mark.parametrize(
    ("name", "swap"),
    sample(
        [*((name, False) for name in RUNS), ("preempted", True), ("quantised", True)],
        [("quantised", True)],
    ),
)
def test_every_site_of_every_step(name: str, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is retried until no allocation fails: the tokens are those of the undisturbed run."""
    run = RUNS[name]
    expected = run.undisturbed()
    states, scheduler = run.states(), run.scheduler(expected, patient(swap))
    submit_all(scheduler, states)
    # A copy to the host that fails isn't tried again: the tokens are computed anew.
    with failing_everywhere(monkeypatch, sparing="swap_out") as mode:
        while not scheduler.idle:
            before = [list(state.tokens) for state in states]
            scheduler.step()
            scheduler.decoder.pool.check_integrity()
            assert all(state.tokens[: len(tokens)] == tokens for state, tokens in zip(states, before, strict=True))
    assert [state.tokens for state in states] == expected
    stats = scheduler.decoder.stats
    assert stats.retries == mode.failures > 50
    assert (stats.preemptions > 0) == (run.pages == 9)
    assert (stats.swaps > 0) == swap
    empty(scheduler.decoder.pool)


@pytest.mark.parametrize("part", sample(range(6), [0]))
def test_a_failure_shrinks_and_changes_nothing(part: int) -> None:
    """One failure anywhere in a run with all degradations possible: the tree is halved, the tokens are the same."""
    run = replace(RUNS["preempted"], samplings=SAMPLED)
    expected = run.undisturbed()
    counting = FailingAllocations(lambda site: False)
    for mode in (counting, FailingAllocations(lambda site: site == (2 * part + 1) * counting.site // 12)):
        states, scheduler = run.states(), run.scheduler(expected)
        submit_all(scheduler, states)
        with mode:
            scheduler.run()
        assert [state.tokens for state in states] == expected
        assert (
            mode.failures
            == scheduler.decoder.stats.retries
            == scheduler.decoder.stats.shrinks
            == scheduler.memory_pressure.shrunk
        )
        empty(scheduler.decoder.pool)
    assert scheduler.memory_pressure.level.max_tree == 2


@pytest.mark.parametrize("swap", sample([False, True], [True]))
def test_many_failures(swap: bool) -> None:
    """Four in a row, for all degradations, and later three: the level is raised in between."""
    run = replace(RUNS["preempted"], samplings=SAMPLED, new_tokens=60, pages=30)
    expected = run.undisturbed()
    states = run.states()
    memory_pressure = MemoryPressureController(levels(4, 5, 3, heads=False), swap=swap, poll_every=1)
    scheduler = run.scheduler(expected, memory_pressure)
    submit_all(scheduler, states)
    with FailingAllocations(lambda site: site in (*range(900, 904), *range(2800, 2803))) as mode:
        while not scheduler.idle:
            scheduler.step()
            scheduler.decoder.pool.check_integrity()
    assert [state.tokens for state in states] == expected
    stats = scheduler.decoder.stats
    assert stats.shrinks == mode.failures == 7
    assert stats.grows >= 3
    assert (stats.swaps > 0) == swap
    empty(scheduler.decoder.pool)


@pytest.mark.parametrize("begins", [0, 200, 500])
def test_memory_that_does_not_come_back(begins: int) -> None:
    """The error lists the attempts; every page is free, and generation continues once memory is back."""
    run = replace(RUNS["preempted"], samplings=SAMPLED)
    expected = run.undisturbed()
    states, scheduler = run.states(), run.scheduler(expected)
    submit_all(scheduler, states)
    with FailingAllocations(lambda site: site >= begins), pytest.raises(torch.OutOfMemoryError) as failure:
        scheduler.run()
    assert "lowest degradation level (DegradationLevel(max_tree=1" in failure.value.__notes__[0]
    assert all(state.tokens == answer[: len(state.tokens)] for state, answer in zip(states, expected, strict=True))
    empty(scheduler.decoder.pool)
    states = run.states()
    again = Scheduler(scheduler.decoder, 3, memory_pressure=scheduler.memory_pressure, max_pages=run.pages)
    submit_all(again, states)
    again.run()
    assert [state.tokens for state in states] == expected
    empty(again.decoder.pool)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OutOfPages("3 of 4 are free; shorten the prompt"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_counts(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_what_torch_raises_counts() -> None:
    """A real failure of torch's CPU allocator."""
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)
