"""Prompts that begin like earlier texts are computed from there on alone, and write the same as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_families import greedy
from test_generate_batch import alone
from test_patch_memory import wide_model, with_workspace
from test_scheduler import empty
from tiny_models import VOCAB, OracleDrafter, tiny_model
from toy_model import PROMPTS, TARGET, ToyDrafter, same_as_plain
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.decode import GreedyVerifier, SequenceState, SpecDecoder
from specmemo_kernels.kv_storage import LayerKV
from specmemo_kernels.memory_tracker import MemoryTracker
from specmemo_kernels.paged_kv import OutOfPages, PagedKVPool
from specmemo_kernels.scheduler import Scheduler, submit_all

LAYER = LayerKV(1, 1, 1, torch.float64, torch.device("cpu"))


def content(tokens: list[int]) -> list[float]:
    """What stands for the keys of these tokens: a number that depends on each and on all before it."""
    values, value = [], 0.0
    for token in tokens:
        value = (7 * value + token + 1) % 100003
        values.append(value)
    return values


class Texts(RuleBasedStateMachine):
    """Sequences open, grow, close and begin like others, in a pool that is too small for all of them.

    Every slot of every page gets what stands for its token, and must hold it whenever somebody would read it.
    """

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 4))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagedKVPool(
            [LAYER], num_pages=num_pages, page_size=page_size, max_sequences=3, max_nodes=1, keep=True
        )
        self.open: dict[int, list[int]] = {}
        self.said: list[list[int]] = [[]]

    def write(self, slot: int, first: int) -> None:
        """Keys for the tokens from ``first`` on."""
        tokens, size = self.open[slot], self.pool.page_size
        for place, value in list(enumerate(content(tokens)))[first:]:
            self.pool.k_pages[0][self.pool.block_table[slot, place // size], place % size] = value

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, data: st.DataObject, more: list[int]) -> None:
        """As an earlier text, or a part of it, and something after it."""
        if not self.pool.fits_sequences(1):
            return
        earlier = data.draw(st.sampled_from(self.said))
        tokens = earlier[: data.draw(st.integers(0, len(earlier)))] + more
        expected = self.pool.known(tokens)
        slot = self.pool.open()
        known = self.pool.reuse(slot, tokens)
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
        self.pool.close(slot, tokens[: len(tokens) - unlabelled])
        self.said.append(tokens)

    @rule(num_pages=st.integers(2, 12))
    def move(self, num_pages: int) -> None:
        """Into a new pool, larger or smaller, while nobody is there."""
        if self.open:
            return
        pool = PagedKVPool(
            [LAYER], num_pages=num_pages, page_size=self.pool.page_size, max_sequences=3, max_nodes=1, keep=True
        )
        known = [self.pool.known(tokens) for tokens in self.said]
        pool.take_kept(self.pool)
        assert pool.kept_pages == min(num_pages, self.pool.kept_pages)
        if self.pool.kept_pages <= num_pages:
            assert [pool.known(tokens) for tokens in self.said] == known
        self.pool = pool

    @rule()
    def forget(self) -> None:
        if self.open:
            with pytest.raises(RuntimeError, match=f"{len(self.open)} sequences are open"):
                self.pool.forget()
            return
        self.pool.forget()
        assert self.pool.kept_pages == 0
        assert not any(self.pool.known(tokens) for tokens in self.said)

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


TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_kept_pages_go_oldest_first_and_texts_from_their_end() -> None:
    pool = PagedKVPool([LAYER], num_pages=6, page_size=2, max_sequences=2, max_nodes=1, keep=True)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    for tokens in (old, new):
        slot = pool.open()
        pool.reserve(slot, len(tokens))
        pool.close(slot, tokens)
    assert (pool.kept_pages, pool.free_pages) == (5, 6)
    slot = pool.open()
    for pages, spared in ((1, 6), (2, 4), (3, 2), (4, 0)):
        pool.reserve(slot, 2 * pages)
        assert (pool.known([*old, 0]), pool.known([*new, 0])) == (spared, 4)
    pool.close(slot)
    pool.check_integrity()


def keeping_decoder(num_pages: int = 64, drafter: str = "half") -> SpecDecoder:
    """The toy model's decoder over a pool that keeps pages."""
    tree = sk.DraftTree.chain(3)
    pool = PagedKVPool(
        TARGET.layers, num_pages=num_pages, page_size=4, max_sequences=4, max_nodes=4 * tree.size, keep=True
    )
    verifier = GreedyVerifier(TARGET, "reference")
    return SpecDecoder(TARGET, ToyDrafter(drafter, TARGET), tree, pool, verifier, prefill_chunk=7, backend="reference")


