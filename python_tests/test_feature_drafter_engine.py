"""Drafters that read hidden states, through the whole engine: every token is the model's own, in batches, recorded
steps, few pages, reused prefixes, failing allocations and budgets; pages keep the drafter's own keys and values.
"""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_oracles import PlainDrafter
from failing_allocations import FailingAllocations, failing_everywhere
from safetensors.torch import load_file
from selection import EXHAUSTIVE, covering, sample
from test_call_corners import falls_back
from test_families import batch, greedy
from test_feature_drafters import KINDS, LAYERS, Recorder, expected_tree, features_of, texts_of, token_paths
from test_patch import snapshot
from test_patch_memory import peak_of, wide_model, with_workspace
from test_shared_modules import same_tokens
from tiny_models import FAMILIES, VOCAB, tiny_model
from toy_model import empty
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specmemo_kernels as sk
from specmemo_kernels.cache.kv_storage import KV_DTYPES
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import DraftedTrees, TreeBatch
from specmemo_kernels.integrations.hf.cache_argument import CACHE_ARGUMENT
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor
NAMES = {"eagle3": "eagle3, reduced vocabulary", "eagle": "eagle", "clover2": "clover2", "dflash": "dflash"}
#: Logits are multiplied by it, so that dynamic trees of random drafters get deep.
SHARP = 6.0
NEW = 16
TREE = [[0], [0, 1], [2], [0, 0], [2, 0], [0, 1, 2], [1], [0, 0, 0], [2, 0, 0], [2, 0, 0, 1]]
GRAPHS = covering(NAMES, (True, False), first=[("eagle3", True), ("clover2", False)])


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048)


@cache
def prompts() -> list[list[int]]:
    """60 prompts, of 1 to 70 tokens."""
    rng = random.Random(5)
    return [
        [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 8, 17, 30, rng.randint(31, 70))))] for _ in range(60)
    ]


@cache
def answers() -> list[list[int]]:
    """The prompts with the tokens that the unpatched model writes, twice :data:`NEW`."""
    return texts(target(), prompts(), 2 * NEW)


