"""Sampling: the distributions are transformers', and trees of candidates don't change them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from test_decode import BUSHY, trees
from toy_model import PROMPTS, TARGET, VOCAB, ToyDrafter, decoder, plain, same_as_plain, start
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specmemo_kernels.engine.sampling import Sampling, TypicalAcceptance, draw
from specmemo_kernels.engine.scheduler import Scheduler, submit_all
from specmemo_kernels.engine.scores import token_score
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import SampledVerifier, Verdict
from specmemo_kernels.forward.batch import tree_batch
from specmemo_kernels.forward.target import LOGIT_ROWS, TargetOutput
from specmemo_kernels.planning.footprint import draw_bytes
from specmemo_kernels.planning.memory_tracker import MemoryTracker
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor


@settings(max_examples=examples(100), deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 0.7, 1.4]),
    data=st.data(),
)
def test_distribution_is_that_of_transformers(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, data: st.DataObject
) -> None:
    row, token = torch.tensor(logits), st.integers(0, len(logits) - 1)
    tokens = data.draw(st.lists(token, min_size=1, max_size=9))
    bias = data.draw(st.dictionaries(token, st.floats(-4, 4, width=32), max_size=3))
    ids, scores = torch.tensor([tokens]), row[None]
    if bias:
        scores = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    expected = scores.softmax(1)[0]
    sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=penalty, logit_bias=bias)
    torch.testing.assert_close(sampling.probabilities(row, tokens, 1), expected, rtol=1e-6, atol=0)
    assert row.tolist() == logits, "the logits were changed in place"
    greedy = Sampling(0, repetition_penalty=penalty, logit_bias=bias).probabilities(row, tokens, 1)
    best = RepetitionPenaltyLogitsProcessor(penalty)(ids, biased(row, bias)[None])[0]
    assert greedy.sum() == greedy[best.argmax()] == 1


def biased(row: Tensor, bias: dict[int, float]) -> Tensor:
    return row + torch.tensor([bias.get(token, 0.0) for token in range(len(row))])


@settings(max_examples=examples(100), deadline=None)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40),
    top_p=st.floats(1e-6, 1, exclude_max=True),
)
def test_top_p_of_equal_scores(logits: list[float], top_p: float) -> None:
    """The worst tokens, the first of equal ones, are left out as long as their sum is at most ``1 - top_p``."""
    row = torch.tensor([*logits, 1.0])
    left_out = torch.zeros(len(row), dtype=torch.bool)
    p = row.softmax(0).double()
    row.requires_grad_(bool(len(row) % 2))  # as without no_grad
    order = sorted(range(len(row)), key=lambda token: (float(row[token]), token))
    for count in range(1, len(order)):
        below = float(p[order[:count]].sum())
        if abs(below - (1 - top_p)) < 1e-6:
            return  # rounding decides
        left_out[order[count - 1]] = below < 1 - top_p
    assert torch.equal(Sampling(top_p=top_p).probabilities(row) == 0, left_out | row.isneginf())


def test_penalties_of_presence_and_frequency() -> None:
    """OpenAI's formula: ``logit - count * frequency - (count > 0) * presence``, over the answer only."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    expected = (logits - torch.tensor([0.0, 0.75, 0.0, 1.0])).softmax(0)  # once, never, never, twice
    torch.testing.assert_close(sampling.probabilities(logits, [2, 2, 1, 3, 3], 2), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"min_p": 0.1}, {"logit_bias": {1: 1.0}}], ids=str)
def test_typical_acceptance_stands_alone(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="typical acceptance has"):
        Sampling(typical=TypicalAcceptance(), **fields)