def test_sequences_that_share_pages_write_what_they_write_alone() -> None:
    """Beginnings are read by several at once; pages are scarce, so some are preempted and come back."""
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
    """Two that begin with the same kept text run side by side where there are pages for the beginning only once."""
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
    """Nobody took them meanwhile, so only the last page is computed anew."""
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
    """A stop function fails in the middle of a step, when tokens are committed that nobody took."""

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


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def turns(model: PreTrainedModel, count: int, new: int = 20) -> list[tuple[list[int], list[int]]]:
    """Prompts of a conversation and the unpatched model's replies: each prompt is the last, its reply and some more."""
    found, ids = [], [5, 9, 3, 4, 5]
    for turn in range(count):
        found.append((ids, alone(model, ids, new)))
        ids = [*ids, *found[-1][1], *range(7, 14 + turn)]
    return found


def one(ids: list[int]) -> dict[str, torch.Tensor]:
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_conversation_computes_what_is_new(model: PreTrainedModel, kv_dtype: str | None) -> None:
    """Each turn: everything but the last token of the reply is there; the pages are those of a fresh run."""
    conversation = turns(model, 5)
    heads = sk.MedusaHeads(32, VOCAB, 3)
    with sk.patch(model, heads, tree=6, page_size=4, kv_dtype=kv_dtype) as handle:
        known = 0
        for prompt, reply in conversation:
            handle.stats.reset()
            output = greedy(model, one(prompt), 20)
            stats, size = handle.stats, handle.plan.page_size
            if kv_dtype is None:
                assert output[0, len(prompt) :].tolist() == reply
                assert stats.reused_tokens == known
            assert stats.prefill_tokens == len(prompt) - stats.reused_tokens
            pool = handle._pool
            assert pool is not None
            pool.check_integrity()
            assert pool.num_pages == -(-(len(prompt) + 20 + handle.plan.tree.max_depth) // size)
            known = len(prompt) + 20 - 1  # the newest token is never computed
        assert kv_dtype is not None or handle.stats.reused_tokens > 100


def test_a_batch_shares_a_beginning(model: PreTrainedModel) -> None:
    """Padded rows with a common beginning of two pages, after a call that computed it; three of them at a time."""
    start = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = [[*start, 10 + i, *range(20, 21 + i)] for i in range(5)]
    expected = [alone(model, prompt, 12) for prompt in prompts]
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4, max_batch_size=3) as handle:
        greedy(model, one([*start, 50]), 4)
        handle.stats.reset()
        done = sk.generate_batch(model, prompts, max_new_tokens=12, eos_token_ids=[])
        assert [completion.tokens for completion in done] == expected
        assert handle.stats.reused_tokens == 8 * 5
        assert handle.stats.prefill_tokens == sum(len(prompt) - 8 for prompt in prompts)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = greedy(model, {"input_ids": ids, "attention_mask": mask}, 12, pad_token_id=0)
        assert output[:, width:].tolist() == expected
        assert handle.stats.reused_tokens > 2 * 8 * 5
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4, reuse_prefix=False) as handle:
        for _ in range(2):
            assert greedy(model, one(prompts[0]), 12)[0, len(prompts[0]) :].tolist() == expected[0]
        assert handle.stats.reused_tokens == 0


def test_sampling_from_kept_pages(model: PreTrainedModel) -> None:
    """The same prompt again and again, each time with other samples: those of the unpatched model."""

    def sampled() -> list[list[int]]:
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}
        return [model.generate(**one([5, 9, 3, 4, 5, 6, 7]), **options)[0].tolist() for _ in range(4)]

    expected = sampled()
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4) as handle:
        assert sampled() == expected
        assert handle.stats.reused_tokens == 3 * 4


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[3, 5] += 0.5


def _through_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def _other_storage(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.flip(0)


def _other_parameter(model: PreTrainedModel) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2)


