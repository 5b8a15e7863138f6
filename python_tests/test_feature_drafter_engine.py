"""Drafters that read hidden states, through the whole engine: every token is the model's own, in batches, recorded
steps, few pages, reused prefixes, failing allocations and budgets; pages keep the drafter's own keys and values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_oracles import PlainDrafter
from selection import sample
from test_families import greedy
from test_feature_drafters import KINDS, LAYERS, Recorder
from tiny_models import VOCAB, tiny_model
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specmemo_kernels as sk
from specmemo_kernels.drafting.base import DraftRows
from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import DraftedTrees
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor
NAMES = {"eagle3": "eagle3, reduced vocabulary", "eagle": "eagle", "clover2": "clover2", "dflash": "dflash"}
#: Logits are multiplied by it, so that dynamic trees of random drafters get deep.
SHARP = 6.0
NEW = 16
TREE = [[0], [0, 1], [2], [0, 0], [2, 0], [0, 1, 2], [1], [0, 0, 0], [2, 0, 0], [2, 0, 0, 1]]
each_kind = pytest.mark.parametrize("kind", NAMES)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return target()


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
        self.share, self.layer = share, model.config.num_hidden_layers - 1
        keys, futures = [], []
        for answer in answers:
            row = torch.tensor([list(answer)])
            with torch.no_grad():
                cache = model(row, use_cache=True).past_key_values
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
    drafter.vocabulary = replace(drafter.vocabulary, top_log_probs=lambda x, k, scale=1.0: before(x, k, SHARP * scale))


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
CASES = [(kind, size, tree, graph) for kind in NAMES for size in (1, 8) for tree in TREES for graph in (False, True)]
EVERYDAY = [
    ("eagle3", 8, "8", False),
    ("eagle", 1, "24", True),
    ("clover2", 8, "static", True),
    ("dflash", 1, "8", True),
]


def new_tokens(count: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """The first ``count`` tokens of the answers (of ``rows``)."""
    pairs = list(zip(prompts(), answers(), strict=True))
    return [pairs[i][1][len(pairs[i][0]) :][:count] for i in (range(len(pairs)) if rows is None else rows)]


@pytest.mark.parametrize(("kind", "size", "tree", "graph"), sample(CASES, EVERYDAY))
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


@pytest.mark.parametrize("tree", sample(TREES, ["8"]))
@each_kind
def test_recorded_steps_of_a_batch(kind: str, tree: str, tmp_path: Path) -> None:
    """Eight rows at once in recorded steps, by ``generate``; rows end at different lengths."""
    files, rows = write(kind, tmp_path, target()), range(20, 28)
    inputs = padded([prompts()[i] for i in rows])
    expected = greedy(target(), inputs, 2 * NEW)
    assert expected[:, -2 * NEW :].tolist() == new_tokens(2 * NEW, rows)
    with patched(target(), files, seer(0.5), tree=TREES[tree], graph=True) as handle:
        for _ in range(2):
            assert torch.equal(greedy(target(), inputs, 2 * NEW), expected)
        steps = handle.graphs._steps
        assert steps is not None
        assert max(cached.runs for cached in steps._steps.values() if cached.replay is not None) > 9
        assert handle.stats.tokens_per_step > 1.3


SAMPLED = [sk.Sampling(), sk.Sampling(temperature=0.7, top_k=20, top_p=0.9)]


@pytest.mark.parametrize(("size", "sampling"), sample([(1, 1), (8, 0), (8, 1)], [(8, 1)]))
@pytest.mark.parametrize("tree", sample(TREES, ["8"]))
@each_kind
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


@each_kind
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


@each_kind
def test_ends_inside_of_accepted_paths(kind: str, tmp_path: Path) -> None:
    """EOS, lengths, stop functions and criteria at every place of a path; processors."""
    files, rows = write(kind, tmp_path, target()), (20, 31, 40)
    inputs = padded([prompts()[i] for i in rows])
    start, free = inputs["input_ids"].shape[1], greedy(target(), inputs, NEW)
    calls: list[dict[str, Any]] = [{"eos_token_id": [int(free[0, start + i]), int(free[1, start + i + 1])], "pad_token_id": 0} for i in range(1, 9)]
    calls += [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": list(range(10, 50))}]
    expected = [greedy(target(), inputs, NEW, **call) for call in calls]
    lengths = [greedy(target(), inputs, new) for new in range(1, 9)]
    one, plain_until = padded([prompts()[20]]), Until()
    stopped = greedy(target(), one, NEW, stopping_criteria=StoppingCriteriaList([plain_until]))
    known = [*answers(), *(texts_of(inputs, output) for output in expected[-3:])]
    known = [row for part in known for row in (part if isinstance(part[0], list) else [part])]
    with patched(target(), files, Seer(target(), known, 0.9)) as handle:
        for call, output in zip(calls, expected, strict=True):
            assert torch.equal(greedy(target(), inputs, NEW, **call), output), call
        for new, output in enumerate(lengths, start=1):
            assert torch.equal(greedy(target(), inputs, new), output)
        until = Until()
        assert torch.equal(greedy(target(), one, NEW, stopping_criteria=StoppingCriteriaList([until])), stopped)
        assert until.calls == plain_until.calls
        stop = [sk.Request(prompts()[i], NEW, [], stop=lambda tokens, i=i: len(tokens) == len(prompts()[i]) + i % 9 + 1) for i in range(30)]
        done = sk.generate_batch(target(), stop)
        assert [c.tokens for c in done] == [tokens[: i % 9 + 1] for i, tokens in enumerate(new_tokens(NEW))][:30]
        assert handle.stats.tokens_per_step > 2


# ---- pages: aborts, preemption, host copies, growth, reused prefixes


def few_pages(handle: sk.SpecMemo, pages: int) -> None:
    """At most ``pages`` pages, as from a budget."""
    handle.plan = handle._pools.plan = replace(handle.plan, max_pages=pages)


def check_drafts(files: Files, handle: sk.SpecMemo, recorded: Sequence[Any], texts: Sequence[list[int]], least: int) -> None:
    """The drafter's own trees are those of the plain implementation: its keys and values in pages are right."""
    assert check_trees(target(), handle.drafter, files.plain, list(recorded), texts) >= least