def texts(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Prompts with the unpatched model's ``new`` tokens."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), 20):
        rows = order[start : start + 20]
        inputs = padded([prompts[i] for i in rows])
        output = greedy(model, inputs, new)
        found |= {i: [*prompts[i], *row.tolist()] for i, row in zip(rows, output[:, -new:], strict=True)}
    return [found[i] for i in range(len(prompts))]


def padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class Seer:
    """Puts the right continuation into one of the deepest paths of each drafted tree, up to a random depth.

    It finds a sequence's place by the target's last keys in pages, on the device and without host reads.

    Args:
        answers: the token rows that greedy decoding writes, prompts included.
        share: probability that a token of the path is right.
    """

    def __init__(self, model: PreTrainedModel, answers: Sequence[Sequence[int]], share: float, depth: int = 8) -> None:
        kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
        self.share, self.layer = share, sum(kind != "linear_attention" for kind in kinds) - 1  # the last with keys
        keys, futures = [], []
        for answer in answers:
            row = torch.tensor([list(answer)])
            with torch.no_grad():
                cache = model(row, use_cache=True)[CACHE_ARGUMENT]
            keys.append(cache.layers[-1].keys[0].transpose(0, 1).flatten(1)[:-1])
            future = torch.nn.functional.pad(row[0], (0, depth), value=VOCAB).unfold(0, depth, 1)
            futures.append(future[2 : len(answer) + 1])  # behind the root, which is behind the last token in pages
        self.keys, self.futures = torch.cat(keys), torch.cat(futures)

    def right(self, rows: DraftRows) -> Tensor:
        """``[B, depth]``: the tokens behind the roots."""
        pool, last = rows.pool, rows.seq_lens.long() - 1
        page = rows.block_table.gather(1, (last // pool.page_size)[:, None])[:, 0].long()
        found = pool.k_pages[self.layer][page, last % pool.page_size].float()
        if (scales := pool.k_scales[self.layer]) is not None:
            found = found * scales[page, last % pool.page_size][..., None]
        near = (self.keys - found.flatten(1)[:, None]).square().sum(dim=2).argmin(dim=1)
        return self.futures.index_select(0, near)

    def __call__(self, rows: DraftRows, trees: DraftedTrees) -> DraftedTrees:
        size, device = trees.tokens.shape[1], trees.tokens.device
        if size == 1:
            return trees
        right, seed = self.right(rows), (rows.seq_lens.long() * 31 + rows.roots * 17)[:, None]
        end = (trees.depths * 1000 + (torch.arange(size, device=device) * 37 + seed) % 101).argmax(dim=1, keepdim=True)
        on_path, node = torch.zeros_like(trees.tokens), end
        for _ in range(right.shape[1]):
            on_path = on_path.scatter(1, node, 1)
            node = trees.parents.long().gather(1, node).clamp(min=0)
        guess = right.gather(1, (trees.depths - 1).clamp(0, right.shape[1] - 1))
        lucky = (seed + trees.depths * 57) % 100 < 100 * self.share
        tokens = torch.where((on_path > 0) & (trees.depths > 0), torch.where(lucky, guess, guess + 1), trees.tokens)
        return DraftedTrees(tokens, trees.parents, trees.depths)


@dataclass(frozen=True)
class Files:
    """A drafter's files and its plain implementation."""

    folder: str
    plain: PlainDrafter


def write(kind: str, folder: Path, model: PreTrainedModel, **options: Any) -> Files:
    writer, plain_class, defaults = KINDS[NAMES[kind]]
    if kind == "eagle3":
        options = {"logit_scale": SHARP} | options
    config, tensors = writer(folder, vocab=VOCAB, **(defaults | options))
    embedding, lm_head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return Files(str(folder), plain_class(config, tensors, embedding, lm_head if kind == "eagle3" else SHARP * lm_head))


def sharpen(drafter: Any) -> None:
    """Multiply the logits of the target's lm_head, for drafters without their own."""
    before = drafter.vocabulary.top_log_probs
    drafter.vocabulary = replace(drafter.vocabulary, top_log_probs=lambda x, k: before(SHARP * x, k))


@contextmanager
def patched(
    model: PreTrainedModel, files: Files, seer: Seer | None = None, recorded: list[Any] | None = None, **options: Any
) -> Iterator[sk.SpecMemo]:
    """A model patched with a drafter whose trees ``seer`` changes; ``recorded`` gets its own trees."""
    options = {"tree": 8, "page_size": 4} | options
    with sk.patch(model, files.folder, **options) as handle, pytest.MonkeyPatch.context() as patch:
        drafter: Any = handle.drafter
        if getattr(drafter, "_lm_head", None) is None:
            sharpen(drafter)
        if recorded is not None:
            recorder = Recorder(drafter, patch)
            recorder.calls = recorded
        if seer is not None:
            draft = drafter.draft

            def seeing(rows: DraftRows, tree: Trees) -> DraftedTrees:
                return seer(rows, draft(rows, tree))

            patch.setattr(drafter, "draft", seeing, raising=False)
        step = Scheduler.step

        def checked(scheduler: Scheduler) -> list[SequenceState]:
            ended = step(scheduler)
            scheduler.decoder.pool.check_integrity()
            return ended

        patch.setattr(Scheduler, "step", checked)
        yield handle
        if handle.pool is not None:
            handle.pool.check_integrity()
            assert handle.pool.free_pages == handle.pool.num_pages


@cache
def seer(share: float) -> Seer:
    return Seer(target(), answers(), share)


TREES: dict[str, Any] = {"2": 2, "8": 8, "24": 24, "static": TREE}
FIRST = [
    ("eagle3", 8, "8", False),
    ("eagle", 8, "24", True),
    ("clover2", 8, "static", True),
    ("dflash", 1, "8", True),
]
CASES = covering(NAMES, (1, 8), TREES, (False, True), first=FIRST)


def new_tokens(count: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """The first ``count`` tokens of the answers (of ``rows``)."""
    pairs = list(zip(prompts(), answers(), strict=True))
    return [pairs[i][1][len(pairs[i][0]) :][:count] for i in (range(len(pairs)) if rows is None else rows)]


@pytest.mark.parametrize(("kind", "size", "tree", "graph"), sample(CASES, [("clover2", 8, "static", True)]))
def test_sixty_prompts(kind: str, size: int, tree: str, graph: bool, tmp_path: Path) -> None:
    """Prefill chunks shorter than prompts, small pages, accepted paths of all lengths."""
    files = write(kind, tmp_path, target())
    options = {"tree": TREES[tree], "graph": graph, "max_batch_size": size, "prefill_chunk": 16}
    with patched(target(), files, seer(0.8), **options) as handle:
        done = sk.generate_batch(target(), prompts(), max_new_tokens=NEW, eos_token_ids=[])
        assert [completion.tokens for completion in done] == new_tokens(NEW)
        assert handle.stats.tokens_per_step > (1.6 if tree == "2" else 2.5)
        assert all(handle.stats.accepted_at_depth[: 1 if tree == "2" else 4])
        assert (handle.stats.graph_steps > 0) == graph


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), covering(NAMES, TREES, first=[("eagle", "8")]))
def test_recorded_steps_of_a_batch(kind: str, tree: str, tmp_path: Path) -> None:
    """Eight rows at once in recorded steps, by ``generate``; rows end at different lengths."""
    files, rows = write(kind, tmp_path, target()), range(20, 28)
    inputs = padded([prompts()[i] for i in rows])
    expected = greedy(target(), inputs, 2 * NEW)
    assert expected[:, -2 * NEW :].tolist() == new_tokens(2 * NEW, rows)
    with patched(target(), files, seer(0.5), tree=TREES[tree], graph=True) as handle:
        for _ in range(2):
            assert torch.equal(greedy(target(), inputs, 2 * NEW), expected)
        steps = handle._pools.steps
        assert steps is not None
        assert max(cached.runs for cached in steps._steps.values() if cached.replay is not None) > 9
        assert handle.stats.tokens_per_step > 1.3


SAMPLED = [sk.Sampling(), sk.Sampling(temperature=0.7, top_k=20, top_p=0.9)]


CASES_SAMPLED = covering(NAMES, TREES, (1, 8), (0, 1), first=[("eagle3", "8", 8, 1)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree", "size", "sampling"), CASES_SAMPLED)
def test_sampled_tokens_of_sixty_prompts(kind: str, tree: str, size: int, sampling: int, tmp_path: Path) -> None:
    """With the same seeds, the tokens of steps without drafts."""
    requests, expected = seeded(sampling), sampled(sampling)
    rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), expected, strict=True)]
    files = write(kind, tmp_path, target())
    options = {"tree": TREES[tree], "max_batch_size": size, "prefill_chunk": 16}
    with patched(target(), files, Seer(target(), rows, 0.8), **options) as handle:
        found = [completion.tokens for completion in sk.generate_batch(target(), requests)]
        assert handle.stats.tokens_per_step > 1.5
    assert found == expected


def seeded(sampling: int) -> list[sk.Request]:
    return [sk.Request(p, NEW, [], SAMPLED[sampling].with_seed(i)) for i, p in enumerate(prompts())]


@cache
def sampled(sampling: int) -> list[list[int]]:
    """Sampled tokens of the 60 prompts by steps without drafts."""
    with sk.patch(target(), "prompt-lookup", tree=1):
        return [completion.tokens for completion in sk.generate_batch(target(), seeded(sampling))]


@pytest.mark.parametrize("kind", sample(NAMES, ["dflash"]))
def test_one_row_samples_what_transformers_samples(kind: str, tmp_path: Path) -> None:
    """The same seed: the unpatched model's tokens, also in the next call; processors before sampling too."""
    inputs, files = padded([prompts()[20]]), write(kind, tmp_path, target())
    for options in ({}, {"temperature": 0.7, "top_k": 9}, {"repetition_penalty": 1.3, "top_p": 0.8}):

        def two(options: dict[str, Any] = options) -> list[Tensor]:
            torch.manual_seed(5)
            return [target().generate(**inputs, max_new_tokens=NEW, do_sample=True, **options) for _ in range(2)]

        expected = two()
        with patched(target(), files, Seer(target(), [expected[0][0].tolist()], 0.8)) as handle:
            found = two()
            assert handle.stats.tokens_per_step > 1.2
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Until(StoppingCriteria):
    """Stops where the tokens sum to a multiple of 7; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        self.calls += 1
        return input_ids.sum(dim=1) % 7 == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_ends_inside_of_accepted_paths(kind: str, tmp_path: Path) -> None:
    """EOS, lengths, stop functions and criteria at every place of a path; processors."""
    files, rows = write(kind, tmp_path, target()), (20, 31, 40)
    inputs = padded([prompts()[i] for i in rows])
    start, free = inputs["input_ids"].shape[1], greedy(target(), inputs, NEW)
    calls: list[dict[str, Any]] = [
        {"eos_token_id": [int(free[0, start + i]), int(free[1, start + i + 1])], "pad_token_id": 0} for i in range(1, 9)
    ]
    calls += [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": list(range(10, 50))}]
    expected = [greedy(target(), inputs, NEW, **call) for call in calls]
    lengths = [greedy(target(), inputs, new) for new in range(1, 9)]
    one, plain_until = padded([prompts()[20]]), Until()
    stopped = greedy(target(), one, NEW, stopping_criteria=StoppingCriteriaList([plain_until]))
    known = [*answers(), *(row for output in expected[-3:] for row in texts_of(inputs, output))]
    with patched(target(), files, Seer(target(), known, 0.9)) as handle:
        for call, output in zip(calls, expected, strict=True):
            assert torch.equal(greedy(target(), inputs, NEW, **call), output), call
        for new, output in enumerate(lengths, start=1):
            assert torch.equal(greedy(target(), inputs, new), output)
        until = Until()
        assert torch.equal(greedy(target(), one, NEW, stopping_criteria=StoppingCriteriaList([until])), stopped)
        assert until.calls == plain_until.calls
        stop = [
            sk.Request(prompts()[i], NEW, [], stop=lambda tokens, i=i: len(tokens) == len(prompts()[i]) + i % 9 + 1)
            for i in range(30)
        ]
        done = sk.generate_batch(target(), stop)
        assert [c.tokens for c in done] == [tokens[: i % 9 + 1] for i, tokens in enumerate(new_tokens(NEW))][:30]
        assert handle.stats.tokens_per_step > 2


# ---- pages: aborts, preemption, host copies, growth, reused prefixes


def few_pages(handle: sk.SpecMemo, pages: int) -> None:
    """At most ``pages`` pages, as from a budget."""
    handle.plan = handle._pools.plan = replace(handle.plan, max_pages=pages)


def check_drafts(
    files: Files,
    handle: sk.SpecMemo,
    recorded: Sequence[Any],
    texts: Sequence[list[int]],
    count: int = 16 if EXHAUSTIVE else 8,
) -> None:
    """``count`` of the drafter's own trees are those of the plain implementation, so its keys and values in pages are
    right.
    """
    trees = [
        (length, root, tree, drafted.tokens[row].tolist(), drafted.parents[row].tolist())
        for rows, tree, drafted in recorded
        for row, (length, root) in enumerate(zip(rows.seq_lens.tolist(), rows.roots.tolist(), strict=True))
        if tree.max_depth
    ]
    assert len(trees) >= count
    features = cache(lambda i: features_of(target(), handle.drafter.feature_ids, texts[i]))
    for length, root, tree, tokens, parents in trees[:: len(trees) // count]:
        matching = [i for i, text in enumerate(texts) if length < len(text) and text[length] == root]
        expected = (expected_tree(files.plain, features(i)[:length], texts[i][1 : length + 1], tree) for i in matching)
        assert set(token_paths(tokens, parents)) in expected, (length, root, tree)


@pytest.mark.parametrize(("kind", "graph"), sample(GRAPHS, [("clover2", False)]))
def test_aborts(kind: str, graph: bool, tmp_path: Path) -> None:
    """At random steps, in every state of a request; the pages of aborted requests are reused."""
    rng, files = random.Random(graph), write(kind, tmp_path, target())
    expected, aborted = new_tokens(2 * NEW), set()
    with patched(target(), files, seer(0.6), max_batch_size=4, graph=graph, prefill_chunk=8) as handle:
        for _ in range(2):
            with sk.stream_batch(target(), prompts()[:24], max_new_tokens=2 * NEW, eos_token_ids=[]) as run:
                for piece in run:
                    if rng.random() < 0.15:
                        run.abort(index := rng.choice([piece.index, rng.randrange(24)]))
                        aborted.add(index)
                done = run.completions()
            for i, completion in enumerate(done):
                assert completion.tokens == expected[i][: len(completion.tokens)]
                assert completion.finish_reason == ("length" if len(completion.tokens) == 2 * NEW else "aborted")
                assert completion.finish_reason == "length" or i in aborted
            assert 2 < sum(completion.finish_reason == "aborted" for completion in done) < 22
        assert handle.stats.tokens_per_step > 1.5


FIRST_PREEMPTED = [("clover2", False, True), ("eagle3", True, False)]


@pytest.mark.parametrize(
    ("kind", "graph", "swap"),
    sample(covering(NAMES, (False, True), (False, True), first=FIRST_PREEMPTED), [("eagle3", True, False)]),
)
def test_preemption(kind: str, graph: bool, swap: bool, tmp_path: Path) -> None:
    """Pages for a few sequences only. Trees after a preemption are those of a drafter that saw the whole text."""
    files, rows = write(kind, tmp_path, target()), range(12, 22)
    texts = [[*prompts()[i], *tokens] for i, tokens in zip(rows, new_tokens(2 * NEW, rows), strict=True)]
    recorded: list[Any] = []
    marks: list[int] = []
    with patched(
        target(), files, seer(0.4), None if graph else recorded, max_batch_size=6, graph=graph, prefill_chunk=16
    ) as handle:
        few_pages(handle, 40)
        handle.memory_pressure.swap = swap
        with pytest.MonkeyPatch.context() as patch:
            preempt = Scheduler._preempt

            def marked(scheduler: Scheduler, sequence: SequenceState) -> None:
                preempt(scheduler, sequence)
                marks.append(len(recorded))

            patch.setattr(Scheduler, "_preempt", marked)
            done = sk.generate_batch(target(), [prompts()[i] for i in rows], max_new_tokens=2 * NEW, eos_token_ids=[])
        assert [c.tokens for c in done] == new_tokens(2 * NEW, rows)
        assert handle.stats.preemptions > 2
        assert (handle.stats.swaps > 2) == swap
        assert (handle.stats.recomputed_tokens > 0) == (not swap)
        assert handle.stats.tokens_per_step > 1.2
        if not graph:
            check_drafts(files, handle, recorded[marks[len(marks) // 2] :], texts)


@pytest.mark.parametrize("kind", sample(NAMES, ["dflash"]))
def test_pool_growth(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are added while sequences run, within a call and for a longer one."""
    monkeypatch.setattr("specmemo_kernels.engine.page_demand.FIRST_TOKENS", 4)
    files, rows, recorded, sizes = write(kind, tmp_path, target()), range(12, 16), [], set()
    texts = [[*prompts()[i], *tokens] for i, tokens in zip(rows, new_tokens(2 * NEW, rows), strict=True)]
    with patched(target(), files, seer(0.4), recorded, graph=False) as handle:
        requests = [prompts()[i] for i in rows]
        sk.generate_batch(target(), requests[:2], max_new_tokens=4, eos_token_ids=[])
        with sk.stream_batch(target(), requests, max_new_tokens=2 * NEW, eos_token_ids=[]) as run:
            for _ in run:
                assert handle.pool is not None
                sizes.add(handle.pool.num_pages)
            assert [c.tokens for c in run.completions()] == new_tokens(2 * NEW, rows)
        assert len(sizes) > 1
        assert handle.stats.tokens_per_step > 1.2
        check_drafts(files, handle, recorded[len(recorded) // 2 :], texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_a_conversation(kind: str, tmp_path: Path) -> None:
    """Each prompt is the last text with new tokens; drafts in reused pages and in copies of them are right."""
    files = write(kind, tmp_path, target())
    rng, prompt, turns = random.Random(1), [5, 9, 3, 4, 5], []
    for turn in range(5):
        answer = texts(target(), [prompt], NEW)[0]
        turns.append((prompt, answer))
        prompt = [*answer[: len(answer) - (turn % 3)], *(rng.randrange(VOCAB) for _ in range(1 + 3 * turn))]
    recorded: list[Any] = []
    seer = Seer(target(), [answer for _, answer in turns], 0.5)
    with patched(target(), files, seer, recorded, graph=False) as handle:
        known = 0
        for prompt, answer in turns:
            recorded.clear()
            handle.stats.reset()
            assert greedy(target(), padded([prompt]), NEW)[0].tolist() == answer
            assert handle.stats.reused_tokens >= known - 4
            check_drafts(files, handle, recorded[:4], [answer], 4)
            known = len(prompt) + NEW - 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "graph"), GRAPHS)
def test_prefixes_of_sequences_in_flight(kind: str, graph: bool, tmp_path: Path) -> None:
    """Sequences with a common beginning share pages while they run, diverge inside and at the ends of pages, and end
    inside of accepted paths; then their texts are continued.
    """
    files, base = write(kind, tmp_path, target()), [3 + i % 50 for i in range(22)]
    requests = [base[: 10 + i] + [60 - i, 7, i][: i % 4] for i in range(12)]
    texts_ = texts(target(), requests, NEW)
    longer = [text[: len(text) - i % 5] + [1, 2][: i % 3] for i, text in enumerate(texts_)]
    texts_ += texts(target(), longer, NEW)
    recorded: list[Any] = []
    with patched(
        target(), files, Seer(target(), texts_, 0.5), None if graph else recorded, max_batch_size=4, graph=graph
    ) as handle:
        sk.generate_batch(target(), [base], max_new_tokens=4, eos_token_ids=[])
        for prompts_, expected in ((requests, texts_[:12]), (longer, texts_[12:])):
            handle.stats.reset()
            recorded.clear()
            done = sk.generate_batch(target(), prompts_, max_new_tokens=NEW, eos_token_ids=[])
            assert [p + c.tokens for p, c in zip(prompts_, done, strict=True)] == expected
            assert handle.stats.reused_tokens > sum(map(len, prompts_)) // 3
            assert handle.stats.tokens_per_step > 1.2
            if not graph:
                check_drafts(files, handle, recorded, texts_)


# ---- memory


WIDE = {"hidden": 128, "intermediate": 320, "head_dim": 32}


def wide(kind: str, folder: Path, **options: Any) -> tuple[PreTrainedModel, str]:
    model = wide_model("llama", seed=20, num_hidden_layers=LAYERS)
    writer, _, defaults = KINDS[NAMES[kind]]
    writer(folder, vocab=VOCAB, **(defaults | WIDE | options))
    return model, str(folder)


#: Sequences, rows of a chunk, MiB of the budget, whether steps are recorded.
MEMORY = ((1, 256, 4, True), (2, 32, 2, False), (4, 16, 6, True), (8, 64, 8, False))
EVERYDAY_MEMORY = [("dflash", "static", MEMORY[0])]


@pytest.mark.parametrize(
    ("kind", "tree", "sizes"), sample(covering(NAMES, TREES, MEMORY, first=EVERYDAY_MEMORY), EVERYDAY_MEMORY), ids=str
)
def test_peak_stays_within_the_budget(kind: str, tree: str, sizes: tuple[int, int, int, bool], tmp_path: Path) -> None:
    """Peak bytes of live tensors and the drafter's weights, prompts longer than a chunk; the plan isn't wasteful."""
    model, folder = wide(kind, tmp_path)
    sequences, chunk, budget, graph = sizes
    options = {"tree": TREES[tree], "max_batch_size": sequences, "prefill_chunk": chunk, "graph": graph}
    weights = load_file(f"{folder}/model.safetensors").values()
    total = with_workspace(model, budget << 20) + sum(tensor.nbytes for tensor in weights)
    with sk.patch(model, folder, memory_budget=total, **options) as handle:
        plan = handle.plan
        assert plan.budget is not None
        assert plan.max_tokens is not None
        assert plan.total_bytes <= plan.budget
        longest = min(plan.max_tokens * 3 // 4, 600) - 40
        assert longest >= plan.prefill_chunk
        inputs = batch((longest, longest // 2, *[7 + i for i in range(plan.max_sequences)])[: plan.max_sequences + 1])
        peak = peak_of(handle, inputs, 30)
        held = handle.stats.bytes_by_part
        used = peak - held["kv_pages"] - held["tree_scratch"] - held["graphs"]
        planned = plan.parts["activations"] + plan.parts["metadata"]
        assert held["heads"] == plan.parts["heads"]
        assert held["kv_pages"] <= plan.parts["kv_pages"]
        assert held["tree_scratch"] <= plan.parts["tree_scratch"]
        assert held["graphs"] <= (plan.parts["graphs"] if graph else 0)
        assert peak + handle.drafter.nbytes <= plan.total_bytes
        assert used <= planned
        if plan.max_tokens <= 800:  # else the prompt is shorter than what is planned for
            assert planned <= 2.2 * used


STEPS = ((1, 256), (4, 16), (8, 64))
FIRST_STEPS = [("dflash", "8", STEPS[1]), ("dflash", "24", STEPS[0])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree", "sizes"), covering(NAMES, TREES, STEPS, first=FIRST_STEPS), ids=str)
def test_activations_are_predicted(kind: str, tree: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Bytes of a step besides weights, pages and scratch, where little else is allocated."""
    sequences, chunk = sizes
    model, folder = wide(kind, tmp_path)
    with sk.patch(
        model, folder, tree=TREES[tree], max_batch_size=sequences, prefill_chunk=chunk, graph=False
    ) as handle:
        lengths = (chunk - 7 * (sequences - 1), *[7] * (sequences - 1)) if chunk > 7 * sequences else (4,) * sequences
        peak = peak_of(handle, batch(lengths), 30)
        used = peak - sum(handle.bytes_by_part.values()) + handle.drafter.nbytes
        planned = handle.plan.parts["activations"] + handle.plan.parts["metadata"]
        assert used <= planned <= 2 * used


EVERYDAY_VOCABULARY = [("eagle", "gemma2", True)]


@pytest.mark.parametrize(
    ("kind", "family", "do_sample"),
    sample(covering(NAMES, ("llama", "gemma2"), (False, True), first=EVERYDAY_VOCABULARY), EVERYDAY_VOCABULARY),
)
def test_a_large_vocabulary(kind: str, family: str, do_sample: bool, tmp_path: Path) -> None:
    """Logits of drafted nodes, and with sampling of the target's rows: none of prompts."""
    vocab, chunk = 3000, 64
    model = wide_model(family, seed=20, num_hidden_layers=LAYERS, vocab_size=vocab)
    writer, _, defaults = KINDS[NAMES[kind]]
    writer(tmp_path, **(defaults | WIDE | {"vocab": vocab}))
    with sk.patch(model, str(tmp_path), tree=8, max_batch_size=2, prefill_chunk=chunk, graph=False) as handle:
        inputs, options = batch((chunk - 7, 7)), {"do_sample": do_sample, "top_k": 0}
        model.generate(**inputs, max_new_tokens=2, **options)
        handle.release()
        with MemoryTracker() as tracker:
            model.generate(**inputs, max_new_tokens=12, **options)
        used = tracker.peak - sum(handle.bytes_by_part.values()) + handle.drafter.nbytes
        planned = handle.plan.parts["activations"] + handle.plan.parts["metadata"]
        assert used <= planned


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_bytes_by_part(kind: str, tmp_path: Path) -> None:
    """They are those of the tensors; the least budget is accepted and kept, less is refused with numbers."""
    model, folder = wide(kind, tmp_path)
    with sk.patch(
        model, folder, tree=8, page_size=4, graph=False, kv_dtype="int8" if kind == "eagle" else None
    ) as handle:
        greedy(model, batch((20, 9)), 8)
        pool, held, drafter = handle.pool, handle.bytes_by_part, handle.drafter
        assert pool is not None
        assert held["kv_pages"] == sum(tensor.nbytes for group in pool.groups for tensor in group.stored)
        assert held["tree_scratch"] == sum(
            x.nbytes for group in pool.groups for x in (group.k_scratch, group.v_scratch)
        )
        own = {t.data_ptr(): t.nbytes for t in drafter.tensors.values()}
        assert held["heads"] == drafter.nbytes == sum(own.values()) == handle.plan.parts["heads"]
        assert len(pool.layers) == LAYERS + len(drafter.layers)
    with pytest.raises(sk.BudgetError) as refusal:
        sk.patch(model, folder, memory_budget=1000, tree=8)
    least = re.search(r"1000 B is too small for one page of 16 tokens .*give at least ([\d.]+ \w+)", str(refusal.value))
    assert least is not None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with sk.patch(model, folder, memory_budget=least[1], tree=8) as handle:
        plan = handle.plan
        assert plan.max_tokens is not None
        inputs = batch((plan.max_tokens - handle.slots_ahead - 4, 3, 5))
        assert peak_of(handle, inputs, 4) + handle.drafter.nbytes <= plan.total_bytes


# ---- failing allocations


SAMPLED_TREES: dict[str, dict[str, Any]] = {
    "8": {}, "static": {}, "24": {"do_sample": True, "top_k": 9, "repetition_penalty": 1.3},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), covering(NAMES, SAMPLED_TREES))
def test_every_failing_allocation_is_retried(
    kind: str, tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every site of every step of ``generate``, prompts beside trees: the tokens are right, no page is lost.

    A third of the sites per case: those of a drafter are in its three cases, those of a tree in three drafters' cases.
    """
    options, part = SAMPLED_TREES[tree], [*NAMES].index(kind) + [*SAMPLED_TREES].index(tree)
    files, rows = write(kind, tmp_path, target()), (20, 31) if not options else (20,)
    inputs, new = padded([prompts()[i] for i in rows]), 10

    def generated() -> Tensor:
        torch.manual_seed(5)
        return target().generate(**inputs, max_new_tokens=new, **({"do_sample": False} | options))

    expected = generated()
    with patched(
        target(), files, Seer(target(), texts_of(inputs, expected), 0.8), tree=TREES[tree], prefill_chunk=8, graph=False
    ) as handle:
        assert torch.equal(generated(), expected)
        handle.release()
        handle.memory_pressure.levels = handle.memory_pressure.levels[:1] * 3000
        with failing_everywhere(monkeypatch, parts=3, part=part % 3) as mode:
            assert torch.equal(generated(), expected)
        assert handle.stats.retries == mode.failures > 50
        assert handle.pool is not None
        empty(handle.pool)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "graph"), GRAPHS)
def test_failing_allocations_degrade(kind: str, graph: bool, tmp_path: Path) -> None:
    """One to four failures at places all over two calls, of which steps, recordings and everything around them; each
    case has other places.
    """
    places, shift = 8 if EXHAUSTIVE else 4, GRAPHS.index((kind, graph)) / len(GRAPHS)
    files, rows = write(kind, tmp_path, target()), (20, 31, 40)
    inputs, outcomes = padded([prompts()[i] for i in rows]), Counter[bool]()
    expected = greedy(target(), inputs, 2 * NEW)
    options = {"tree": 8, "page_size": 4, "prefill_chunk": 16, "graph": graph}
    for part in range(places):
        with patched(target(), files, seer(0.5), **options) as handle:
            counting = FailingAllocations(lambda site: False)
            if not part:
                with counting:
                    greedy(target(), inputs, 2 * NEW)
                sites = counting.site
                handle.release()
            first = int((part + shift) * sites / places)
            try:
                with FailingAllocations(
                    lambda now, first=first, part=part: first <= now < first + 1 + part % 4
                ) as mode:  # type: ignore[misc]
                    found = greedy(target(), inputs, 2 * NEW)
                assert torch.equal(found, expected)
                assert mode.failures == handle.stats.shrinks > 0
                outcomes[True] += 1
            except torch.OutOfMemoryError:
                outcomes[False] += 1
            if handle.pool is not None:
                empty(handle.pool)
            assert torch.equal(greedy(target(), inputs, 2 * NEW), expected)
    assert outcomes[True] > places // 2


# ---- patching and unpatching


def hooks(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_unpatched_and_copied(kind: str, tmp_path: Path) -> None:
    """Nothing is left on the model, its copies and its checkpoint; after errors too."""
    model, files = (
        tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048),
        write(kind, tmp_path / "a", target()),
    )
    inputs, before = padded([prompts()[20]]), snapshot(model)
    expected = greedy(model, inputs, NEW)
    with sk.patch(model, files.folder, tree=8) as handle:
        assert torch.equal(greedy(model, inputs, NEW), expected)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not hooks(twin)
            assert torch.equal(greedy(twin, inputs, NEW), expected)
            with sk.patch(twin, files.folder, tree=8):
                assert torch.equal(greedy(twin, inputs, NEW), expected)
            assert not hooks(twin)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(model(**inputs).logits, target()(**inputs).logits)
        assert handle.stats.steps > 0
    assert snapshot(model) == before
    assert not hooks(model)
    assert torch.equal(greedy(model, inputs, NEW), expected)
    again = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(greedy(again, inputs, NEW), expected)
    with pytest.raises(ValueError, match="deep"):
        sk.patch(model, files.folder, tree=sk.DraftTree.chain(30))
    assert snapshot(model) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [("eagle", "model"), ("eagle3", None), ("clover2", "lm_head"), ("dflash", None), ("eagle3", "lm_head")],
)
def test_two_models_with_one_drafter(kind: str, part: str | None, tmp_path: Path) -> None:
    """Patched from the same folder, in turn and in threads, with a module in common, and unpatched one by one."""
    changes: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
    pair = [tiny_model("llama", seed=seed, **changes) for seed in (31, 32)]
    if part is not None:
        setattr(pair[1], part, getattr(pair[0], part))
    files, before = write(kind, tmp_path, pair[0]), [snapshot(model) for model in pair]
    expected = {model: greedy(model, batch((9, 5)), 15) for model in pair}
    handles = [sk.patch(model, files.folder, tree=8) for model in pair]
    same_tokens(expected)
    same_tokens(expected, threads=True)
    sk.unpatch(pair[0])
    same_tokens(expected)
    assert handles[1].stats.steps > 0
    sk.unpatch(pair[1])
    assert [snapshot(model) for model in pair] == before
    assert not hooks(pair[0]) + hooks(pair[1])


@pytest.mark.parametrize("kind", sample(NAMES, ["clover2"]))
def test_foreign_hooks_and_changes(kind: str, tmp_path: Path) -> None:
    """A user's hook on a layer, or a replaced lm_head, makes calls fall back; speculation returns without it."""
    model, files = (
        tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048),
        write(kind, tmp_path, target()),
    )
    inputs = padded([prompts()[20], prompts()[31]])
    expected = greedy(model, inputs, NEW)
    with patched(model, files, seer(0.8)) as handle:
        layer = model.model.layers[2]
        hook = layer.register_forward_hook(lambda *_: None)
        with falls_back("hook on model.layers.2"):
            assert torch.equal(greedy(model, inputs, NEW), expected)
        assert handle.stats.steps == 0
        hook.remove()
        assert torch.equal(greedy(model, inputs, NEW), expected)
        assert handle.stats.tokens_per_step > 1.5
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
            model.model.embed_tokens.weight.mul_(0.9)
        changed = greedy(model, inputs, NEW)
    assert torch.equal(changed, greedy(model, inputs, NEW))
    assert not torch.equal(changed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), covering(NAMES, TREES, first=[("dflash", "8")]))
def test_other_numbers(kind: str, tree: str, tmp_path: Path) -> None:
    """Models in bfloat16, pages in int8, invariant rows."""
    model = tiny_model("llama", seed=4, num_hidden_layers=LAYERS, max_position_embeddings=2048).to(torch.bfloat16)
    files = write(kind, tmp_path, model)
    requests = [prompts()[i] for i in (20, 31, 40, 5)]

    def written(heads: Any, **options: Any) -> list[list[int]]:
        with sk.patch(model, heads, page_size=4, prefill_chunk=16, **options) as handle:
            done = sk.generate_batch(model, requests, max_new_tokens=NEW, eos_token_ids=[])
            assert handle.stats.steps > 0
        return [completion.tokens for completion in done]

    without = written("prompt-lookup", tree=1, invariant=True)
    for options in ({}, {"max_batch_size": 2, "graph": False}):
        assert written(files.folder, tree=TREES[tree], invariant=True, **options) == without
    assert all(len(tokens) == NEW for tokens in written(files.folder, tree=TREES[tree]))
    int8 = [
        written(heads, tree=t, kv_dtype="int8", max_batch_size=4)
        for heads, t in ((files.folder, TREES[tree]), ("prompt-lookup", 1))
    ]
    assert all(len(tokens) == NEW for tokens in int8[0] + int8[1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kv_dtype"), covering(NAMES, ("int8", "fp8"), first=[("clover2", "int8")]))
def test_quantised_pages(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    """The cpu backend's tokens are the reference's with the same trees, in recorded steps too."""
    files, rows = write(kind, tmp_path, target()), range(24, 28)
    found = []
    for options in ({"backend": "reference"}, {"backend": "cpu"}, {"backend": "cpu", "graph": True}):
        with patched(target(), files, seer(0.7), kv_dtype=kv_dtype, **options) as handle:
            done = sk.generate_batch(target(), [prompts()[i] for i in rows], max_new_tokens=NEW, eos_token_ids=[])
            found.append([completion.tokens for completion in done])
            assert handle.stats.tokens_per_step > 1.2
            assert handle.pool is not None
            assert {pages.dtype for pages in handle.pool.k_pages} == {KV_DTYPES[kv_dtype]}
    assert found[0] == found[1] == found[2]


# ---- families


FEATURES = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids": [0, 2, LAYERS - 1]},
    "eagle": {},
    "clover2": {},
    "dflash": {"target_layer_ids": (0, 4)},
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "smollm3": {"no_rope_layers": [1, 0] * 3},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
}


FIRST_FAMILIES = [("gemma2", "eagle3"), ("deepseek_v3", "dflash")]


@pytest.mark.parametrize(
    ("family", "kind"), sample(covering(FAMILIES, NAMES, first=FIRST_FAMILIES), [("gemma2", "eagle3")])
)
def test_families(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are the model's own; the features of every pass are the unpatched model's hidden states."""
    model = tiny_model(family, num_hidden_layers=LAYERS, **OF_FAMILY.get(family, {}))
    writer, _, defaults = KINDS[NAMES[kind]]
    writer(tmp_path, vocab=VOCAB, **(defaults | FEATURES[kind]))
    inputs = batch((40, 1, 17))
    expected = greedy(model, inputs, NEW)
    rows = texts_of(inputs, expected)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    with sk.patch(model, str(tmp_path), tree=8, page_size=4, prefill_chunk=16) as handle:
        drafter: Any = handle.drafter
        advance = drafter.advance

        def advancing(batch: TreeBatch, features: Tensor, keep: Tensor, pool: PagedKVPool) -> Tensor:
            seen.append((batch.tokens.clone(), batch.positions.clone(), features.clone()))
            return advance(batch, features, keep, pool)

        monkeypatch.setattr(drafter, "advance", advancing, raising=False)
        handle._pools.graphs = replace(handle.graphs, wanted=False)
        assert torch.equal(greedy(model, inputs, NEW), expected)
        monkeypatch.undo()
        handle._pools.graphs = replace(handle.graphs, wanted=True)
        assert torch.equal(greedy(model, inputs, NEW), expected)
        ids = drafter.feature_ids
    own = [captured(model, ids, row) for row in rows]
    compared = 0
    for tokens, positions, features in seen:
        for token, position, feature in zip(tokens.tolist(), positions.tolist(), features, strict=True):
            near = [
                own[i][position] for i, row in enumerate(rows) if position + 1 < len(row) and row[position + 1] == token
            ]
            if near:
                distance = min(float((feature - other).norm() / other.norm()) for other in near)
                compared += distance < 1e-4
    assert compared >= sum(map(len, rows)) - 2 * len(rows), "features of prompts and accepted tokens"


def captured(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """:func:`features_of` by hooks of our own on the layers, which ``output_hidden_states`` confirms."""
    found: dict[int, Tensor] = {}
    stack = model.model.layers
    handles = [
        layer.register_forward_hook(
            lambda _, __, out, i=i: found.setdefault(i + 1, out[0] if isinstance(out, tuple) else out)
        )
        for i, layer in enumerate(stack)
    ]
    with torch.no_grad():
        states = model.model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    by_id = {i: found[i] if i == LAYERS else state for i, state in enumerate(states)} | {-1: states[-1]}
    return torch.cat([by_id[i].view(-1, by_id[i].shape[-1]) for i in ids], dim=1)
