"""The memory bound of a patched model holds, and calls that can't fit are refused with the numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from selection import sample
from test_families import answers, batch, greedy
from tiny_models import FAMILIES, VOCAB, OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.planning.memory_plan import parse_bytes
from specmemo_kernels.planning.memory_tracker import MemoryTracker


def wide_model(family: str, seed: int, **changes: object) -> PreTrainedModel:
    """A model whose activations are far larger than the bookkeeping: width 128, three layers, heads of 32."""
    sizes: dict[str, object] = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "num_hidden_layers": 3}
    if "layer_types" in FAMILIES[family]:
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if "no_rope_layers" in FAMILIES[family]:
        sizes["no_rope_layers"] = [1, 0, 1]
    if family == "deepseek_v3":
        sizes |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 32)
        sizes |= {"q_lora_rank": 64, "moe_intermediate_size": 64}
    return tiny_model(family, seed, **(sizes | changes))


def peak_of(handle: sk.SpecMemo, inputs: dict[str, torch.Tensor], new: int, **kwargs: object) -> int:
    """Peak bytes of live tensors of a second call (the first leaves what is kept between calls) with its own pool."""
    greedy(handle.model, inputs, 4, **kwargs)
    handle.release()
    with MemoryTracker() as tracker:
        greedy(handle.model, inputs, new, **kwargs)
    return tracker.peak


def with_workspace(model: PreTrainedModel, budget: int) -> int:
    """``budget`` plus the backend's own workspace, which is large relative to such small models.

    Of a chunk whose linear layers are operators: MKL's buffers take 4 MiB on some machines.
    """
    with sk.patch(model, OracleDrafter([], 0.0), tree=8, prefill_chunk=32) as handle:
        return budget + handle.plan.parts["workspace"]


# The heads own an lm_head: 285 KiB. What else the least plan has depends on the family, 200 KiB to 900 KiB.
LARGE = [(family, 4 * 2**20) for family in [*FAMILIES][::3]]
CASES = [("llama", 700_000), ("gemma2", 700_000), *((family, 1_600_000) for family in FAMILIES), *LARGE]


@pytest.mark.parametrize(("family", "budget"), sample(CASES, [("llama", 700_000)]))
def test_peak_stays_within_the_budget(family: str, budget: int) -> None:
    """Peak bytes of live tensors plus the heads, measured independently, for prompts far longer than a chunk.

    The plan isn't wasteful either: what it sets aside besides heads and pages is nearly used.
    """
    model = wide_model(family, seed=20)
    heads = sk.MedusaHeads(128, VOCAB, 3)
    budget = with_workspace(model, budget)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=2) as handle:
        plan = handle.plan
        assert plan.budget is not None
        assert plan.max_tokens is not None
        assert sum(plan.parts.values()) <= plan.budget
        longest = min(plan.max_tokens, 400) - 40
        assert longest >= plan.prefill_chunk, "the prompts would not fill a chunk"
        peak = peak_of(handle, batch((longest, longest // 2, 7)), 30)
        assert peak + handle.drafter.nbytes <= sum(plan.parts.values())
        held = handle.stats.bytes_by_part
        assert held["kv_pages"] <= plan.parts["kv_pages"]
        assert held["tree_scratch"] <= plan.parts["tree_scratch"]
        used = peak - held["kv_pages"] - held["tree_scratch"]
        assert used <= plan.parts["activations"] + plan.parts["metadata"] <= 1.25 * used


@pytest.mark.slow
def test_a_longer_call_after_a_shorter_one_stays_within_the_budget() -> None:
    """The earlier call's pages are freed before new ones are allocated."""
    model = wide_model("llama", seed=20)
    heads, budget = sk.MedusaHeads(128, VOCAB, 3), with_workspace(model, 3 * 2**19)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=1, prefill_chunk=16) as handle:
        assert handle.plan.max_tokens is not None
        most, pages = min(handle.plan.max_tokens, 1000) - 10, []
        with MemoryTracker() as tracker:
            for length in (most * 2 // 3, most):
                greedy(model, batch((length - 4,)), 4)
                pages.append(handle.bytes_by_part["kv_pages"])
        allowed = sum(handle.plan.parts.values())
        assert sum(pages) + handle.drafter.nbytes > allowed, "both would fit"
        assert tracker.peak + handle.drafter.nbytes <= allowed


@pytest.mark.parametrize("family", sample(FAMILIES, ["llama"]))
def test_the_least_budget_is_enough(family: str) -> None:
    """The budget that a refusal names is accepted, and kept by sequences that fill its pages."""
    model = wide_model(family, seed=30)
    heads = sk.MedusaHeads(128, VOCAB, 3, own_lm_head=False)
    with pytest.raises(sk.BudgetError) as refusal:
        sk.patch(model, heads, memory_budget=1000, tree=8)
    least = re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))
    assert least is not None
    with sk.patch(model, heads, memory_budget=least[1], tree=8) as handle:
        plan = handle.plan
        assert plan.max_sequences == 1
        assert plan.max_tokens is not None
        assert plan.max_tokens <= 96  # what is named is rounded up, to 0.1 MiB at most
        new = 4
        inputs = batch((plan.max_tokens - plan.tree.max_depth - new, 3, 5))
        assert peak_of(handle, inputs, new) + handle.drafter.nbytes <= sum(plan.parts.values())


