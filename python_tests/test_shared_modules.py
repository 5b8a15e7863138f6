"""Models that share a draft model, an lm_head, a decoder, heads or a drafter, patched at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from selection import sample
from test_drafters import toy_draft
from test_families import batch, greedy
from test_patch import snapshot
from tiny_models import OracleDrafter, random_heads, tiny_model
from transformers import PreTrainedModel

import specmemo_kernels as sk

CHAIN = sk.DraftTree.chain(3)


def models(count: int) -> list[PreTrainedModel]:
    return [tiny_model("llama", seed=31 + i) for i in range(count)]


def same_tokens(expected: dict[PreTrainedModel, torch.Tensor], threads: bool = False) -> None:
    """Each model writes its unpatched tokens, in sequence or concurrently."""
    results: dict[PreTrainedModel, torch.Tensor] = {}

    def run(model: PreTrainedModel) -> None:
        for _ in range(2):
            results[model] = greedy(model, batch((9, 5)), 15)

    for model in expected:
        if not threads:
            run(model)
    workers = [threading.Thread(target=run, args=(model,)) for model in expected if threads]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for model, tokens in expected.items():
        assert torch.equal(results[model], tokens)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_draft_model_of_two_targets(first: int, threads: bool) -> None:
    """After either target is unpatched, the other one continues; in the end all three models are restored."""
    small, *targets = models(3)
    before = [snapshot(model) for model in (small, *targets)]
    expected = {model: greedy(model, batch((9, 5)), 15) for model in targets}
    handles = [sk.patch(model, sk.DraftModel(small, tokens=3)) for model in targets]
    same_tokens(expected, threads)
    runs = [sk.stream_batch(model, [[5, 9, 3], [7]], max_new_tokens=8) for model in targets]
    for _ in zip(*runs, strict=False):  # a piece of each, in turn
        pass
    for run in runs:
        list(run)
    sk.unpatch(targets[first])
    assert snapshot(targets[first]) == before[1 + first]
    same_tokens(expected, threads)
    assert handles[1 - first].stats.steps > 0
    sk.unpatch(targets[1 - first])
    assert [snapshot(model) for model in (small, *targets)] == before


@pytest.mark.slow
@pytest.mark.parametrize("order", ["draft first", "target first"])
@pytest.mark.parametrize("patched_first", ["draft", "target"])
def test_a_draft_model_that_is_patched_itself(patched_first: str, order: str) -> None:
    small, target = models(2)
    before = [snapshot(model) for model in (small, target)]
    expected = {model: greedy(model, batch((9, 5)), 15) for model in (small, target)}
    patches: list[Callable[[], object]] = [lambda: sk.patch(small, "prompt-lookup"), lambda: sk.patch(target, small)]
    for patch in patches if patched_first == "draft" else patches[::-1]:
        patch()
    same_tokens(expected)
    same_tokens(expected, threads=True)
    small.specmemo.release()
    same_tokens(expected)
    for model in (small, target) if order == "draft first" else (target, small):
        sk.unpatch(model)
        same_tokens(expected)
    assert [snapshot(model) for model in (small, target)] == before


@pytest.mark.slow
def test_a_copy_of_a_draft_model_drafts_too() -> None:
    """The copy is made while the original is in use."""
    small, *targets = models(3)
    expected = {model: greedy(model, batch((9, 5)), 15) for model in targets}
    sk.patch(targets[0], small)
    twin = copy.deepcopy(small)
    sk.patch(targets[1], twin)
    same_tokens(expected)
    for model in targets:
        sk.unpatch(model)
    assert not twin.lm_head._forward_pre_hooks
    assert not small.lm_head._forward_pre_hooks


def tied(part: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models that share one module."""
    first, second = models(2)
    setattr(second, part, getattr(first, part))
    return first, second


