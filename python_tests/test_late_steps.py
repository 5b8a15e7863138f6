"""Overlapped steps write the model's own tokens in all situations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hidden_oracle import HiddenOracle
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from test_families import _bushy_paths, answers, batch, greedy
from test_patch import Collecting, Until
from test_patch_memory import peak_of, wide_model, with_workspace
from tiny_models import VOCAB, random_heads, tiny_model
from transformers import PreTrainedModel, StoppingCriteriaList

import specmemo_kernels as sk
from specmemo_kernels.engine.step_graph import StepCache
from specmemo_kernels.integrations.hf import patch, plan
from specmemo_kernels.integrations.hf.pool import GraphUse

TREE = sk.DraftTree.from_paths(_bushy_paths(14))
pytestmark = pytest.mark.usefixtures("gpu_overlap", "device_state")
PAUSES = {"a prompt is in prefill", "too few pages are free"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=11)


def oracle(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new: int = 40, share: float = 0.7) -> HiddenOracle:
    return HiddenOracle(model, answers(inputs, greedy(model, inputs, new)), share)


def whole(handle: sk.SpecMemo) -> None:
    """All pages are free."""
    pool = handle.pool
    assert pool is not None
    pool.check_integrity()
    assert pool.free_pages == pool.num_pages


@pytest.mark.parametrize(
    "family",
    sample(("llama", "gemma2", "qwen3", "cohere", "mixtral", "gpt_oss", "deepseek_v3"), ("llama", "gpt_oss")),
)
def test_families(family: str) -> None:
    """Token for token, across windows, with a row that ends early, and mostly right guesses."""
    model = tiny_model(family)
    inputs = batch((12,) if family in ("qwen3", "mixtral") else (40, 1, 17))
    expected = greedy(model, inputs, 30)
    eos = int(expected[0, -12])
    ended = greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0)
    drafter = HiddenOracle(model, answers(inputs, expected), 0.8)
    with sk.patch(model, drafter, tree=TREE, page_size=4, graph=True) as handle:
        assert torch.equal(greedy(model, inputs, 30), expected)
        assert handle.stats.tokens_per_step > 1.5
        assert torch.equal(greedy(model, inputs, 30, eos_token_id=eos, pad_token_id=0), ended)
        stats = handle.stats
        assert stats.graph_steps >= stats.steps - sum(stats.eager_reasons.values())
        assert set(stats.eager_reasons) <= PAUSES
        whole(handle)


@pytest.mark.parametrize(
    ("new", "page_size"), sample([(1, 16), (2, 1), (3, 16), (5, 1), (6, 4), (7, 1), (18, 1)], [(1, 16), (5, 1), (6, 4)])
)
def test_ends(model: PreTrainedModel, new: int, page_size: int) -> None:
    """For any number of new tokens, and of surplus tokens in the last step."""
    inputs = batch((9, 4), seed=1)
    with sk.patch(model, oracle(model, inputs, share=1.0), tree=TREE, page_size=page_size, graph=True) as handle:
        with sk.stream_batch(model, answers(inputs, inputs["input_ids"]), max_new_tokens=new, eos_token_ids=[]) as run:
            pieces = list(run)
        late = [piece.tokens for piece in pieces if piece.index == 1]
        whole(handle)
        assert handle.stats.graph_steps >= handle.stats.steps
    expected = greedy(model, {name: x[1:, -4:] for name, x in inputs.items()}, new)
    assert [token for tokens in late for token in tokens] == expected[0, 4:].tolist()


@pytest.mark.parametrize("lengths", [(7,), (7, 12, 3)])
def test_streamers_and_criteria(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """They get the tokens in the order of the model's own loop; criteria see each token once."""
    inputs = batch(lengths)
    drafter, options = oracle(model, inputs), {"eos_token_id": 1, "pad_token_id": 0}
    seen: list[tuple[list[list[int]], int]] = []
    outputs = []
    for graph in (None, True):
        streamer, criterion = Collecting(), Until(7)
        if graph is None:
            outputs.append(greedy(model, inputs, 30, streamer=streamer, **options))
            outputs.append(greedy(model, inputs, 30, stopping_criteria=StoppingCriteriaList([criterion]), **options))
        else:
            with sk.patch(model, drafter, tree=TREE, graph=True) as handle:
                outputs.append(greedy(model, inputs, 30, streamer=streamer, **options))
                outputs.append(
                    greedy(model, inputs, 30, stopping_criteria=StoppingCriteriaList([criterion]), **options)
                )
                whole(handle)
        assert streamer.ended == 1
        seen.append((streamer.pieces, criterion.shown if len(lengths) == 1 else 0))
    assert seen[0] == seen[1]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_tokens_come_one_step_late(model: PreTrainedModel) -> None:
    """The first step yields nothing, each later step the tokens of the one before; none is lost at the end."""
    inputs = batch((9,))
    with sk.patch(model, random_heads(model), tree=1, graph=True) as handle:
        run = sk.stream_batch(model, answers(inputs, inputs["input_ids"]), max_new_tokens=6, eos_token_ids=[])
        sizes, steps = [], []
        for piece in run:
            sizes.append(len(piece.tokens))
            steps.append(handle.stats.graph_steps)
    assert sizes == [1] * 6
    assert steps == [0, 2, 3, 4, 5, 5]


