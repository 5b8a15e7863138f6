"""Prompt lookup and draft models: their guesses and their state; output tokens never change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from test_families import batch, greedy
from test_patch import snapshot
from test_patch_memory import peak_of, wide_model
from tiny_models import VOCAB, OracleDrafter, tiny_model
from toy_model import PROMPTS, ToyTarget, decoder, empty, finish, plain, same_as_plain
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.drafting import DraftInput
from specmemo_kernels.drafting.base import PagedDrafter, StatefulDrafter
from specmemo_kernels.drafting.draft_model import DraftModelDrafter
from specmemo_kernels.drafting.prompt_lookup import PromptLookupDrafter
from specmemo_kernels.engine.scheduler import Scheduler, submit_all
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.tree.draft_tree import DraftTree


def looked_up(tokens: list[int], depth: int, count: int, longest: int, shortest: int) -> list[list[int]]:
    """The same by comparing lists at each position."""
    found: dict[int, list[int]] = {}
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:] and len(found) < count:
                grown = list(tokens)
                for place in range(start + size, start + size + depth):
                    grown.append(grown[place])
                row = grown[len(tokens) :]
                found.setdefault(row[0], row)
    return list(found.values())


@settings(max_examples=examples(300), deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 2**33]), min_size=1, max_size=30),
    depth=st.integers(1, 9),
    count=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_prompt_lookup_finds_what_comparing_finds(tokens: list[int], depth: int, count: int, sizes: list[int]) -> None:
    drafter = PromptLookupDrafter(depth, max_ngram=sizes[1], min_ngram=sizes[0])
    assert drafter.continuations(tokens, depth, count) == looked_up(tokens, depth, count, sizes[1], sizes[0])


def test_prompt_lookup_fills_a_tree() -> None:
    """Rank r at the root is another match; below, first ranks only; rows without a match have no guess."""
    tree = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [0, 1], [2]])
    rows = [[7, 1, 2, 3, 9, 1, 2, 5, 1, 2], [1, 2, 3]]
    inputs = DraftInput(tree, torch.tensor([2, 3]), torch.zeros(2, 1), rows)
    assert PromptLookupDrafter().propose(inputs)[:, 1:].tolist() == [[5, 3, 1, 9, -1, -1], [-1] * 6]


def repetitive(rows: int = 2) -> dict[str, torch.Tensor]:
    """Prompts whose tokens repeat in a cycle."""
    ids = torch.tensor([[3 + (i + row) % 7 for i in range(40)] for row in range(rows)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_prompt_lookup_through_patch() -> None:
    """The same tokens, in fewer steps on repetitive text; the plan has no bytes for the drafter."""
    model = tiny_model("llama", seed=3)
    for inputs, new in ((repetitive(), 60), (batch((9, 30), seed=1), 60)):
        expected = greedy(model, inputs, new)
        with sk.patch(model, "prompt-lookup") as handle:
            assert torch.equal(greedy(model, inputs, new), expected)
            assert isinstance(handle.drafter, sk.PromptLookupDrafter)
            assert handle.plan.tree == DraftTree.chain(10)
            assert handle.plan.parts["heads"] == handle.plan.parts.get("drafter_pages", 0) == 0
    ends = tiny_model("llama", seed=3)
    ends.generation_config.eos_token_id = None
    with sk.patch(ends, sk.PromptLookupDrafter(4), tree=4) as handle:
        assert handle.plan.tree == DraftTree.chain(3)


def test_prompt_lookup_saves_steps_on_text_that_repeats() -> None:
    """Right guesses are accepted, and steps without guesses verify a single node."""

    spec = decoder(DraftTree.chain(6), PromptLookupDrafter(6))
    state = SequenceState(PROMPTS[2] * 2, 120)
    finish(spec, [[state]])
    same_as_plain(state)
    text = state.tokens
    hits = sum(text[i] == row[0][0] for i in range(40, len(text)) if (row := looked_up(text[:i], 1, 1, 3, 1)))
    assert (spec.stats.tokens_per_step > 1) == (hits > 0)
    assert spec.stats.drafted < 6 * spec.stats.steps, "steps without a guess verified a chain all the same"


def toy_draft(depth: int, seed_change: float = 0.0) -> DraftModelDrafter:
    """The toy model as its own drafter, or a copy with a slightly different lm_head."""
    small = ToyTarget()
    small.lm_head = small.lm_head + seed_change * torch.roll(small.lm_head, 1, 0)
    return DraftModelDrafter(small, small.layers, max_depth=depth, weight_bytes=0, backend="reference")


def test_protocols() -> None:
    assert isinstance(toy_draft(3), PagedDrafter)
    assert not isinstance(PromptLookupDrafter(), StatefulDrafter)
    assert isinstance(PromptLookupDrafter(), sk.Drafter)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_accepted_is_one_more_than_drafted(depth: int) -> None:
    """A draft model equal to the target: every step emits K + 1 tokens and computes each token once."""
    drafter = toy_draft(depth)
    spec = decoder(DraftTree.chain(depth), drafter)
    drafter.allocate(64, 4, 4, 7)
    wanted = 1 + 4 * (depth + 1)
    states = [SequenceState(prompt, wanted) for prompt in PROMPTS]
    finish(spec, [states])
    for state in states:
        same_as_plain(state)
        assert (state.steps, state.accepted) == (4, 4 * depth)
    assert spec.stats.tokens_per_step == depth + 1
    once = sum(len(s.tokens) for s in states)
    assert drafter.rows_computed <= once, "tokens in its pages were computed anew"
    empty(drafter._pool)


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=30), min_size=1, max_size=6),
    new=st.integers(1, 20),
    change=st.sampled_from([0.0, 0.1, 0.4]),
    tree=st.sampled_from([DraftTree.chain(3), DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0]])]),
    spare=st.integers(0, 10),
    chunk=st.integers(1, 12),
    abort=st.integers(0, 12),
)
def test_draft_model_under_page_pressure(
    prompts: list[list[int]], new: int, change: float, tree: DraftTree, spare: int, chunk: int, abort: int
) -> None:
    """Joining, preemption and aborts: the drafter's pages follow the sequences, and guesses are its own text."""
    pages = -(-(max(map(len, prompts)) + new + tree.max_depth) // 4) + spare
    drafter = toy_draft(3, change)
    drafter.allocate(pages, 4, 4, chunk)
    spec = decoder(tree, drafter, num_pages=pages, prefill_chunk=chunk)
    scheduler = Scheduler(spec, 4)
    states = [SequenceState(prompt, new) for prompt in prompts]
    submit_all(scheduler, states)
    for step in range(10_000):
        if step == abort:
            scheduler.abort(states[-1])
        scheduler.step()
        if drafter._pool is not None:
            drafter._pool.check_integrity()
        if scheduler.idle:
            break
    if drafter._pool is not None:  # else no sequence needed a second token
        empty(drafter._pool)
    for state in states:
        if not state.aborted:
            same_as_plain(state)
            if change == 0 and not state.preemptions and new > 5:
                assert state.accepted > 0


def test_draft_of_a_sequence_does_not_depend_on_others() -> None:
    """Guesses in a batch are the draft model's own greedy text at each step."""
    drafter = toy_draft(4, 0.3)
    drafter.allocate(64, 4, 4, 5)
    small = drafter.model
    assert isinstance(small, ToyTarget)
    texts = [list(prompt) for prompt in PROMPTS[:3]]
    for step in range(6):
        roots = torch.tensor([text[-1] for text in texts])
        inputs = DraftInput(DraftTree.chain(4), roots, torch.zeros(3, 1), texts, [5, 1, 9])
        guesses = drafter.propose(inputs)[:, 1:].tolist()
        assert guesses == [plain(small, text, 4) for text in texts]
        for row, text in enumerate(texts):  # all, some or none of the guesses become real
            text.extend([*guesses[row][: (step + row) % 5], (step * 7 + row) % 23])


def test_a_draft_model_without_room_guesses_nothing() -> None:
    """Sequences with pages get guesses, others don't; they catch up when pages are free again."""
    drafter = toy_draft(4)
    drafter.allocate(8, 4, 4, 5)  # for 32 tokens
    small, chain = drafter.model, DraftTree.chain(4)
    assert isinstance(small, ToyTarget)
    texts = [[*range(14)], [*range(14)], [*range(3)]]  # with three guesses 5, 5 and 2 pages

    def guesses(rows: list[int]) -> list[list[int]]:
        named = [texts[row] for row in rows]
        roots = torch.tensor([text[-1] for text in named])
        found = drafter.propose(DraftInput(chain, roots, torch.zeros(len(rows), 1), named, rows))[:, 1:].tolist()
        drafter._pool.check_integrity()
        return found

    expected = [plain(small, text, 4) for text in texts]
    assert guesses([0, 1, 2]) == [expected[0], [-1] * 4, expected[2]]
    assert guesses([1]) == [[-1] * 4]
    texts[1].extend([1, 2, 3])
    texts[2].append(expected[2][0])
    assert guesses([1, 2]) == [[-1] * 4, plain(small, texts[2], 4)]
    drafter.close(0)
    assert guesses([1, 2]) == [plain(small, texts[1], 4), plain(small, texts[2], 4)]
    for row in (1, 2):
        drafter.close(row)
    empty(drafter._pool)


def test_a_prefix_that_the_draft_model_never_computed() -> None:
    """The target keeps a prefix of a call without drafts; the batch that shares it has no room for the draft model's
    copies.
    """
    model = tiny_model("llama", seed=11)
    small, prefix = draft_of(model, 0.0), list(range(1, 49)) * 4
    prompts = [[*prefix, 50 + i] for i in range(4)]
    expected = [greedy(model, {"input_ids": torch.tensor([p])}, 12)[0, len(p) :].tolist() for p in prompts]
    options = {"tree": DraftTree.chain(3), "max_batch_size": 2, "prefill_chunk": 32}
    with sk.patch(model, small, **options) as handle:
        per_token = sum(layer.bytes_per_token for layer in handle.facts.layers) + handle.drafter.kv_bytes_per_token
        budget = sum(handle.plan.parts.values()) + 20 * 16 * per_token  # the prefix takes 12 pages of 16 tokens
    with sk.patch(model, small, memory_budget=budget, **options) as handle:
        assert 14 < handle.plan.max_pages < 24
        assert handle.plan.max_sequences == 2
        sk.generate_batch(model, [prefix, prefix], max_new_tokens=1)
        assert handle.drafter.page_bytes == 0
        for _ in range(2):
            done = sk.generate_batch(model, prompts, max_new_tokens=12)
            assert [completion.tokens for completion in done] == expected
            assert handle.stats.reused_tokens > 4 * 190
        assert handle.stats.tokens_per_step > 1


def draft_of(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy with slightly changed weights."""
    small = tiny_model("llama", seed=11)
    small.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    for parameter in small.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return small


@pytest.mark.parametrize("noise", sample([0.0, 0.01, 1.0], [0.01]))
@pytest.mark.parametrize("places", sample((1, 3), [3]))
def test_draft_model_through_patch(noise: float, places: int) -> None:
    model = tiny_model("llama", seed=11)
    small = draft_of(model, noise)
    before, small_before = snapshot(model), snapshot(small)
    inputs = batch((9, 30, 1, 17), seed=1)
    expected, own = greedy(model, inputs, 31), greedy(small, inputs, 10)
    chain = DraftTree.chain(4)
    with sk.patch(model, sk.DraftModel(small, tokens=4), tree=chain, max_batch_size=places, prefill_chunk=16) as handle:
        assert torch.equal(greedy(model, inputs, 31), expected)
        assert torch.equal(greedy(model, inputs, 31), expected)
        assert handle.plan.tree == DraftTree.chain(4)
        assert torch.equal(greedy(small, inputs, 10), own), "the draft model itself works as before"
        if noise == 0:
            assert handle.stats.tokens_per_step == 5
        held = handle.bytes_by_part
        assert held["drafter_pages"] == held["kv_pages"]
        assert held["heads"] == sum(p.numel() * 4 for p in small.parameters()) + sum(
            b.numel() * b.element_size() for b in small.buffers()
        )
    assert snapshot(model) == before
    assert snapshot(small) == small_before
    with sk.patch(model, small) as handle:
        assert handle.plan.tree == DraftTree.chain(5)


def test_a_tree_without_a_first_guess() -> None:
    """A draft model fills the chain of first guesses, which this tree doesn't have."""
    model = tiny_model("llama", seed=11)
    expected = greedy(model, batch((9,)), 12)
    with sk.patch(model, sk.DraftModel(draft_of(model, 0.0), tokens=2), tree=[[1]]):
        assert torch.equal(greedy(model, batch((9,)), 12), expected)


def test_draft_model_of_another_family() -> None:
    """A draft model with layers of other sizes and kinds, with windows."""
    model, small = tiny_model("llama", seed=2), tiny_model("gemma2", seed=5)
    inputs = batch((40, 3), seed=4)
    expected = greedy(model, inputs, 30)
    with sk.patch(model, small):
        assert torch.equal(greedy(model, inputs, 30), expected)


@pytest.mark.slow
def test_memory_of_a_draft_model_is_planned() -> None:
    """Peak bytes with its weights stay within the budget, its pages and passes included."""
    model, small = wide_model("llama", seed=20), wide_model("llama", seed=21, hidden_size=160)
    with sk.patch(model, small, max_batch_size=2, prefill_chunk=64) as handle:
        least = sum(handle.plan.parts.values())
    with sk.patch(model, small, memory_budget=least + 600_000, max_batch_size=2, prefill_chunk=64) as handle:
        plan = handle.plan
        assert plan.parts["drafter_pages"] > 0
        assert sum(plan.parts.values()) <= least + 600_000
        assert plan.max_tokens is not None
        longest = min(plan.max_tokens, 400) - 40
        peak = peak_of(handle, batch((longest, longest // 2, 7)), 30)
        assert peak + handle.drafter.nbytes <= sum(plan.parts.values())


def test_draft_models_that_do_not_fit() -> None:
    model = tiny_model("llama", seed=26)
    before = snapshot(model)
    for small, message in (
        (tiny_model("llama", vocab_size=VOCAB + 3), rf"vocabulary of {VOCAB + 3} tokens, the model one of {VOCAB}"),
        (model, "must be another model"),
        (tiny_model("llama").train(), "training mode"),
        (sk.DraftModel(torch.nn.Linear(2, 2)), "needs generate and an lm_head, got Linear"),
        (sk.DraftModel(tiny_model("llama"), tokens=0), "tokens per step is 0, it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sk.patch(model, small)
        assert snapshot(model) == before
    with pytest.raises(ValueError, match="max_depth is 0"):
        sk.PromptLookupDrafter(0)
    with pytest.raises(sk.BudgetError, match="prompt-lookup"):
        sk.patch(model, tiny_model("llama"), memory_budget="50KiB")
    assert snapshot(model) == before


def test_a_draft_model_from_a_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = tiny_model("llama", seed=11)
    draft_of(model, 0.0).save_pretrained(tmp_path)
    inputs = batch((9, 20))
    expected = greedy(model, inputs, 20)
    with sk.patch(model, sk.DraftModel(tmp_path, tokens=3), tree=DraftTree.chain(3)) as handle:
        assert torch.equal(greedy(model, inputs, 20), expected)
        assert handle.stats.tokens_per_step > 3


def test_sampling_with_other_drafters() -> None:
    """The tokens of a seed don't depend on the drafter."""
    model = tiny_model("llama", seed=11)
    prompts = [[5, 9, 3], [7], list(range(20))]
    sampling = sk.Sampling(temperature=0.8, seed=3)
    texts = []
    for heads in (OracleDrafter([], 0.0), "prompt-lookup", draft_of(model, 0.01)):
        with sk.patch(model, heads, tree=DraftTree.chain(3)):
            texts.append([c.tokens for c in sk.generate_batch(model, prompts, max_new_tokens=20, sampling=sampling)])
    assert texts[0] == texts[1] == texts[2]