class TableTarget:
    """A target with a table of logits per row; a row's hidden state is its number."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab_size = table, table.shape[1]
        self.products: list[list[int]] = []  # the rows of each

    def argmax(self, output: TargetOutput) -> Tensor:
        return self.table.argmax(1)

    def row_logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        self.products.append(rows)
        return self.table[rows]


def verdict_of(
    target: TableTarget, tree: DraftTree, drafts: Sequence[Sequence[int]], states: Sequence[SequenceState]
) -> Verdict:
    """The verdict of one step."""
    rows = len(states)
    lengths, pages = torch.full((rows,), 4, dtype=torch.int32), torch.zeros(rows, 9).int()
    batch = tree_batch(tree, torch.tensor(drafts), lengths, pages, 4)
    output = TargetOutput(torch.arange(rows * tree.size)[:, None].float(), None)
    return SampledVerifier(target, "reference")(batch, states, output)


def verify(target: TableTarget, tree: DraftTree, drafts: Sequence[int], state: SequenceState) -> list[int]:
    """The tokens that one step over one sequence emits."""
    return verdict_of(target, tree, [drafts], [state]).emitted[0]


TREE = DraftTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
DRAFTS = [0, 3, 1, 4, 2, 0, 2]  # node 0 is the root; its children hold 3, 1, 4; theirs 2, 0 and 2
SEEDS = 6000


def critical(freedom: int) -> float:
    """The chi-square value exceeded once in 10,000 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; outcomes expected less than five times are merged."""
    total = sum(counts.values())
    large = {k: p * total for k, p in expected.items() if p * total >= 5}
    rest = total - sum(large.values())
    statistic = sum((counts[k] - n) ** 2 / n for k, n in large.items())
    seen = sum(n for k, n in counts.items() if k not in large)
    if rest > 0.5:
        return statistic + (seen - rest) ** 2 / rest, len(large)
    return (statistic if not seen else math.inf), len(large) - 1


def exact(table: Tensor, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each emitted row of tokens: a path of the tree up to a token that no child holds."""
    found: dict[tuple[int, ...], float] = {}

    def follow(node: int, chance: float, tokens: tuple[int, ...]) -> None:
        for token, p in enumerate(sampling.probabilities(table[node]).tolist()):
            child = [c for c, parent in enumerate(TREE.parents) if parent == node and DRAFTS[c] == token]
            if p and child:
                follow(child[0], chance * p, (*tokens, token))
            elif p:
                found[(*tokens, token)] = chance * p

    follow(0, 1.0, ())
    return found


SAMPLINGS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=3), Sampling(1.4, top_p=0.7), Sampling(1.2, 4, 0.9)]


@pytest.mark.parametrize("sampling", sample(SAMPLINGS, SAMPLINGS[-1:]), ids=str)
def test_tree_verification_is_lossless(sampling: Sampling) -> None:
    """Chi-square over many seeds: a step's tokens are distributed like tokens sampled one by one."""
    table = torch.randn(TREE.size, 6, generator=torch.Generator().manual_seed(1)) * 1.5
    states = (SequenceState([5], 9, sampling=sampling.with_seed(seed)) for seed in range(SEEDS))
    counts = Counter(tuple(verify(TableTarget(table), TREE, DRAFTS, state)) for state in states)
    statistic, freedom = chi_square(counts, exact(table, sampling))
    assert statistic < critical(freedom)
    assert max(map(len, counts)) == max(map(len, exact(table, sampling))) >= 2, "no draft was accepted"


def accept_and_renormalise(table: Tensor, generator: torch.Generator, forget: bool) -> list[int]:
    """The textbook's procedure, child by child; with ``forget``, rejected tokens may come again (which is wrong)."""
    sampling, node, tokens = Sampling(), 0, []
    while True:
        p = sampling.probabilities(table[node])
        for child in [c for c, parent in enumerate(TREE.parents) if parent == node]:
            if float(torch.rand((), generator=generator)) < float(p[DRAFTS[child]]):
                tokens.append(DRAFTS[child])
                node = child
                break
            if not forget:
                p = p.index_fill(0, torch.tensor([DRAFTS[child]]), 0.0)
                p = p / p.sum()
        else:
            return [*tokens, draw(p, generator)]


@pytest.mark.slow
@pytest.mark.parametrize("forget", [False, True])
def test_drawing_is_the_same_as_accepting_and_renormalising(forget: bool) -> None:
    """The usual procedure has the same distribution, and the test detects a wrong one."""
    table = torch.randn(TREE.size, 6, generator=torch.Generator().manual_seed(1)) * 1.5
    generator = torch.Generator().manual_seed(0)
    counts = Counter(tuple(accept_and_renormalise(table, generator, forget)) for _ in range(SEEDS))
    statistic, freedom = chi_square(counts, exact(table, Sampling()))
    assert (statistic > critical(freedom)) == forget