def test_aborts(model: PreTrainedModel) -> None:
    """Aborted sequences keep the tokens that were read; other sequences continue."""
    prompts = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [2, 0, 2], [11, 12]]
    expected = [
        greedy(model, {"input_ids": torch.tensor([p]), "attention_mask": torch.ones(1, len(p))}, 40) for p in prompts
    ]
    rows = [row[0].tolist() for row in expected]
    with sk.patch(model, HiddenOracle(model, rows, 0.8), tree=TREE, max_batch_size=3, graph=True) as handle:
        run = sk.stream_batch(model, prompts, max_new_tokens=40, eos_token_ids=[])
        for piece in run:
            if piece.index == 1 and not piece.finished and len(piece.tokens) > 1:
                run.abort(1)
                run.abort(4)
        done = run.completions()
        whole(handle)
        assert handle.stats.graph_steps > 0
    for i, (completion, prompt, row) in enumerate(zip(done, prompts, rows, strict=True)):
        assert (completion.finish_reason == "aborted") == (i in (1, 4))
        assert completion.tokens == row[len(prompt) :][: len(completion.tokens)]
        assert len(completion.tokens) == 40 or i in (1, 4)


@pytest.mark.parametrize("place", sample([1, 2, 5], [2]))
def test_a_stop_that_fails(model: PreTrainedModel, place: int) -> None:
    """An error of user code is raised to the caller; pages are freed, and the next call is right."""
    inputs = batch((9,))
    expected = greedy(model, inputs, 20)

    def stop(tokens: list[int]) -> bool:
        if len(tokens) >= 9 + place:
            raise ZeroDivisionError
        return False

    with sk.patch(model, oracle(model, inputs), tree=TREE, graph=True) as handle:
        with pytest.raises(ZeroDivisionError):
            sk.generate_batch(model, [sk.Request(inputs["input_ids"][0].tolist(), 20, [], stop=stop)])
        whole(handle)
        assert torch.equal(greedy(model, inputs, 20), expected)


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 0.8}, {"repetition_penalty": 1.5}], ids=str)
def test_what_the_host_decides_is_decided_there(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Sampling and processors run on the host, behind passes over static tensors, with the same tokens."""
    inputs, outputs = batch((9,)), []
    with sk.patch(model, random_heads(model), tree=6, graph=True) as handle:
        for patched in (True, False):
            if not patched:
                sk.unpatch(model)
            torch.manual_seed(3)
            outputs.append(model.generate(**inputs, max_new_tokens=15, **{"do_sample": False, **options}))
        stats = handle.stats
        assert stats.graph_steps + sum(stats.eager_reasons.values()) == stats.steps
        assert stats.graph_steps >= stats.steps - 6, "trees of the last steps are truncated"
    assert torch.equal(*outputs)


def test_a_batch_of_both(model: PreTrainedModel) -> None:
    """While a sampled sequence runs, the host verifies; afterwards steps are overlapped."""
    requests = [sk.Request([5, 6, 7], 8, [], sk.Sampling(seed=1)), sk.Request([8, 9], 30, [])]
    with sk.patch(model, random_heads(model), tree=6) as handle:
        wanted = [completion.tokens for completion in sk.generate_batch(model, requests)]
    with sk.patch(model, random_heads(model), tree=6, graph=True) as handle:
        assert [completion.tokens for completion in sk.generate_batch(model, requests)] == wanted
        assert handle.stats.graph_steps > 15


def test_scarce_memory(model: PreTrainedModel) -> None:
    """Below ``keep_free`` cached steps are freed and steps run eagerly; above it they overlap again."""
    inputs = batch((9, 30))
    expected = greedy(model, inputs, 60)
    with sk.patch(model, oracle(model, inputs, 60, 0.2), tree=TREE, keep_free=1000, graph=True) as handle:
        memory_pressure, script = handle.memory_pressure, [5000] * 8 + [0] * 2 + [5000] * 1000
        memory_pressure.poll_every = 1

        class Scripted:
            def free(self) -> int:
                return script.pop(0)

            def release_cached(self) -> None:
                """Nothing to free."""

        memory_pressure.monitor = Scripted()  # type: ignore[assignment]
        assert torch.equal(greedy(model, inputs, 60), expected)
        stats = handle.stats
        assert stats.shrinks == 1
        assert stats.grows == 1
        assert stats.eager_reasons["memory is low"] >= 4
        assert stats.graph_steps > stats.eager_reasons["memory is low"]
        whole(handle)


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    room=st.integers(0, 120),
    page_size=st.sampled_from([1, 4, 16]),
    places=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.6, 1.0]),
)
@settings(max_examples=examples(8), deadline=None)
def test_few_pages(seed: int, room: int, page_size: int, places: int, share: float) -> None:
    """Requests of all lengths in pools slightly larger than the longest: queued, preempted, right."""
    model = tiny_model("llama", seed=11)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (5,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    news = torch.randint(1, 25, (5,), generator=generator).tolist()
    rows = [
        greedy(model, {"input_ids": torch.tensor([p]), "attention_mask": torch.ones(1, len(p))}, 25)[0].tolist()
        for p in prompts
    ]
    options: dict[str, Any] = {"tree": TREE, "page_size": page_size, "max_batch_size": places, "prefill_chunk": 32}
    drafter = HiddenOracle(model, rows, share)
    with sk.patch(model, drafter, graph=True, **options) as handle:
        fixed = sum(size for part, size in handle.plan.parts.items() if part != "kv_pages")
        slot = sum(layer.bytes_per_token for layer in handle.facts.layers) + 40 * handle.plan.max_sequences
    budget = fixed + slot * (30 + 25 + room + 3 * page_size) + fixed // 3
    with sk.patch(model, drafter, memory_budget=budget, graph=True, **options) as handle:
        done = sk.generate_batch(model, [sk.Request(p, n, []) for p, n in zip(prompts, news, strict=True)])
        whole(handle)
    for prompt, row, new, completion in zip(prompts, rows, news, done, strict=True):
        assert completion.tokens == row[len(prompt) : len(prompt) + new]


@pytest.mark.slow
def test_parts_of_a_tree_come_in_few_sizes(model: PreTrainedModel) -> None:
    """Without a given tree, each step takes a part with a cached step; the number of sizes is limited."""
    inputs = batch((9, 5))
    expected = greedy(model, inputs, 120)
    drafter = HiddenOracle(model, answers(inputs, expected), 0.5, width=10)
    with sk.patch(model, drafter, graph=True) as handle, seeing_launches() as launches:
        assert torch.equal(greedy(model, inputs, 120), expected)
        sizes = {shape.nodes for shape, _ in launches}
        most = handle.plan.tree.size
        assert len(launches) == handle.stats.graph_steps > 10
    assert sizes <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, most}


@contextmanager
def seeing_launches() -> Iterator[list[tuple[Any, Any]]]:
    """Records launched steps in this context."""
    seen: list[tuple[Any, Any]] = []
    launch: Callable[..., Any] = StepCache.launch

    def noting(self: StepCache, shape: Any, tree: Any, drafts: Any) -> Any:
        result = launch(self, shape, tree, drafts)
        seen.append((shape, tree))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCache, "launch", noting)
        yield seen


def test_a_changed_model_gets_steps_of_its_own(model: PreTrainedModel) -> None:
    """Steps captured with other weights aren't used again."""
    other = tiny_model("llama", seed=12)
    inputs = batch((9,))
    with sk.patch(other, random_heads(other), tree=6, graph=True) as handle:
        before = greedy(other, inputs, 15)
        kept = handle._pools.steps
        assert kept is not None
        greedy(other, inputs, 15)
        assert handle._pools.steps is kept
        other.lm_head.weight.data = model.lm_head.weight.data.clone()
        after = greedy(other, inputs, 15)
        assert handle._pools.steps is not kept
    assert not torch.equal(before, after)
    assert torch.equal(greedy(other, inputs, 15), after)


@pytest.mark.slow
def test_peak_within_the_plan() -> None:
    """Peak bytes of live tensors plus the heads, measured independently, for prompts longer than a chunk."""
    model = wide_model("llama", seed=20)
    heads, budget = sk.MedusaHeads(128, VOCAB, 3), with_workspace(model, 1_600_000)
    with sk.patch(model, heads, memory_budget=budget, tree=8, max_batch_size=2, graph=True) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        longest = min(plan.max_tokens, 400) - 40
        peak = peak_of(handle, batch((longest, longest // 2, 7)), 30)
        assert peak + handle.drafter.nbytes <= sum(plan.parts.values()) <= budget
        assert 0 < handle.bytes_by_part["graphs"] <= plan.parts["graphs"]
        assert handle.stats.graph_steps > 10


def test_graphs_take_a_small_part_of_a_budget(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU: without a budget, or with a large one, there are graphs; else a reason."""
    wanted = GraphUse(wanted=True)
    monkeypatch.setattr(patch, "graph_use", lambda *_: wanted)
    monkeypatch.setattr(plan, "GRAPH_SHARE", 0.001)
    for budget, reason in (
        (None, ""),
        ("900MiB", ""),
        ("2MiB", "more than 0% of the budget of 2.0 MiB would go to graphs"),
    ):
        with sk.patch(model, random_heads(model), tree=6, memory_budget=budget) as handle:
            assert handle.graphs.reason.startswith(reason)
            assert handle.graphs.wanted == (not reason) == ("graphs" in handle.plan.parts)
            assert torch.equal(greedy(model, batch((9,)), 20), greedy(model, batch((9,)), 20))


@pytest.mark.parametrize(("operators", "kept"), [(100, 8), (1000, 4), (1500, 2), (5000, 0)])
def test_a_budget_keeps_few_recordings(
    operators: int, kept: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recordings take at most a tenth of a budget; none are made if a quarter of them takes more."""
    monkeypatch.setattr(plan, "count_results", lambda *_: operators)
    ids = batch((9, 12, 5, 3, 8, 4))
    expected = greedy(model, ids, 30, eos_token_id=[3, 4, 5, 6], pad_token_id=0)
    with sk.patch(model, random_heads(model), tree=6, memory_budget="40MiB") as handle:
        assert torch.equal(greedy(model, ids, 30, eos_token_id=[3, 4, 5, 6], pad_token_id=0), expected)
        steps = handle._pools.steps
        assert handle.plan.kept_steps == kept
        assert handle.graphs.wanted == (steps is not None) == (kept > 0)
        assert handle.plan.parts.get("graphs", 0) <= 4 << 20
        assert steps is None or 0 < len(steps._steps) <= kept


def test_what_patch_says(model: PreTrainedModel) -> None:
    """On by default; impossible with ``graph=True``: an error; otherwise a reason."""
    with sk.patch(model, random_heads(model)) as handle:
        assert (handle.graphs.wanted, handle.graphs.reason, handle.graphs.must) == (True, "", False)
        assert "graphs" in handle.plan.parts
        greedy(model, batch((5,)), 5)
        assert handle.stats.graph_steps > 0
    with sk.patch(model, random_heads(model), graph=False) as handle:
        assert handle.graphs.reason == "graph=False was given"
        assert "graphs" not in handle.plan.parts
        greedy(model, batch((5,)), 5)
        assert handle.stats.graph_steps == 0
    with sk.patch(model, random_heads(model), graph=True) as handle:
        assert handle.graphs.reason == ""
    with sk.patch(model, "prompt-lookup", graph=True) as handle:
        assert (handle.graphs.reason, handle.graphs.in_flight) == ("", 1), "each step's drafts follow from the last"
    moving = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="graph=True, but its rotary embedding reads the positions"):
        sk.patch(moving, random_heads(moving), graph=True)
    assert "specmemo" not in vars(model)