def least_budget(model: Any, drafter: Any, **options: Any) -> int:
    """The least bytes that ``patch`` accepts, of which its refusal names a rounded figure."""
    refused, enough = 1000, 2**25
    while refused + 64 < enough:
        middle = (refused + enough) // 2
        try:
            sk.patch(model, drafter, memory_budget=middle, **options)
        except sk.BudgetError:
            refused = middle
        else:
            sk.unpatch(model)
            enough = middle
    return enough


def test_a_chain_gives_way() -> None:
    """A budget that a chain of few nodes needs is enough without a given tree too."""
    model, options = wide_model("llama", seed=30), {"context": 128, "max_batch_size": 1, "prefill_chunk": 32}
    for drafter in ("prompt-lookup", sk.DraftModel(tiny_model("llama", 3), tokens=8)):
        least = least_budget(model, drafter, tree=3, **options)
        with sk.patch(model, drafter, memory_budget=least, **options) as handle:
            assert handle.max_length >= 128
            assert handle.plan.tree in (sk.DraftTree.chain(1), sk.DraftTree.chain(2))
            assert "fewer than would be fastest" in handle.plan.reasons[0]
        with sk.patch(model, drafter, memory_budget=2**25, **options) as handle:
            assert handle.plan.tree == sk.DraftTree.chain(handle.drafter.max_depth)


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 256}, {"num_attention_heads": 16}, {"intermediate_size": 2000}]
)
def test_activations_are_predicted_not_guessed(changes: dict[str, object]) -> None:
    """The plan's bytes for a forward pass are the measured ones, whichever part of a layer is widest."""
    model = wide_model("llama", seed=21, **changes)
    with sk.patch(model, OracleDrafter([], 0.0), tree=8, max_batch_size=1, prefill_chunk=256) as handle:
        peak = peak_of(handle, batch((256,)), 2) - sum(handle.bytes_by_part.values())
        assert peak <= handle.plan.parts["activations"] + handle.plan.parts["metadata"] <= 1.05 * peak


def test_bookkeeping_is_counted() -> None:
    """With many pages and small layers, padded ids and block tables dominate."""
    model = tiny_model("llama", seed=34)
    options = {"tree": 4, "page_size": 1, "max_batch_size": 8, "prefill_chunk": 32, "memory_budget": 600_000}
    with sk.patch(model, OracleDrafter([], 0.0), **options) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        short, behind = 5, 8 + plan.tree.max_depth
        longest = min(plan.max_tokens - 7 * (short + behind), 1000) - behind
        used = peak_of(handle, batch((longest, *[short] * 7)), 8) - sum(handle.bytes_by_part.values())
        assert handle.stats.bytes_by_part["kv_pages"] > 0.95 * plan.parts["kv_pages"]
        assert plan.parts["activations"] < used / 2, "activations hide the bookkeeping"
        assert used <= plan.parts["activations"] + plan.parts["metadata"] <= 3 * used


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_that_get_all_tokens(experts: str) -> None:
    """A prompt of one repeated token sends every row to the same experts, the worst case of a loop over experts."""
    model = wide_model("mixtral", seed=31)
    model.set_experts_implementation(experts)
    with sk.patch(model, OracleDrafter([], 0.0), tree=8, max_batch_size=1, prefill_chunk=64) as handle:
        ones = torch.ones(1, 200, dtype=torch.int64)
        for inputs in (batch((200,)), {"input_ids": ones, "attention_mask": ones}):
            used = peak_of(handle, inputs, 20) - sum(handle.bytes_by_part.values())
            assert used <= handle.plan.parts["activations"] + handle.plan.parts["metadata"]


