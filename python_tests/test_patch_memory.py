"""The memory bound of a patched model holds, and what can't fit is refused with the numbers."""

from __future__ import annotations

import pytest
import torch
from test_families import answers, batch, greedy
from tiny_models import VOCAB, OracleDrafter, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.memory_tracker import MemoryTracker

WIDE = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "num_hidden_layers": 3}


@pytest.mark.parametrize("budget", [400_000, 900_000, "4 MiB"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_peak_stays_within_the_budget(family: str, budget: int | str) -> None:
    """Peak bytes of live tensors plus the heads, measured independently, for prompts far longer than a chunk."""
    model = tiny_model(family, seed=20, **WIDE)
    heads = sk.MedusaHeads(128, VOCAB, 3)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=2) as handle:
        plan = handle.plan
        assert plan.budget is not None and sum(plan.parts.values()) <= plan.budget
        longest = min(plan.max_tokens // 2, 400) - 40
        inputs = batch((longest, longest // 2, 7))
        greedy(model, inputs, 4)
        handle.release()
        with MemoryTracker() as tracker:
            greedy(model, inputs, 30)
        assert tracker.peak + handle.drafter.nbytes <= plan.budget
        assert handle.stats.bytes_by_part["kv_pages"] <= plan.parts["kv_pages"]


def test_activations_are_predicted_not_guessed() -> None:
    """The plan's bytes for a forward pass are near what one takes: above it, and not twice it."""
    model = tiny_model("llama", seed=21, **WIDE)
    with sk.patch(model, OracleDrafter([], 0.0), tree=8, max_batch_size=1, prefill_chunk=256) as handle:
        inputs = batch((256,))
        greedy(model, inputs, 2)
        with MemoryTracker() as tracker:
            greedy(model, inputs, 2)
        assert tracker.peak <= handle.plan.parts["activations"] <= 2 * tracker.peak


def test_more_rows_than_places() -> None:
    """Rows wait for a free place; pages bound how many run, never which tokens come out."""
    model = tiny_model("llama", seed=22)
    inputs = batch((30, 5, 18, 44, 9))
    expected = greedy(model, inputs, 20)
    drafter = OracleDrafter(answers(inputs, expected), 0.7)
    for places, budget in ((2, None), (5, 120_000), (8, 40_000)):
        with sk.patch(model, drafter, tree=6, max_batch_size=places, memory_budget=budget) as handle:
            assert torch.equal(greedy(model, inputs, 20), expected)
            pool = handle._pool
            assert pool is not None and pool.free_pages == pool.num_pages
            pool.check_integrity()
            assert pool.page_bytes < expected.numel() * 2 * pool.page_bytes // pool.num_pages


def test_pool_serves_again_and_grows() -> None:
    model = tiny_model("llama", seed=23)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4) as handle:
        greedy(model, batch((20,)), 10)
        first = handle._pool
        greedy(model, batch((10,)), 10)
        assert handle._pool is first, "a shorter call reuses the pages"
        greedy(model, batch((200,)), 10)
        assert handle._pool is not first and handle._pool.num_pages >= 14


def test_budget_too_small_for_a_page() -> None:
    model = tiny_model("llama", seed=24)
    with pytest.raises(sk.BudgetError, match=r"2\.0 KiB is too small for one page of 16 tokens.*give at least"):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), memory_budget=2048)
    assert "specmemo" not in vars(model)
    with pytest.raises(ValueError, match="memory_budget is 'lots'"):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), memory_budget="lots")


def test_prompt_longer_than_the_plan() -> None:
    """The error names what was asked and what there is; the model goes on working."""
    model = tiny_model("llama", seed=25)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4, memory_budget=60_000) as handle:
        limit = handle.plan.max_tokens
        with pytest.raises(sk.BudgetError, match=rf"may take \d+ slots, the plan holds {limit}"):
            greedy(model, batch((limit,)), 10)
        assert greedy(model, batch((20,)), 10).shape == (1, 30)


def test_heads_for_another_model() -> None:
    model = tiny_model("llama", seed=26)
    before = type(model)
    for heads, message in (
        (sk.MedusaHeads(48, VOCAB, 2), r"48.*32|32.*48"),
        (sk.MedusaHeads(32, VOCAB + 3, 2), rf"{VOCAB + 3}.*{VOCAB}|{VOCAB}.*{VOCAB + 3}"),
        ({}, "head"),
    ):
        with pytest.raises(ValueError, match=message):
            sk.patch(model, heads)
        assert type(model) is before and not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": 0}, "tree is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"tree": [[0], [1, 0]]}, r"\[1, 0\] comes before its parent"),
        ({"max_batch_size": -1}, "max_batch_size is -1"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    model = tiny_model("llama", seed=27)
    with pytest.raises((ValueError, RuntimeError), match=message):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), **options)
    assert "specmemo" not in vars(model) and not model.lm_head._forward_pre_hooks


def test_drafter_of_the_wrong_shape() -> None:
    model = tiny_model("llama", seed=28)

    class Wrong(OracleDrafter):
        def propose(self, inputs):  # type: ignore[no-untyped-def]
            return torch.zeros(1, 2)

    with sk.patch(model, Wrong([], 0.0), tree=5), pytest.raises(ValueError, match=r"propose returned \(1, 2\).*\(1, 5\)"):
        greedy(model, batch((8,)), 10)


def test_rubbish_costs_speed_alone() -> None:
    """Tokens outside of the vocabulary, negative ones, repeated siblings."""
    model = tiny_model("llama", seed=29)
    inputs = batch((12, 8))
    expected = greedy(model, inputs, 15)

    class Rubbish(OracleDrafter):
        def propose(self, inputs):  # type: ignore[no-untyped-def]
            shape = (len(inputs.token_ids), inputs.tree.size)
            return torch.randint(-(2**40), 2**40, shape, generator=self.generator)

    with sk.patch(model, Rubbish([], 0.0), tree=16) as handle:
        assert torch.equal(greedy(model, inputs, 15), expected)
        assert handle.stats.tokens_per_step == 1.0
