"""Models with recurrent and convolution layers: the model's own tokens, one state per sequence, whatever happens."""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_oracles import write_eagle3
from failing_allocations import failing_everywhere
from family_models import family_model
from hybrid_models import HYBRIDS, VOCAB, hybrid_model
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import covering, examples, sample
from test_cli_plan import plan_json
from test_families import batch
from test_feature_drafter_engine import few_pages
from test_patch_memory import peak_of
from tiny_models import OracleDrafter, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk
from specmemo_kernels.cache.state_pool import MixerSpec, StatePool
from specmemo_kernels.engine.tree_pass import _part
from specmemo_kernels.forward.tree_paths import paths_to_leaves, tree_paths
from specmemo_kernels.integrations.hf import find_mixers
from specmemo_kernels.integrations.hf.hybrid_sizes import recurrent_spec
from specmemo_kernels.integrations.hf.measure import measure_passes
from specmemo_kernels.integrations.hf.mixer_pass import MixerPass
from specmemo_kernels.integrations.hf.mixers import Mixer
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.memory_plan import parse_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import plan_memory

Tensor = torch.Tensor
NEW = 16
TREES: dict[int, Any] = {
    1: 1,
    8: [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]],
    24: sk.DraftTree.from_paths(
        [[i] for i in range(4)]
        + [[i, j] for i in range(3) for j in range(3)]
        + [[0, 0, i] for i in range(4)]
        + [[0, 0, 0, i] for i in range(3)]
        + [[0, 0, 0, 0, i] for i in range(3)]
    ),
}
EVERYDAY = ("qwen3_next",)
each_family = pytest.mark.parametrize("family", sample(HYBRIDS, EVERYDAY))


@cache
def texts(family: str) -> tuple[PreTrainedModel, list[list[int]], list[list[int]]]:
    """A model, ragged prompts, and what ``generate`` writes behind each of them alone."""
    model, rng = hybrid_model(family), random.Random(7)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (17, 5, 1, 29, 8, 3, 40, 11)]
    rows = (model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0].tolist() for p in prompts)
    return model, prompts, [row[len(prompt) :] for prompt, row in zip(prompts, rows, strict=True)]


def oracle(family: str, share: float) -> OracleDrafter:
    _, prompts, expected = texts(family)
    answers = [prompt + row for prompt, row in zip(prompts, expected, strict=True)]
    return OracleDrafter(answers, share, max_depth=5, vocab=VOCAB)


def written(model: PreTrainedModel, prompts: list[list[int]], **kwargs: Any) -> list[list[int]]:
    done = sk.generate_batch(model, prompts, **({"max_new_tokens": NEW, "eos_token_ids": []} | kwargs))
    return [completion.tokens for completion in done]


FIRST_TOKENS = [(family, size, 0.6) for family in EVERYDAY for size in TREES]
TOKENS = covering(HYBRIDS, TREES, (1.0, 0.6, 0.0), first=FIRST_TOKENS)