def _other_module(model: PreTrainedModel) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base, self.scaling, self.disabled = base, {"default": 1.5}, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.base(x)
            return y if self.disabled else y * self.scaling["default"]

    layer = model.model.layers[0].mlp
    layer.up_proj = Adapter(layer.up_proj)


def _switch(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.disabled = True


def _scale(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.scaling["default"] = 0.5


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output * 1.3)


def _a_training_step(model: PreTrainedModel) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize(
    "changes",
    [
        (_in_place,), (_through_data,), (_other_storage,), (_other_parameter,), (_other_module, _switch, _scale),
        (_hook,), (_a_training_step,),
    ],
    ids=lambda changes: "-".join(change.__name__.strip("_") for change in changes),
)  # fmt: skip
def test_another_model_finds_nothing(
    model: PreTrainedModel, changes: tuple[Callable[[PreTrainedModel], None], ...]
) -> None:
    """After each change the text is the changed model's own, and nothing of before is reused."""
    prompt = turns(model, 2)[1][0]
    with sk.patch(model, OracleDrafter([], 0.0), tree=3, page_size=4) as handle:
        greedy(model, one(prompt), 20)
        for change in changes:
            change(model)
            handle.stats.reset()
            assert greedy(model, one(prompt), 20)[0, len(prompt) :].tolist() == alone(copy.deepcopy(model), prompt, 20)
            assert handle.stats.reused_tokens == 0
        greedy(model, one(prompt), 20)
        assert handle.stats.reused_tokens > 0


def test_release_and_unpatch_drop_everything(model: PreTrainedModel) -> None:
    prompt = turns(model, 2)[1][0]
    for leave in (lambda handle: handle.release(), lambda handle: sk.unpatch(handle.model)):
        handle = model.specmemo if hasattr(model, "specmemo") else sk.patch(model, OracleDrafter([], 0.0), tree=3)
        greedy(model, one(prompt), 20)
        leave(handle)
        assert handle.bytes_by_part["kv_pages"] == 0
    with sk.patch(model, OracleDrafter([], 0.0), tree=3) as handle:
        greedy(model, one(prompt), 20)
        assert handle.stats.reused_tokens == 0


def test_a_draft_model_keeps_what_it_knows(model: PreTrainedModel) -> None:
    """It computes the new message alone as well, through larger pools."""
    prompts = [prompt for prompt, _ in turns(model, 3, new=12)]
    small = tiny_model("llama", seed=12, num_hidden_layers=1)
    rows = []
    with sk.patch(model, sk.DraftModel(small, tokens=3), tree=sk.DraftTree.chain(3), page_size=4) as handle:
        for prompt in prompts:
            before = handle.drafter.rows_computed
            greedy(model, one(prompt), 1 + 4)
            rows.append(handle.drafter.rows_computed - before)
            assert handle.drafter.page_bytes > 0
        steps = handle.stats.steps
    assert steps <= 3 * 4
    for prompt, count in zip(prompts[1:], rows[1:], strict=True):
        assert count < len(prompt), "the whole prompt was computed"


def test_kept_pages_count_inside_the_budget() -> None:
    """A conversation that fills its budget: pools grow beside the old ones only while both fit, then take all pages."""
    model = wide_model("llama", seed=20)
    heads = sk.MedusaHeads(128, VOCAB, 3)
    budget = with_workspace(model, 1_400_000)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=1, page_size=8) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        greedy(model, one([1, 2, 3]), 2)  # what is kept between calls
        handle.release()
        ids, reused, sizes = [5, 9, 3], 0, []
        with MemoryTracker() as tracker:
            while len(ids) + 20 + plan.tree.max_depth <= plan.max_tokens:
                handle.stats.reset()
                ids = [*greedy(model, one(ids), 20)[0].tolist(), *range(9, 19)]
                reused += handle.stats.reused_tokens > 0
                assert handle._pool is not None
                sizes.append(handle._pool.num_pages)
        assert tracker.peak + handle.drafter.nbytes <= plan.total_bytes
        assert len(sizes) > 4
        assert sizes[-1] == plan.max_pages
        assert reused >= len(sizes) - 2, "the first turn knows nothing, and once pages don't fit twice"
        expected = greedy(model, one(ids[: len(ids) // 2]), 10)
        handle.release()
        assert torch.equal(greedy(model, one(ids[: len(ids) // 2]), 10), expected)
