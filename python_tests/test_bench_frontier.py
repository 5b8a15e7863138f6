"""The systems of bench_frontier.py: Medusa as published writes greedy tokens, replay accepts the drawn paths."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from selection import sample
from tiny_models import VOCAB, tiny_model

import specmemo_kernels as sk
from specmemo_kernels import ops
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, best_first_paths, expected_tokens_per_step, extrapolated
from specmemo_kernels.tree.draft_tree import DraftTree

TREE = DraftTree.from_paths(best_first_paths(DEFAULT_ACCURACY[:3], 11))


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by name; they aren't part of the package."""
    folder = str(Path(__file__).resolve().parents[1] / "bench")
    sys.path.insert(0, folder)
    try:
        names = ("medusa_published", "replay", "shapes", "part_tracker", "conversations")
        names += ("frontier_systems", "frontier_runs", "bench_frontier")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)


def noisy_heads(model: Any, own: bool, seed: int = 0) -> sk.MedusaHeads:
    """Heads that often guess the lm_head's token."""
    torch.manual_seed(seed)
    heads = sk.MedusaHeads(32, VOCAB, 3, own_lm_head=own)
    for head in range(3):
        if own:
            heads.lm_head_weight(head, torch.empty(0)).data = model.lm_head.weight.data.clone()
        for parameter in heads.linear(head, 0).parameters():
            parameter.data.normal_(std=0.05)
    return heads


def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("own", sample([True, False], [False]))
def test_medusa_as_published_writes_the_models_own_tokens(bench: dict[str, ModuleType], own: bool) -> None:
    model = tiny_model("llama", seed=3, max_position_embeddings=128)
    medusa = bench["medusa_published"].MedusaPublished(model, noisy_heads(model, own), TREE)
    steps = 0
    for seed in range(4):
        prompt = torch.randint(VOCAB, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert medusa.generate(prompt, 24) == greedy(model, prompt, 24)
        steps += medusa.steps
    assert steps < 4 * 23, "no draft was ever accepted, so moving keys and values wasn't tested"


def test_medusa_as_published_allocates_what_its_description_says(bench: dict[str, ModuleType]) -> None:
    model = tiny_model("llama", max_position_embeddings=512)
    model.set_attn_implementation("sdpa")
    medusa = bench["medusa_published"].MedusaPublished(model, noisy_heads(model, True), TREE)
    with MemoryTracker() as tracker:
        medusa.generate([1] * 300, 2)
    cache = 512 * 2 * 2 * 2 * 8 * 4  # context, layers, keys and values, heads, head_dim, bytes
    logits = 300 * VOCAB * (1 + 3) * 4
    assert medusa.cache.data.nbytes == cache
    assert cache + logits <= tracker.peak < 1.2 * (cache + logits)


def test_no_room_is_said_so(bench: dict[str, ModuleType]) -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    medusa = bench["medusa_published"].MedusaPublished(model, noisy_heads(model, True), TREE)
    with pytest.raises(ValueError, match="72 slots for prompt, new tokens and tree; the model's context has 64"):
        medusa.generate([1] * 50, 10)


@pytest.mark.parametrize("wanted", [1.3, 2.0, 2.57, 3.6])
def test_eased_accuracies_give_the_published_tokens_per_step(bench: dict[str, ModuleType], wanted: float) -> None:
    table = bench["replay"].eased(extrapolated(DEFAULT_ACCURACY, TREE.width), TREE, wanted)
    assert expected_tokens_per_step(TREE, table) == pytest.approx(wanted, rel=1e-6)


def test_without_a_run_draws_follow_the_accuracies(bench: dict[str, ModuleType]) -> None:
    published = bench["replay"].Published()
    assert published.tree.size == 64
    assert published.tree.max_depth == 4
    ranks = published.ranks(0, 0, 4000)
    right = sum(path[0] == 0 for path in ranks) / 4000
    chance = DEFAULT_ACCURACY[0][0]
    assert abs(right - chance) < 5 * (chance * (1 - chance) / 4000) ** 0.5


def test_draws_follow_the_published_run(bench: dict[str, ModuleType]) -> None:
    """Walking the drawn ranks gives the run's tokens per step, within five standard errors of the mean."""
    replay = bench["replay"]
    published = replay.Published(TREE, {(81, 0): 2.2})
    ranks = published.ranks(81, 0, 4000)
    taken = torch.tensor([float(len(replay.walk_ranks(TREE, path))) for path in ranks])
    assert abs(float(taken.mean()) - 2.2) < 5 * float(taken.std()) / 4000**0.5
    assert ranks == published.ranks(81, 0, 4000)
    small = TREE.pruned(4)
    assert all(len(replay.walk_ranks(small, path)) <= len(replay.walk_ranks(TREE, path)) for path in ranks)


@pytest.mark.parametrize("seed", range(20))
def test_verification_accepts_the_drawn_path(bench: dict[str, ModuleType], seed: int) -> None:
    """In any tree, also where the target's own tokens are drafts."""
    replay, source = bench["replay"], torch.Generator().manual_seed(seed)
    size, depth = seed % 13 + 1, 5
    parents = [-1] + [int(torch.randint(node, (), generator=source)) for node in range(1, size)]
    ranks = [parents[:node].count(parent) if node else 0 for node, parent in enumerate(parents)]
    tree = DraftTree(tuple(parents), tuple(ranks))
    drawn = torch.randint(3, (4, depth), generator=source)
    tokens = torch.randint(6, (4, size), generator=source)
    drafts = torch.stack([torch.randperm(40, generator=source)[:size] for _ in range(4)])
    rows = torch.tensor([parents] * 4, dtype=torch.int32)
    written, length = replay.replayed(tokens, drafts, rows, drawn, tree.max_depth)
    _, accepted, _ = ops.verify_tree_greedy(
        drafts.flatten(), written.flatten(), rows.flatten(), torch.arange(5, dtype=torch.int32) * size,
        max_depth=tree.max_depth, backend="reference",
    )  # fmt: skip
    paths = [replay.walk_ranks(tree, tuple(row)) for row in drawn.tolist()]
    assert length.tolist() == (accepted + 1).tolist() == [len(path) for path in paths]
    unused = torch.ones_like(tokens, dtype=torch.bool)
    for row, path in enumerate(paths):
        unused[row, path] = False
    assert torch.equal(written[unused], tokens[unused])


@pytest.mark.parametrize("seed", sample(range(3), [0]))
def test_replay_accepts_what_was_drawn_everywhere(bench: dict[str, ModuleType], seed: int) -> None:
    """Both systems take as many steps as walking the draws by hand, whatever the weights."""
    systems, replay = bench["frontier_systems"], bench["replay"]
    published = replay.Published(TREE, {(1, 0): 2.2})
    ranks = published.ranks(1, 0, 80)
    model = tiny_model("llama", seed=seed, max_position_embeddings=256)
    heads = noisy_heads(model, own=False, seed=seed)
    patched = bench["shapes"].twin(model)
    handle = sk.patch(patched, heads, tree=TREE, max_batch_size=1)
    target = replay.ReplayedTarget(handle.target)
    handle.target = target
    target.begin([ranks])
    ids = torch.tensor([[5, 6, 7]])
    patched.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)
    medusa = systems.MedusaSystem("Medusa", model, heads, TREE)
    medusa.answer(systems.Turn([5, 6, 7], 60, ranks))
    place, steps, expected = 1, 0, []
    while place < 60:
        length = len(replay.walk_ranks(TREE.truncated(60 - place - 1), ranks[place]))
        expected.append(length)
        place, steps = place + length, steps + 1
    assert handle.stats.steps == handle.stats.graph_steps == steps
    assert handle.stats.accepted_at_depth[0] == sum(length > 1 for length in expected)
    assert medusa.steps == steps