@pytest.mark.parametrize("graph", [False, True])
@each_kind
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
        assert handle.stats.reused_tokens > 0


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("graph", sample([False, True], [False]))
@each_kind
def test_preemption(kind: str, graph: bool, swap: bool, tmp_path: Path) -> None:
    """Pages for a few sequences only. Trees after a preemption are those of a drafter that saw the whole text."""
    files, rows = write(kind, tmp_path, target()), range(12, 22)
    texts = [[*prompts()[i], *tokens] for i, tokens in zip(rows, new_tokens(2 * NEW, rows), strict=True)]
    recorded: list[Any] = []
    marks: list[int] = []
    with patched(target(), files, seer(0.4), None if graph else recorded, max_batch_size=6, graph=graph, prefill_chunk=16) as handle:
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
            check_drafts(files, handle, recorded[marks[len(marks) // 2] :], texts, 40)


@each_kind
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
        check_drafts(files, handle, recorded[len(recorded) // 2 :], texts, 40)


@each_kind
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
            check_drafts(files, handle, recorded[:5], [answer], 20)
            known = len(prompt) + NEW - 4


@pytest.mark.parametrize("graph", sample([False, True], [False]))
@each_kind
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
    with patched(target(), files, Seer(target(), texts_, 0.5), None if graph else recorded, max_batch_size=4, graph=graph) as handle:
        sk.generate_batch(target(), [base], max_new_tokens=4, eos_token_ids=[])
        for prompts_, expected in ((requests, texts_[:12]), (longer, texts_[12:])):
            handle.stats.reset()
            recorded.clear()
            done = sk.generate_batch(target(), prompts_, max_new_tokens=NEW, eos_token_ids=[])
            assert [p + c.tokens for p, c in zip(prompts_, done, strict=True)] == expected
            assert handle.stats.reused_tokens > sum(map(len, prompts_)) // 3
            assert handle.stats.tokens_per_step > 1.2
            if not graph:
                check_drafts(files, handle, recorded, texts_, 40)
