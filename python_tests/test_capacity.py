"""The maximum length of a text: the same limit for plans, chats, the scheduler and overlapped steps."""

from __future__ import annotations

import pytest
import torch
from selection import sample
from test_families import batch, greedy
from tiny_models import random_heads, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.engine import page_demand
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.integrations.hf.chat import longest_text
from specmemo_kernels.planning.memory_tracker import MemoryTracker


@pytest.mark.parametrize("graph", sample([True, False], [True]))
@pytest.mark.parametrize("tree", sample([1, 6], [6]))
def test_the_longest_text_fits(graph: bool, tree: int) -> None:
    """A prompt and its new tokens of the maximum length are generated correctly; one more token is refused."""
    model = tiny_model("llama", seed=3, max_position_embeddings=8192)
    new = 20
    with sk.patch(
        model, random_heads(model), memory_budget=700_000, tree=tree, max_batch_size=1, prefill_chunk=32, graph=graph,
        reuse_prefix=False,
    ) as handle:  # fmt: skip
        longest = longest_text(model)
        assert longest < model.config.max_position_embeddings, "the plan isn't what bounds the text"
        inputs, longer = batch((longest - new,)), batch((longest - new + 1,))
        found = greedy(model, inputs, new)
        assert handle.graphs.wanted == graph
        assert (handle.stats.graph_steps > 0) == graph
        with pytest.raises(sk.BudgetError, match="shorten the prompt or max_new_tokens"):
            greedy(model, longer, new)
        with pytest.raises(sk.BudgetError):
            sk.generate_batch(model, longer["input_ids"].tolist(), max_new_tokens=new)
        assert [len(c.tokens) for c in sk.generate_batch(model, inputs["input_ids"].tolist(), max_new_tokens=new)] == [
            new
        ]
    assert torch.equal(found, greedy(model, inputs, new))


END = 5


def whole(row: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ends_after(tokens: int):  # type: ignore[no-untyped-def]
    return lambda ids: len(ids) >= tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["heads", "graph", "model", "lookup"])
def test_pages_come_as_they_are_needed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget the pool grows with the text, sequences keep their pages, and no token is lost."""
    monkeypatch.setattr(page_demand, "FIRST_TOKENS", 24)
    model = tiny_model("llama", seed=4)
    heads = {"model": tiny_model("llama", seed=4, num_hidden_layers=1), "lookup": "prompt-lookup"}
    prompts = batch((9, 5, 7))
    rows = [
        ids[mask.bool()].tolist() for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
    ]
    expected = [greedy(model, whole(row), 150)[0, len(row) :].tolist() for row in rows]
    options = {"graph": drafter == "graph"}
    tree = None if drafter == "model" else 4
    with sk.patch(model, heads.get(drafter, random_heads(model)), tree=tree, max_batch_size=2, **options) as handle:
        requests = [sk.Request(row, 10**9, stop=ends_after(len(row) + 150)) for row in rows]
        assert [c.tokens for c in sk.generate_batch(model, requests)] == expected
        stats = handle.stats
        assert stats.preemptions == 0
        assert (stats.graph_steps > 0) == (drafter == "graph")
        pool = handle.pool
        assert pool is not None
        assert pool.block_table.shape[1] == pool.num_pages <= 2 * handle.pages_for([2 * (150 + 24 + 9)])
        pool.check_integrity()
        assert stats.bytes_by_part == handle.bytes_by_part


def test_ordinary_calls_get_their_pages_at_once() -> None:
    model = tiny_model("llama", seed=4)
    with sk.patch(model, "prompt-lookup", tree=4) as handle:
        for new in (page_demand.FIRST_TOKENS // 2, page_demand.FIRST_TOKENS):
            sequence = SequenceState([3, 4, 5], new)
            handle.scheduler([sequence], None)  # type: ignore[arg-type]
            assert handle.pool is not None
            assert handle.pool.num_pages == handle.pages_for([3 + new + handle.slots_ahead])


def test_a_huge_limit_takes_no_memory() -> None:
    """A billion new tokens, stopped after five by a criterion: the bytes of a short call."""
    model = tiny_model("llama", seed=4)
    inputs = batch((9, 5))
    with sk.patch(model, "prompt-lookup", tree=4), MemoryTracker() as tracker:
        found = model.generate(
            **inputs,
            max_new_tokens=10**9,
            do_sample=False,
            stopping_criteria=[lambda ids, _: torch.tensor([ids.shape[1] >= 14] * 2)],
            eos_token_id=END,
        )
        assert found.shape[1] <= 14
        assert tracker.peak < 50 * 2**20
        with (
            pytest.raises(sk.BudgetError),
            sk.patch(tiny_model("llama", seed=4), "prompt-lookup", tree=4, memory_budget=2 * 2**20) as bounded,
        ):
            bounded.model.generate(**inputs, max_new_tokens=10**9, do_sample=False)