def sampled(prompt: Sequence[int], new: int, sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[int]:
    """New tokens of the toy model by ordinary sampling, one at a time."""
    tokens, generator = list(prompt), sampling.generator()
    for _ in range(new):
        tokens.append(draw(sampling.probabilities(TARGET.logits(tokens)), generator))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@settings(max_examples=examples(60), deadline=None)
@given(
    tree=trees(),
    drafter=st.sampled_from(ToyDrafter.KINDS),
    samplings=st.lists(st.sampled_from([None, *SAMPLINGS]), min_size=1, max_size=6),
    first_seed=st.integers(0, 2**40),
    eos=st.sampled_from([frozenset(), frozenset(range(0, VOCAB, 4))]),
    pages=st.integers(32, 60),
)
def test_a_seed_decides_alone(
    tree: DraftTree,
    drafter: str,
    samplings: list[Sampling | None],
    first_seed: int,
    eos: frozenset[int],
    pages: int,
) -> None:
    """Tokens are those of plain sampling with the seed, for any tree, drafter or batch; greedy rows stay greedy."""
    spec = decoder(tree, ToyDrafter(drafter, TARGET, greedy=False), num_pages=pages)
    spec.verifier = SampledVerifier(TARGET, "reference")
    states = [
        SequenceState(PROMPTS[i % 4], 15, eos, sampling=None if s is None else s.with_seed(first_seed + i))
        for i, s in enumerate(samplings)
    ]
    scheduler = Scheduler(spec, 4)
    submit_all(scheduler, states)
    scheduler.run()
    for state in states:
        if state.sampling is None:
            same_as_plain(state)
        else:
            assert state.new_tokens == sampled(state.prompt, 15, state.sampling, eos)


def test_drafts_are_accepted_when_sampling() -> None:
    """A drafter that guesses the most probable tokens saves steps, also at a temperature."""
    spec = decoder(BUSHY, ToyDrafter("right", TARGET, greedy=False))
    sampling = Sampling(temperature=0.3, seed=4)
    spec.verifier = SampledVerifier(TARGET, "reference")
    state = SequenceState(PROMPTS[0], 40, sampling=sampling)
    start(spec, [state])
    while spec.sequences:
        spec.step()
    assert state.new_tokens != plain(TARGET, state.prompt, 40)
    assert spec.stats.tokens_per_step > 1.3


def test_few_rows_of_logits_at_a_time() -> None:
    """The walk allocates no ``[nodes, vocabulary]`` tensor, and computes the rows of its path in whole products."""
    vocab, tree = 20_000, DraftTree.chain(63)
    table = torch.zeros(tree.size, vocab)
    drafts = list(range(tree.size))
    table[torch.arange(8), torch.arange(1, 9)] = 40.0  # the first eight drafts are nearly certain
    target = TableTarget(table)
    with MemoryTracker() as tracker:
        emitted = verify(target, tree, drafts, SequenceState([5], 99, sampling=Sampling(top_p=0.9)))
    assert emitted[:8] == drafts[1:9]
    assert len(emitted) == 9
    assert target.products == [list(range(LOGIT_ROWS)), list(range(LOGIT_ROWS, 2 * LOGIT_ROWS))]
    assert tracker.peak <= draw_bytes(vocab, 4).at(LOGIT_ROWS) < tree.size * vocab * 4 / 3


def test_rows_that_were_not_read_are_freed() -> None:
    """Drafts that are wrong, and eight walks by Medusa's rule, hold no more than a product and copies of a row."""
    vocab, tree = 20_000, DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    for rows, typical in ((3, None), (8, TypicalAcceptance())):
        table = torch.zeros(rows * tree.size, vocab)
        table[torch.arange(rows) * tree.size, 2] = 40.0  # the second child holds this token
        states = [SequenceState([5], 99, sampling=Sampling(typical=typical, seed=i)) for i in range(rows)]
        with MemoryTracker() as tracker:
            emitted = verdict_of(TableTarget(table), tree, [list(range(tree.size))] * rows, states).emitted
        assert all(tokens[0] == 2 and len(tokens) >= 2 for tokens in emitted)
        assert tracker.peak < min(draw_bytes(vocab, 4).at(LOGIT_ROWS), 2 * LOGIT_ROWS * vocab * 4)


@settings(max_examples=examples(60), deadline=None)
@given(
    tree=trees(),
    kinds=st.lists(st.sampled_from(["greedy", "drawn", "typical", "scored"]), min_size=1, max_size=12),
    seed=st.integers(0, 2**40),
)
def test_sequences_share_products(tree: DraftTree, kinds: list[str], seed: int) -> None:
    """Each emits what it emits alone, and no more products are computed than the longest path has nodes."""
    generator, vocab = torch.Generator().manual_seed(seed), 7
    table = torch.randn(len(kinds) * tree.size, vocab, generator=generator) * 3
    drafts = torch.randint(vocab, (len(kinds), tree.size), generator=generator).tolist()

    def state(index: int) -> SequenceState:
        typical = TypicalAcceptance(0.3, 0.6) if kinds[index] == "typical" else None
        sampling = None if kinds[index] == "greedy" else Sampling(1.2, seed=seed + index, typical=typical)
        return SequenceState([5], 99, sampling=sampling, logprobs=2 if kinds[index] == "scored" else None)

    target = TableTarget(table)
    states = [state(i) for i in range(len(kinds))]
    verdict = verdict_of(target, tree, drafts, states)
    parts = enumerate(table.split(tree.size))
    assert verdict.emitted == [verify(TableTarget(part), tree, drafts[i], state(i)) for i, part in parts]
    assert all(len(set(rows)) == len(rows) <= LOGIT_ROWS for rows in target.products)
    lengths = [len(tokens) for tokens in verdict.emitted]
    if "typical" not in kinds and len(kinds) <= LOGIT_ROWS:
        assert len(target.products) <= max(lengths) * (1 + ("scored" in kinds))
    for index, scores in enumerate(verdict.scores):
        rows = [table[index * tree.size + node] for node in verdict.paths[index]]
        pairs = zip(rows, verdict.emitted[index], strict=True)
        assert scores == ([token_score(row, token, 2) for row, token in pairs] if kinds[index] == "scored" else [])


def best_typical(table: Tensor, sampling: Sampling, rule: TypicalAcceptance) -> tuple[int, set[tuple[int, ...]]]:
    """Medusa's rule, path by path: the largest number of accepted candidates, and the paths that reach it."""
    p = (table / sampling.temperature).softmax(1)
    entropy = -(p * (p + 1e-9).log()).sum(1)
    limit = torch.minimum(torch.tensor(rule.epsilon), rule.alpha * torch.exp(-entropy))
    lengths: dict[tuple[int, ...], int] = {(): 0}
    for node in range(1, TREE.size):
        path, at = [], node
        while at:
            path.append(at)
            at = TREE.parents[at]
        if all(p[TREE.parents[n], DRAFTS[n]] > limit[TREE.parents[n]] for n in path):
            lengths[tuple(DRAFTS[n] for n in reversed(path))] = len(path)
    most = max(lengths.values())
    return most, {path for path, length in lengths.items() if length == most}


@pytest.mark.parametrize(
    "rule", [TypicalAcceptance(), TypicalAcceptance(0.3, 0.6), TypicalAcceptance(0.01, 0.1)], ids=str
)
def test_typical_acceptance(rule: TypicalAcceptance) -> None:
    """The longest path that Medusa's formula accepts, over many random distributions."""
    generator, lengths = torch.Generator().manual_seed(2), Counter[int]()
    for seed in range(300):
        table = torch.randn(TREE.size, 6, generator=generator) * 2
        sampling = Sampling(0.8, seed=seed, typical=rule)
        emitted = verify(TableTarget(table), TREE, DRAFTS, SequenceState([5], 9, sampling=sampling))
        most, paths = best_typical(table, sampling, rule)
        assert tuple(emitted[:-1]) in paths
        lengths[most] += 1
    assert len(lengths) == 3


EXTREMES = [1e-300, 1e-40, 1e-5, 1e30, 1e300]


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias"])
def test_every_accepted_value_has_a_distribution(name: str, value: float) -> None:
    """Also with tokens of the prompt that the lm_head doesn't have."""
    for sign in (1, -1) if name not in ("temperature", "repetition_penalty") else (1,):
        given = {"logit_bias": {2: sign * value, 3: -sign * value}} if name == "bias" else {name: sign * value}
        sampling = Sampling(top_k=3, top_p=0.9, **given)  # type: ignore[arg-type]
        logits = torch.tensor([0.0, -3.0, 2.0, 5.0, -20.0])
        probabilities = sampling.probabilities(logits, [1, 4, 7, 3, 3, 0], prompt_length=3)
        assert probabilities.sum().item() == pytest.approx(1)
        assert draw(probabilities, torch.Generator().manual_seed(0)) in range(5)
        if name == "temperature" and value < 1:
            assert probabilities.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=-0.5), r"temperature is -0\.5, it must be finite and at least 0"),
        (lambda: Sampling(top_k=-1), "top_k is -1"),
        (lambda: Sampling(top_p=0.0), r"top_p is 0\.0"),
        (lambda: Sampling(top_p=1.5), r"top_p is 1\.5"),
        (lambda: TypicalAcceptance(epsilon=0), "epsilon is 0"),
        (lambda: TypicalAcceptance(alpha=2), "alpha is 2"),
    ],
)
def test_what_can_not_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_copies_with_another_seed_share_the_bias() -> None:
    """A request may have 128 answers, and a bias for every token of the vocabulary."""
    sampling = Sampling(temperature=0.5, top_k=3, seed=1, logit_bias={2: 1.0})
    copied = sampling.with_seed(7)
    assert copied == Sampling(temperature=0.5, top_k=3, seed=7, logit_bias={2: 1.0})
    assert copied.logit_bias is sampling.logit_bias
    assert sampling.seed == 1
    with pytest.raises(ValueError, match="seed is 18446744073709551616"):
        sampling.with_seed(1 << 64)