def test_processors_get_one_row_at_a_time() -> None:
    """Logits processors don't cost a ``[nodes, vocabulary]`` tensor."""
    vocab, nodes = 5000, 32
    model = wide_model("llama", seed=32, vocab_size=vocab)
    drafter = OracleDrafter([], 0.0, vocab=vocab)
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(nodes - 1), max_batch_size=1, prefill_chunk=16) as handle:
        more = peak_of(handle, batch((20,)), 8, repetition_penalty=1.2) - peak_of(handle, batch((20,)), 8)
        assert handle.stats.drafted > 0
        assert more < nodes * vocab * 4 // 4


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"sampling": sk.Sampling(top_k=50, top_p=0.9, min_p=0.1)}, marks=pytest.mark.slow),
        {"sampling": sk.Sampling(repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0})},
        pytest.param({"sampling": sk.Sampling(typical=sk.TypicalAcceptance())}, marks=pytest.mark.slow),
        pytest.param({"logprobs": 5, "prompt_logprobs": True}, marks=pytest.mark.slow),
    ],
    ids=["best tokens", "penalties", "typical", "scores"],
)
def test_drawing_from_a_large_vocabulary_stays_within_the_budget(wanted: dict[str, Any]) -> None:
    model = tiny_model("llama", seed=34, vocab_size=30_000)
    options: dict[str, Any] = {"tree": 4, "max_batch_size": 2, "prefill_chunk": 16}
    with pytest.raises(sk.BudgetError) as refusal:
        sk.patch(model, "prompt-lookup", memory_budget=1000, **options)
    least = re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))
    assert least is not None
    with sk.patch(model, "prompt-lookup", memory_budget=parse_bytes(least[1]) + 2**18, **options) as handle:
        requests = [sk.Request([5, 6, 7, 8] * 6, 6, [], **wanted) for _ in range(3)]
        sk.generate_batch(model, requests)
        handle.release()
        with MemoryTracker() as tracker:
            sk.generate_batch(model, requests)
        assert tracker.peak <= handle.plan.total_bytes - handle.plan.parts["workspace"]


def test_more_rows_than_places() -> None:
    """Rows wait for a free slot; the batch size and pages limit how many run, but never change tokens."""
    model = tiny_model("llama", seed=22)
    lengths, new, page = (30, 5, 18, 44, 9), 20, 16
    inputs = batch(lengths)
    expected = greedy(model, inputs, new)
    drafter = OracleDrafter(answers(inputs, expected), 0.7)
    for places, budget in ((2, None), (5, with_workspace(model, 120_000)), (8, with_workspace(model, 90_000))):
        with sk.patch(model, drafter, tree=6, max_batch_size=places, memory_budget=budget, page_size=page) as handle:
            needed = sum(-(-(length + new + handle.plan.tree.max_depth) // page) for length in lengths)
            assert budget is None or handle.plan.max_pages < needed, "all rows would fit: nothing has to wait"
            assert torch.equal(greedy(model, inputs, new), expected)
            pool = handle.pool
            assert pool is not None
            assert pool.num_pages < needed
            assert pool.free_pages == pool.num_pages
            pool.check_integrity()


def test_rows_that_end_at_their_first_token() -> None:
    """They take part in no step; their slots are given to the next rows."""
    model = tiny_model("llama", seed=33)
    inputs = batch((6, 9, 7, 8, 5))
    first = greedy(model, inputs, 1)
    expected = greedy(model, inputs, 12, eos_token_id=first[:3, -1].tolist(), pad_token_id=0)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4, max_batch_size=2):
        assert torch.equal(greedy(model, inputs, 1), first)
        assert torch.equal(greedy(model, inputs, 12, eos_token_id=first[:3, -1].tolist(), pad_token_id=0), expected)


def test_pool_serves_again_and_grows() -> None:
    model = tiny_model("llama", seed=23)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4) as handle:
        greedy(model, batch((20,)), 10)
        first = handle.pool
        greedy(model, batch((10,)), 10)
        assert handle.pool is first, "a shorter call reuses the pages"
        greedy(model, batch((200,)), 10)
        assert handle.pool is not first
        assert handle.pool.num_pages >= 14


def test_budget_too_small_for_a_page() -> None:
    model = tiny_model("llama", seed=24)
    with pytest.raises(sk.BudgetError, match=r"2\.0 KiB is too small for one page of 16 tokens.*give at least"):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), memory_budget=2048)
    assert "specmemo" not in vars(model)
    with pytest.raises(ValueError, match="memory_budget is 'lots'"):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), memory_budget="lots")


def test_prompt_longer_than_the_plan() -> None:
    """The error names the requested and the available tokens; the model stays usable."""
    model = tiny_model("llama", seed=25)
    with sk.patch(model, OracleDrafter([], 0.0), tree=4, memory_budget=with_workspace(model, 60_000)) as handle:
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
        assert type(model) is before
        assert not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": 0}, "tree is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"tree": [[0], [1, 0]]}, r"\[1, 0\] must come after its parent"),
        ({"max_batch_size": -1}, "max_batch_size is -1"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    model = tiny_model("llama", seed=27)
    with pytest.raises((ValueError, RuntimeError), match=message):
        sk.patch(model, sk.MedusaHeads(32, VOCAB, 2), **options)
    assert "specmemo" not in vars(model)
    assert not model.lm_head._forward_pre_hooks


def test_drafter_of_the_wrong_shape() -> None:
    model = tiny_model("llama", seed=28)

    class Wrong(OracleDrafter):
        def propose(self, inputs):  # type: ignore[no-untyped-def]
            return torch.zeros(1, 2)

    with (
        sk.patch(model, Wrong([], 0.0), tree=5),
        pytest.raises(ValueError, match=r"propose returned \(1, 2\).*\(1, 5\)"),
    ):
        greedy(model, batch((8,)), 10)


def test_rubbish_costs_speed_alone() -> None:
    """Tokens outside the vocabulary, negative tokens and repeated siblings don't change the output."""
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