@pytest.mark.parametrize("part", sample(["lm_head", "model"], ["lm_head"]))
@pytest.mark.parametrize("last", sample([0, 1], [0]))
def test_models_with_a_module_in_common(part: str, last: int) -> None:
    """Both patched, one unpatched: the other one still works."""
    pair = tied(part)
    before = [snapshot(model) for model in pair]
    expected = {model: greedy(model, batch((9, 5)), 15) for model in pair}
    handles = [sk.patch(model, random_heads(model), tree=6) for model in pair]
    same_tokens(expected)
    sk.unpatch(pair[1 - last])
    same_tokens(expected)
    assert handles[last].stats.steps > 0
    sk.unpatch(pair[last])
    assert [snapshot(model) for model in pair] == before


@pytest.mark.parametrize("part", sample(["lm_head", "model"], ["lm_head"]))
def test_a_draft_model_with_a_module_of_its_target(part: str) -> None:
    target, small = tied(part)
    expected = {target: greedy(target, batch((9, 5)), 15)}
    with sk.patch(target, small, tree=CHAIN) as handle:
        same_tokens(expected)
        assert handle.stats.steps > 0
    assert not target.lm_head._forward_pre_hooks
    same_tokens(expected)


def test_heads_of_two_models() -> None:
    """One model's heads are offloaded, as under memory pressure; the other's stay."""
    pair = models(2)
    heads = random_heads(pair[0])
    expected = {model: greedy(model, batch((9, 5)), 15) for model in pair}
    handles = [sk.patch(model, heads, tree=6) for model in pair]
    assert handles[0].drafter.heads[0][2].weight.data_ptr() == handles[1].drafter.heads[0][2].weight.data_ptr()
    same_tokens(expected)
    hidden = torch.randn(2, 32)
    guesses = handles[1].drafter.candidates(hidden, 3, 4)
    for head in range(3):  # stands in for moving them to the host, which takes a GPU
        weight = handles[0].drafter.heads.own_tensors(head)[0]
        weight.data = torch.full_like(weight.data, torch.nan)
    assert torch.equal(handles[1].drafter.candidates(hidden, 3, 4), guesses)
    same_tokens(expected)
    for model in pair:
        sk.unpatch(model)
    copied = copy.deepcopy(pair[1])
    with sk.patch(copied, random_heads(copied), tree=6):
        assert torch.equal(greedy(copied, batch((9, 5)), 15), expected[pair[1]])


class Remembering(OracleDrafter):
    """A drafter with state per slot."""

    def close(self, slot: int) -> None:
        pass


@pytest.mark.parametrize("kind", sample(["remembering", "pages"], ["remembering"]))
def test_drafters_with_state_serve_one_model(kind: str) -> None:
    """Sequences of two models would have the same slots."""
    first, second = models(2)
    before = snapshot(second)
    drafter = Remembering([], 0.0, max_depth=3) if kind == "remembering" else toy_draft(3)
    sk.patch(first, drafter, tree=CHAIN)
    with pytest.raises(ValueError, match=f"this {type(drafter).__name__} has state and serves another patched model"):
        sk.patch(second, drafter, tree=CHAIN)
    assert snapshot(second) == before
    sk.unpatch(first)
    with sk.patch(second, drafter, tree=CHAIN):
        pass
    sk.patch(first, drafter, tree=CHAIN)
    del first  # dropped without unpatch
    with sk.patch(second, drafter, tree=CHAIN):
        pass


@pytest.mark.slow
def test_drafters_without_state_serve_many() -> None:
    pair = models(2)
    expected = {model: greedy(model, batch((9, 5)), 15) for model in pair}
    drafter = sk.PromptLookupDrafter()
    for model in pair:
        sk.patch(model, drafter)
    same_tokens(expected)
    same_tokens(expected, threads=True)
    for model in pair:
        sk.unpatch(model)


@pytest.mark.slow
def test_deep_copies_of_patched_models_are_patched_apart() -> None:
    target, small = models(2)
    expected = greedy(target, batch((9, 5)), 15)
    sk.patch(target, small)
    twin = copy.deepcopy(target)
    assert not twin.lm_head._forward_pre_hooks
    sk.patch(twin, small)
    same_tokens({target: expected, twin: expected})
    sk.unpatch(target)
    same_tokens({target: expected, twin: expected})
    sk.unpatch(twin)
    assert not small.lm_head._forward_pre_hooks