def test_chains_are_right_as_often_as_published(bench: dict[str, ModuleType]) -> None:
    """Shares of 20,000 draws within five standard errors; a chain follows the right drafts and stops behind them."""
    chain = bench["replay"].PublishedChain()
    draws = [ranks for text in range(20) for ranks in chain.ranks(text, 0, 1000)]
    tree = DraftTree.from_paths([(0,) * depth for depth in range(1, 8)])
    lengths = torch.tensor([len(bench["replay"].walk_ranks(tree, ranks)) - 1 for ranks in draws])
    for depth, share in enumerate(chain.right, start=1):
        error = (share * (1 - share) / len(draws)) ** 0.5
        assert float((lengths >= depth).float().mean()) == pytest.approx(share, abs=5 * error)


def test_replay_in_a_batch(bench: dict[str, ModuleType]) -> None:
    """Sequences with the same draws take the same steps."""
    replay = bench["replay"]
    ranks = replay.Published(TREE, {(1, 0): 2.2}).ranks(1, 0, 40)
    model = tiny_model("llama", max_position_embeddings=256)
    with sk.patch(model, noisy_heads(model, own=False), tree=TREE, max_batch_size=3) as handle:
        target = replay.ReplayedTarget(handle.target)
        handle.target = target
        target.begin([ranks] * 3)
        done = sk.generate_batch(model, [[5, 6, 7], [8, 9, 10], [11, 12, 13]], max_new_tokens=30, eos_token_ids=[])
    place = 1
    steps = 0
    while place < 30:
        place += len(replay.walk_ranks(TREE.truncated(30 - place - 1), ranks[place]))
        steps += 1
    assert [len(completion.tokens) for completion in done] == [30] * 3
    assert (handle.stats.steps, handle.stats.sequence_steps) == (steps, 3 * steps)