@pytest.mark.parametrize(("family", "size", "share"), sample(TOKENS, [("qwen3_next", 24, 0.6)]))
def test_tokens(family: str, size: int, share: float) -> None:
    """One prompt, and a ragged batch in chunks of 16; afterwards the modules are as before."""
    model, prompts, expected = texts(family)
    before = [vars(module).keys() for module in model.modules()]
    with sk.patch(model, oracle(family, share), tree=TREES[size], page_size=4, prefill_chunk=16) as handle:
        assert written(model, prompts[3:4]) == expected[3:4]
        assert written(model, prompts) == expected
        steps = handle.stats.tokens_per_step
        assert handle.pool is not None
        handle.pool.check_integrity()
        assert not handle.pool.states.accepted
    assert steps == 1 if size == 1 or share == 0 else steps > (1.5 if share < 1 else 3)
    assert [vars(module).keys() for module in model.modules()] == before
    output = model.generate(torch.tensor([prompts[0]]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    assert output == prompts[0] + expected[0]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("family", sample(["lfm2", "qwen3_next", "olmo_hybrid", "falcon_h1"], ["lfm2"]))
def test_the_faster_way_changes_no_token(family: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``patch`` measures whether a layer gets a tree's nodes level by level (``alone``) or all paths at once."""
    model, prompts, expected = texts(family)
    monkeypatch.setattr(find_mixers, "_alone_is_fast", lambda *_: alone)
    with sk.patch(model, oracle(family, 0.6), tree=TREES[24], page_size=4, prefill_chunk=16) as handle:
        assert {mixer.steps_alone for mixer in handle.facts.mixers.mixers} == {alone}
        assert written(model, prompts) == expected


@each_family
def test_preemption_swapping_and_aborts(family: str) -> None:
    model, prompts, expected = texts(family)
    for swap in (False, True):
        options: dict[str, Any] = {"tree": TREES[8], "page_size": 4, "prefill_chunk": 16}
        with sk.patch(model, oracle(family, 0.6), **options) as handle:
            few_pages(handle, 24)
            handle.memory_pressure.swap = swap
            assert written(model, prompts) == expected
            assert handle.stats.preemptions > 0
            assert (handle.stats.swaps > 0) == swap
            with sk.stream_batch(model, prompts, max_new_tokens=NEW, eos_token_ids=[]) as run:
                for piece in run:
                    if piece.index == 3:
                        run.abort(3)
                done = run.completions()
            assert done[3].finish_reason == "aborted"
            kept = [row for i, row in enumerate(expected) if i != 3]
            assert [c.tokens for i, c in enumerate(done) if i != 3] == kept
            assert done[3].tokens == expected[3][: len(done[3].tokens)]


FIRST_TURNS = [(family, reuse) for family in EVERYDAY for reuse in (True, False)]
TURNS = [*FIRST_TURNS, *((family, True) for family in HYBRIDS if family not in EVERYDAY)]


@pytest.mark.parametrize(("family", "reuse"), sample(TURNS, [("lfm2", True)]))
def test_the_next_turns_of_conversations(family: str, reuse: bool) -> None:
    """They go on from the states of the turns before, in a batch and one by one, while other texts come between."""
    model, prompts, expected = texts(family)
    rng, said = random.Random(3), [[*p, *row] for p, row in zip(prompts[:3], expected[:3], strict=True)]
    turns = [[*text, *(rng.randrange(3, VOCAB) for _ in range(5))] for text in said]

    def answer(text: list[int]) -> list[int]:
        inputs = torch.tensor([text])  # with a mask, because a written token may be the one that pads
        output = model.generate(inputs, attention_mask=inputs * 0 + 1, max_new_tokens=NEW, do_sample=False)
        return output[0].tolist()  # type: ignore[no-any-return]

    answers = [answer(turn) for turn in turns]
    turns.append([*answers[2], 5])
    answers.append(answer(turns[3]))
    wanted = [row[len(turn) :] for row, turn in zip(answers, turns, strict=True)]
    drafter = OracleDrafter([*said, *answers], 0.6, max_depth=5, vocab=VOCAB)
    options: dict[str, Any] = {"tree": TREES[8], "page_size": 4, "prefill_chunk": 16, "max_batch_size": 3}
    with sk.patch(model, drafter, reuse_prefix=reuse, **options) as handle:
        resumes = reuse and handle.facts.mixers.may_resume
        # The rows accepted last, at most one path of the tree, aren't in a state.
        assert written(model, prompts[:3]) == expected[:3]
        assert written(model, turns[:3]) == wanted[:3]  # in a larger pool, to which the states move
        assert handle.stats.reused_tokens >= (sum(map(len, said)) - 3 * 6 if resumes else 0)
        assert written(model, turns[1:2]) == wanted[1:2]  # its state has gone on
        before = handle.stats.reused_tokens
        assert written(model, turns[3:]) == wanted[3:]
        assert handle.stats.reused_tokens - before >= (len(answers[2]) - 6 if resumes else 0)
        assert resumes or not handle.stats.reused_tokens
        assert handle.pool is not None
        handle.pool.check_integrity()


@pytest.mark.parametrize("family", sample(["qwen3_next", "lfm2", "kimi_linear", "olmo_hybrid"], ["lfm2"]))
def test_a_step_calls_each_mixer_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted rows are in the call that verifies the next tree; rows accepted before a step of one node aren't."""
    model, prompts, expected = texts(family)
    calls: Counter[str] = Counter()
    for name in ("call", "divided"):
        monkeypatch.setattr(Mixer, name, counted(getattr(Mixer, name), calls))
    with sk.patch(model, oracle(family, 1.0), tree=sk.DraftTree.chain(3), prefill_chunk=64) as handle:
        calls.clear()
        assert written(model, prompts[:1], max_new_tokens=12) == [expected[0][:12]]
        mixers, steps = len(handle.facts.mixers.mixers), handle.stats.steps
    assert steps == 3  # of 11 tokens behind the prompt's
    assert calls == {"call": 2 * mixers, "divided": 2 * mixers}, "the prompt and the first tree, then two trees"


def counted(function: Any, calls: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


FAILING = ("qwen3_next", "lfm2", "jamba", "minimax")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAILING)
def test_failing_allocations(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of each step fails once; a sequence whose states have changed is computed again.

    Half of the sites per family: those outside of the families' own layers are in two of the four cases.
    """
    model, prompts, expected = texts(family)
    asked = [prompts[4], prompts[1]]
    with sk.patch(model, oracle(family, 0.6), tree=TREES[8], page_size=4, prefill_chunk=8) as handle:
        handle.memory_pressure.levels = handle.memory_pressure.levels[:1] * 10000
        with failing_everywhere(monkeypatch, parts=2, part=FAILING.index(family) % 2) as mode:
            assert written(model, asked, max_new_tokens=4) == [expected[4][:4], expected[1][:4]]
        assert handle.stats.retries == mode.failures > 100
        assert handle.stats.preemptions > 0


@pytest.mark.parametrize("family", sample(HYBRIDS, ["lfm2"]))
def test_low_memory(family: str) -> None:
    """Lower levels resize scratch, and with it the rows that aren't in the states yet."""
    model, prompts, expected = texts(family)
    with sk.patch(model, oracle(family, 1.0), tree=TREES[24], page_size=4, prefill_chunk=16) as handle:
        pressure = handle.memory_pressure
        with sk.stream_batch(model, prompts, max_new_tokens=NEW, eos_token_ids=[]) as run:
            for i, _ in enumerate(run):
                if i in (9, 12, 15):
                    pressure.shrink(8)
            assert [completion.tokens for completion in run.completions()] == expected
        assert handle.stats.shrinks + pressure.shrunk > 0


@pytest.mark.parametrize("family", sample(HYBRIDS, ["lfm2"]))
def test_low_memory_while_sequences_are_swapped_out(family: str) -> None:
    """A smaller tree leaves fewer rows than a sequence on the host has accepted under the larger one."""
    model, prompts, expected = texts(family)
    options: dict[str, Any] = {"tree": TREES[24], "page_size": 4, "prefill_chunk": 16, "max_batch_size": 3}
    with sk.patch(model, oracle(family, 1.0), **options) as handle:
        few_pages(handle, 16)
        pressure = handle.memory_pressure
        pressure.swap = True
        with sk.stream_batch(model, prompts, max_new_tokens=NEW, eos_token_ids=[]) as run:
            for _ in run:
                if handle.stats.swaps and pressure.level.max_tree > 1:
                    pressure.shrink(3)
            assert [completion.tokens for completion in run.completions()] == expected
        assert pressure.shrunk > 0


@pytest.mark.parametrize("family", sample(HYBRIDS, ["lfm2"]))
def test_sampling(family: str) -> None:
    """A seed gives the same tokens with drafts and without."""
    model, prompts, _ = texts(family)
    requests = [sk.Request(p, NEW, [], sk.Sampling(temperature=0.8, top_k=9, seed=i)) for i, p in enumerate(prompts)]
    found = []
    for tree in (1, TREES[8]):
        with sk.patch(model, oracle(family, 0.6), tree=tree, page_size=4, prefill_chunk=16):
            found.append([completion.tokens for completion in sk.generate_batch(model, requests)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "zamba2"])
@pytest.mark.parametrize("damage", ["no copy", "no commit"])
def test_negative_controls(family: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification in place, or without feeding the accepted rows: other tokens."""
    model, prompts, expected = texts(family)
    if damage == "no copy":
        own = MixerPass._verify

        def verify(current: MixerPass, mixer: Mixer, rows: Tensor, take: Any, joined: Any) -> Tensor:
            output, paths, slots = own(current, mixer, rows, take, joined), current.paths, current.trees[:1]
            assert paths is not None
            states = current._read(mixer, slots)
            _, states = mixer.call(rows[paths.rows[:1]], states, take(paths.rows[:1]), alone=mixer.steps_alone)
            current._write(mixer, slots, states)
            return output

        monkeypatch.setattr(MixerPass, "_verify", verify)
    else:
        monkeypatch.setattr(MixerPass, "_joined", lambda *_: {})
        monkeypatch.setattr(MixerPass, "_include_accepted", lambda *_: None)
    with sk.patch(model, oracle(family, 0.6), tree=TREES[8], page_size=4, prefill_chunk=64, max_batch_size=1):
        assert written(model, prompts) != expected


@pytest.mark.parametrize("family", sample(HYBRIDS, ["lfm2"]))
def test_the_plan(family: str) -> None:
    """States as planned, and the peak within the budget, for prompts far longer than a chunk."""
    model = texts(family)[0]
    inputs = batch((100, 60, 7, 40))
    options: dict[str, Any] = {"tree": TREES[8], "max_batch_size": 4, "prefill_chunk": 32}
    with sk.patch(model, oracle(family, 0.6), **options) as handle:
        states = sum(mixer.state_bytes for mixer in handle.facts.mixers.specs)
        assert handle.plan.parts["states"] == 4 * states > 0
        needed = handle.plan.total_bytes
    with sk.patch(model, oracle(family, 0.6), memory_budget=2 * needed, **options) as handle:
        plan = handle.plan
        peak = peak_of(handle, inputs, 12)
        assert handle.pool is not None
        assert handle.bytes_by_part["states"] == handle.pool.states.nbytes == plan.max_sequences * states
        assert peak <= plan.total_bytes - plan.parts["workspace"]


@each_family
def test_measured_bytes_ignore_the_collector(family: str) -> None:
    """A pass leaves no tensors to Python's garbage collector, so that a refusal's least budget is enough."""
    model = texts(family)[0]
    with sk.patch(model, "prompt-lookup", tree=4, prefill_chunk=32) as handle:
        found, before = [], gc.get_threshold()
        try:
            for threshold in (1, 0):  # at every allocation, and never
                gc.set_threshold(threshold)
                found.append(measure_passes(model, handle.facts, [32]))
        finally:
            gc.set_threshold(*before)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 256])
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_tight_budgets(family: str, chunk: int) -> None:
    """Of chunks that are shorter than the parts to which recurrent layers pad them."""
    model, options = texts(family)[0], {"tree": 8, "max_batch_size": 4, "prefill_chunk": chunk}
    with pytest.raises(sk.BudgetError) as refusal:
        sk.patch(model, "prompt-lookup", memory_budget=1000, **options)
    least = re.search(r"give at least ([\d.]+ \w+)", str(refusal.value))
    assert least is not None
    with sk.patch(model, "prompt-lookup", memory_budget=parse_bytes(least[1]) + 200_000, **options) as handle:
        plan = handle.plan
        assert plan.prefill_chunk < 256
        assert plan.max_tokens is not None
        peak = peak_of(handle, batch((min(300, plan.max_tokens - 24),)), 8)
        assert peak <= plan.total_bytes - plan.parts["workspace"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("zaya", "ZayaCCAProjection of layer 0 keeps a recurrent state within attention"),
        ("mamba", "MambaForCausalLM.* "),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM.* "),
        ("rwkv", "RwkvForCausalLM.* "),
    ],
)
def test_refusals(family: str, reason: str) -> None:
    model = family_model(family)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(sk.UnsupportedModel, match=reason):
        sk.patch(model, "prompt-lookup")
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.slow
def test_a_layer_that_amplifies_rounding() -> None:
    """By chance a head's output is small, so that its norm turns rounding into a relative distance of 3e-5."""
    model = hybrid_model("qwen3_5_text", seed=57)
    call: Any = {"input_ids": torch.arange(3, 12)[None], "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**call)
    with sk.patch(model, "prompt-lookup", tree=4):
        assert torch.equal(model.generate(**call), expected)


def test_what_patch_refuses() -> None:
    model = texts("lfm2")[0]
    heads = sk.MedusaHeads(32, VOCAB, 2)
    with pytest.raises(ValueError, match="graph=True, but its recurrent layers take accepted tokens in numbers"):
        sk.patch(model, heads, graph=True)
    with pytest.raises(sk.UnsupportedModel, match="the draft model Lfm2ForCausalLM has recurrent layers"):
        sk.patch(tiny_model("llama"), hybrid_model("lfm2"))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", sample(["qwen3_next", "lfm2"], ["lfm2"]))
def test_a_drafter_that_reads_hidden_states(family: str, tmp_path: Path) -> None:
    """Its own layer's keys and values are behind those of the attention layers."""
    model, prompts, expected = texts(family)
    write_eagle3(tmp_path, vocab=VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with sk.patch(model, str(tmp_path), tree=8, page_size=4, prefill_chunk=16) as handle:
        assert written(model, prompts) == expected
        assert isinstance(handle.plan.tree, sk.TreeBudget)


@pytest.mark.parametrize("family", sample(["qwen3_next", "zamba2", "minimax"], ["qwen3_next"]))
def test_predicted_sizes(family: str, tmp_path: Path) -> None:
    """``specmemo plan`` reads the sizes of states and the number of weights from transformers' code."""
    model = texts(family)[0]
    model.config.save_pretrained(tmp_path)
    spec = recurrent_spec(ModelSpec.load(tmp_path), tmp_path)
    with sk.patch(model, oracle(family, 1.0), tree=2, max_batch_size=1) as handle:
        facts = handle.facts
    assert spec.mixers is not None
    assert spec.mixers.state_bytes == sum(mixer.state_bytes for mixer in facts.mixers.specs)
    assert spec.mixers.row_bytes == sum(mixer.row_bytes for mixer in facts.mixers.specs)
    assert spec.attention_layers == len(facts.layers)
    assert spec.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    with pytest.raises(ValueError, match="has recurrent layers, whose sizes follow from transformers' code"):
        plan_memory(tmp_path, "h100", None, Workload(64))
    data = plan_json("--model", tmp_path, "--device", "h100", "--heads", "2", "--context", "64")
    assert data["plan"]["parts"]["states"] == spec.mixers.state_bytes


@given(st.lists(st.integers(0, 30), max_size=30), st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=examples(100), deadline=None)
def test_paths(first: list[int], second: list[int]) -> None:
    """Every path goes from the root to a leaf, and every node is on one of them, at its depth."""
    trees = [[-1, *(parent % (node + 1) for node, parent in enumerate(draws))] for draws in (first, second)]
    for parents in trees:
        paths = paths_to_leaves(parents)
        assert {node for path in paths for node in path} == set(range(len(parents)))
        assert len({tuple(path) for path in paths}) == len(paths) == len(set(range(len(parents))) - set(parents))
        for path in paths:
            assert [parents[node] for node in path] == [-1, *path[:-1]]
    sizes = [len(parents) for parents in trees]
    flat = SimpleNamespace(
        parents=torch.tensor([p for parents in trees for p in parents], dtype=torch.int32),
        qo_indptr=torch.tensor([0, sizes[0], sum(sizes)]), num_trees=2, tokens=torch.zeros(1),
    )  # fmt: skip
    found = tree_paths(flat)  # type: ignore[arg-type]
    assert torch.equal(found.rows[found.path, found.depth], torch.arange(sum(sizes)))
    assert torch.equal(found.path >= found.starts[1], torch.arange(sum(sizes)) >= sizes[0])
    assert found.starts == (0, *(sum(len(paths_to_leaves(p)) for p in trees[: i + 1]) for i in range(2)))
    starts, above = [0, sizes[0]], torch.arange(2)
    for depth, (nodes, places) in enumerate(found.levels):
        assert found.depth[nodes].eq(depth).all()
        if depth:
            parents = torch.stack([flat.parents[node] + starts[node >= sizes[0]] for node in nodes.tolist()])
            assert torch.equal(above[places], parents)
        above = nodes


def test_the_pool_of_states() -> None:
    """Rows of accepted nodes survive resizing and a copy to host memory and back, mixer by mixer."""
    spec = MixerSpec((((3,), torch.float32),), 2, torch.float32, torch.device("cpu"))
    pool = StatePool([spec, spec], 3, 6)
    for rows in pool.rows:
        rows.copy_(torch.arange(12.0).view(6, 2))
    with pool.during_pass([0, 2], []) as accepted:
        accepted |= {0: [1, 4], 2: [5]}
    with pool.including(0, [0]):
        pass
    pool.states[1][0][0].fill_(7)
    copy = pool.copy_out(0)
    assert copy.nbytes == 2 * 3 * 4 + 2 * 2 * 4
    pool.close(0)
    pool.resize_rows(3)
    assert pool.missing(0) == pool.missing(1) == {2: [0]}
    pool.open(1)
    pool.copy_in(1, copy)
    assert pool.started(1)
    assert pool.missing(0) == {2: [0]}
    assert pool.rows[1][pool.missing(1)[1]].tolist() == [[2, 3], [8, 9]]
    assert pool.rows[1][pool.missing(1)[2]].tolist() == [[10, 11]]
    assert pool.states[1][0][1].tolist() == [7, 7, 7]
    with suppress(MemoryError), pool.during_pass([1, 2], []), pool.including(1, [1]):
        raise MemoryError
    assert pool.lost == {1}
    pool.close(1)
    assert not pool.lost
    with suppress(MemoryError), pool.during_pass([1, 2], []):
        pool.change([2])
        with pool.including(0, [2]):
            pass
        raise MemoryError
    assert pool.lost == {2}


def test_copied_states_get_more_rows() -> None:
    """A smaller tree leaves fewer rows than sequences on the host have accepted under a larger one."""
    spec = MixerSpec((((3,), torch.float32),), 2, torch.float32, torch.device("cpu"))
    pool = StatePool([spec, spec], 3, 10)
    for rows in pool.rows:
        rows.copy_(torch.arange(20.0).view(10, 2))
    with pool.during_pass([0, 1, 2], []) as accepted:
        accepted |= {0: [0, 1, 2, 3], 1: [5, 7], 2: [9]}
    copies = [pool.copy_out(0), pool.copy_out(1)]
    for slot in (0, 1):
        pool.close(slot)
    pool.resize_rows(2)
    for slot, copy in zip((1, 0), copies, strict=True):
        pool.open(slot)
        pool.copy_in(slot, copy)
    for mixer, rows in enumerate(pool.rows):
        missing = pool.missing(mixer)
        assert [rows[missing[slot], 0].tolist() for slot in (1, 0, 2)] == [[0, 2, 4, 6], [10, 14], [18]]
        assert len({row for held in missing.values() for row in held}) == 7


def test_a_copy_that_fails_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed sequence's state would be reused without the rows that couldn't be copied."""
    spec = MixerSpec((((3,), torch.float32),), 2, torch.float32, torch.device("cpu"))
    pool = StatePool([spec], 1, 1)
    with pool.during_pass([0], []) as accepted:
        accepted |= {0: [0]}
    copy = replace(pool.copy_out(0), rows=(torch.ones(3, 2),))
    pool.close(0)
    for target, name in ((pool, "_new_rows"), (torch.Tensor, "to")):
        pool.open(0)
        with monkeypatch.context() as patched:
            patched.setattr(target, name, _no_memory)
            with pytest.raises(MemoryError):
                pool.copy_in(0, copy)
        assert pool.close(0, range(20)) == []
        assert not pool.accepted


def test_a_closed_sequence_has_no_included_rows() -> None:
    """Rows of the slot's next sequence aren't in its states yet."""
    spec = MixerSpec((((3,), torch.float32),), 2, torch.float32, torch.device("cpu"))
    pool = StatePool([spec], 2, 4)
    with pool.during_pass([0, 1], []) as accepted:
        accepted |= {0: [0], 1: [1, 2]}
    copy = pool.copy_out(1)
    with suppress(MemoryError), pool.during_pass([0, 1], []):
        with pool.including(0, [0]):
            pass
        raise MemoryError
    for slot in (0, 1):
        pool.close(slot)
    pool.open(0)
    pool.copy_in(0, copy)
    assert len(pool.missing(0)[0]) == 2


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError


@dataclass
class _Waiting:
    prompt: list[int]
    context: list[int]
    computed: int = 0


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=4),
    st.lists(st.integers(3, 9), min_size=1),
)
def test_a_prompt_is_never_cut_one_token_from_others(sizes: list[tuple[int, int]], rooms: list[int]) -> None:
    """Every chunk but a prompt's first has two of its rows or none, and contexts are computed in the end."""
    waiting = [_Waiting([0] * prompt, [0] * (prompt + behind)) for prompt, behind in sizes]
    for turn in range(200):
        left, took = rooms[turn % len(rooms)], 0
        for each in waiting:
            size = _part(each, left, 2)
            rows = min(len(each.prompt), each.computed + size) - each.computed
            assert 0 <= size <= left
            assert rows != 1 or not each.computed
            each.computed, left, took = each.computed + size, left - size, took + size
        assert took or all(each.computed == len(each.context) for each in waiting)
    assert all(each.computed == len(each.context) for each in waiting)


def test_a_layer_that_computes_one_token_in_another_way() -> None:
    """Nemotron-H: the logits behind a prompt of one token more than a chunk; chunks of two are refused."""
    model = hybrid_model("nemotron_h")
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    call: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **call).logits[0]
    with pytest.raises(ValueError, match="prefill_chunk is 2, it must be at least 3"):
        sk.patch(model, "prompt-lookup", prefill_chunk=2)
    for chunk in (4, 8):
        with sk.patch(model, "prompt-lookup", prefill_chunk=chunk):
            torch.testing.assert_close(model.generate(ids, **call).logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_of_time_steps_is_found(family: str, seed: int) -> None:
    """It counts for several tokens only. With some weights few inputs reach it."""
    with sk.patch(hybrid_model(family, seed), "prompt-lookup") as handle:
        assert all(mixer.alone_differs for mixer in handle.facts.mixers.mixers)


def test_a_limit_of_time_steps() -> None:
    model = hybrid_model("nemotron_h", seed=2)  # random tokens of its size don't reach the limit
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    call: dict[str, Any] = {"max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **call)
    drafter = OracleDrafter([expected.sequences[0].tolist()], 1.0)
    with sk.patch(model, drafter, tree=sk.DraftTree.chain(3)):
        found = model.generate(ids, **call)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(expected.logits), atol=1e-4, rtol=0)
