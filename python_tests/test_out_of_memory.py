"""Memory runs out at every allocation of a step: the step is tried again, and nothing but time is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from failing_allocations import failing_everywhere
from test_decode import BUSHY
from toy_model import PROMPTS, VOCAB, WIDTH, ToyTarget, empty

from specmemo_kernels import MedusaHeads, Sampling, TypicalAcceptance
from specmemo_kernels.decode import SequenceState, SpecDecoder
from specmemo_kernels.drafting import Drafter, DraftInput
from specmemo_kernels.drafting.base import PagedDrafter
from specmemo_kernels.drafting.draft_model import DraftModelDrafter
from specmemo_kernels.drafting.medusa import MedusaDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.paged_kv import PagedKVPool
from specmemo_kernels.pressure import Governor, Level
from specmemo_kernels.sampled import SampledVerifier
from specmemo_kernels.scheduler import Scheduler, submit_all
from specmemo_kernels.tree import DraftTree

TARGET = ToyTarget(dtype=torch.float32, backend="cpu")
CHAIN = DraftTree.chain(3)
Answers = list[list[int]]


class Knowing:
    """Guesses what is known to come, and every third time something else."""

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
    """A small generation: prompts in chunks of 5 tokens, three sequences at once, in as many pages as asked."""

    drafter: Callable[[Answers], Drafter] = Knowing
    tree: DraftTree = CHAIN
    pages: int = 40
    samplings: tuple[Sampling | None, ...] = (None,) * 4
    kv_dtype: str | None = None
    new_tokens: int = 6
    prompts: tuple[tuple[int, ...], ...] = tuple(map(tuple, PROMPTS))

    def states(self) -> list[SequenceState]:
        return [
            SequenceState(list(prompt), self.new_tokens, sampling=sampling)
            for prompt, sampling in zip(self.prompts, self.samplings, strict=False)
        ]

    def scheduler(self, answers: Answers, governor: Governor | None = None) -> Scheduler:
        pool = PagedKVPool(
            TARGET.layers, num_pages=self.pages, page_size=4, max_sequences=3, max_nodes=3 * self.tree.size,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        drafter, verifier = self.drafter(answers), SampledVerifier(TARGET, "cpu", self.samplings)
        if isinstance(drafter, PagedDrafter):
            drafter.allocate(self.pages, 4, 3, 5)
        spec = SpecDecoder(TARGET, drafter, self.tree, pool, verifier, prefill_chunk=5, backend="cpu")
        return Scheduler(spec, 3, governor=governor)

    def undisturbed(self) -> Answers:
        """All tokens of each sequence; without drafts, but where these have a say in the tokens."""
        plain = self if self.samplings is TYPICAL else replace(self, tree=DraftTree.chain(0), pages=40)
        states, scheduler = self.states(), plain.scheduler([])
        submit_all(scheduler, states)
        scheduler.run()
        return [state.tokens for state in states]


def patient(swap: bool = False) -> Governor:
    """Any number of tries, none with less than everything."""
    return Governor([Level(99, 5, True, True, 3)] * 10_000, swap=swap)


SAMPLED = (Sampling(seed=1), None, Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=2), Sampling(seed=3))
TYPICAL = (Sampling(seed=4, typical=TypicalAcceptance(epsilon=0.01, alpha=0.1)), None, Sampling(seed=5), None)
TIGHT = ((3, 1, 4), (9,), (2, 6))  # in nine pages of four tokens all begin, and not all can go on
RUNS = {
    "bushy": Run(tree=BUSHY),
    "sampled": Run(samplings=SAMPLED),
    "typical": Run(medusa, samplings=TYPICAL),
    "medusa": Run(medusa),
    "lookup": Run(lambda _: PromptLookupDrafter()),
    "draft model": Run(draft_model),
    "preempted": Run(pages=9, new_tokens=14, prompts=TIGHT),
    "quantised": Run(pages=9, new_tokens=14, prompts=TIGHT, kv_dtype="int8"),
}


@pytest.mark.parametrize(
    ("name", "swap"), [*((name, False) for name in RUNS), ("preempted", True), ("quantised", True)]
)
def test_every_site_of_every_step(name: str, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step is tried until no allocation fails any more: the tokens are those of the undisturbed run."""
    run = RUNS[name]
    expected = run.undisturbed()
    states, scheduler = run.states(), run.scheduler(expected, patient(swap))
    submit_all(scheduler, states)
    # A copy to the host that fails isn't tried again: the tokens are computed anew.
    with failing_everywhere(monkeypatch, sparing="park") as mode:
        while not scheduler.idle:
            before = [list(state.tokens) for state in states]
            scheduler.step()
            scheduler.decoder.pool.check_integrity()
            assert all(state.tokens[: len(tokens)] == tokens for state, tokens in zip(states, before, strict=True))
    assert [state.tokens for state in states] == expected
    stats = scheduler.decoder.stats
    assert stats.retries == mode.failures > 50
    assert (stats.preemptions > 0) == (run.prompts == TIGHT)
    assert (stats.swaps > 0) == swap
    empty(scheduler.decoder.pool)