def test_a_twin_shares_its_weights_and_is_patched_alone(bench: dict[str, ModuleType]) -> None:
    model = tiny_model("llama")
    twin = bench["shapes"].twin(model)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with sk.patch(twin, noisy_heads(model, own=False), tree=4):
        assert not hasattr(model, "specmemo")
        assert model.lm_head._forward_pre_hooks == {}


def test_parts_add_up_to_what_the_tracker_counts(bench: dict[str, ModuleType]) -> None:
    tracker_module = bench["part_tracker"]
    with tracker_module.PartTracker(vocab_size=VOCAB) as tracker:
        pages = torch.zeros(10, 4)
        logits = torch.zeros(3, VOCAB)
        tracker.label(pages, "KV cache")
        peak = tracker.live
        del logits
    calls, series = tracker.over_time({"heads": 100})
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    assert len(calls) == len(totals)
    assert max(totals) == peak + 100 == 10 * 4 * 4 + 3 * VOCAB * 4 + 100
    assert series["KV cache"][-1] == pages.nbytes
    assert series["logits"][-1] == 0
    assert max(series["logits"]) == 3 * VOCAB * 4


@pytest.mark.slow
def test_a_conversation_held_again_computes_its_prompts_again(bench: dict[str, ModuleType]) -> None:
    """Otherwise a second round would omit the first turn's prompt, which other systems compute each time."""
    systems, runs = bench["frontier_systems"], bench["frontier_runs"]
    talk = bench["conversations"].Conversation(0, ((3,) * 40, (4,) * 10))
    model = tiny_model("llama", max_position_embeddings=256)
    heads = noisy_heads(model, own=False)
    ours = systems.OurSystem("this", bench["shapes"].twin(model), heads, None, replayed=False)
    computed = []
    for _ in range(2):
        ours.reset()
        runs.hold(ours, talk, 20, None, lambda _: None)
        computed.append((ours.handle.stats.prefill_tokens, ours.handle.stats.reused_tokens))
    assert computed[0] == computed[1]
    assert computed[0][1] > 0, "the second turn goes on from the first"
    ours.close()


@pytest.mark.slow
def test_a_systems_memory_is_named_by_part(bench: dict[str, ModuleType]) -> None:
    systems, talk = bench["frontier_systems"], bench["conversations"].Conversation(0, ((3,) * 40, (4,) * 10))
    model = tiny_model("llama", max_position_embeddings=256)
    heads = noisy_heads(model, own=False)
    ours = systems.OurSystem("this", bench["shapes"].twin(model), heads, None, replayed=False, tree=TREE)
    found = [
        bench["frontier_runs"].weigh(system, talk, 20, None, VOCAB)
        for system in (systems.PlainSystem(model), systems.MedusaSystem("Medusa", model, heads, TREE), ours)
    ]
    token = 2 * 2 * 2 * 8 * 4
    for memory in found:
        assert memory.peak == sum(memory.parts.values())
        assert [what for _, what in memory.marks] == ["turn 1", "turn 2"]
    plain, medusa, this = (memory.series for memory in found)
    assert plain["KV cache"][-1] in (0, 89 * token)
    assert max(plain["KV cache"]) >= 89 * token
    assert medusa["KV cache"][-1] == 256 * token
    assert this["KV cache"][-1] == ours.handle.bytes_by_part["kv_pages"]
    assert this["candidates' KV"][-1] == ours.handle.plan.tree.size * token
    assert max(this["logits"]) == 0


@pytest.mark.slow
def test_the_whole_benchmark_on_a_tiny_shape(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have the requested settings, parts add up, tables and pictures are written."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    sizes |= {"vocab_size": 300, "max_position_embeddings": 1024}
    monkeypatch.setitem(bench["shapes"].SHAPES, "tiny", sizes)
    bench["bench_frontier"].main(
        model="tiny", device="cpu", dtype="fp32", questions=None, published=None, budgets="0.5,0.001", limit=1,
        new_tokens=6, rounds=1, seconds=0, json_=tmp_path / "out.json", pictures=tmp_path,
    )  # fmt: skip
    data = json.loads((tmp_path / "out.json").read_text())
    names = [row["system"] for row in data["rows"]]
    assert names[:4] == ["plain generate", "Medusa as published", "Medusa, our tree", "this, no budget"]
    assert [row["heads"] for row in data["rows"] if row["system"] == "this, no budget"] == [
        "5, own lm_head",
        "5, shared lm_head",
    ]
    for row in data["rows"]:
        assert row["acceptance"] == "replayed"
        assert row["tokens_per_s"] > 0
        assert 1 <= row["tokens_per_step"] <= 5
        assert row["peak_generation_bytes"] == sum(row["bytes_by_part"].values())
        assert row["budget"] is None or row["peak_generation_bytes"] <= row["budget"]
    assert len(data["steps"]) == 4
    text = (tmp_path / "frontier.md").read_text()
    assert all(name in text for name in names)
    for picture in ("frontier.png", "memory.png", "step.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
