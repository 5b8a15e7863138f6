"""The speculative loop against plain decoding, on a model whose every token depends on the whole visible context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples, sample
from toy_model import PROMPTS, TARGET, VOCAB, ToyDrafter, ToyTarget, decoder, finish, plain, same_as_plain

from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.step_attention import StepAttention
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree

BUSHY = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2], [0, 0, 0, 0], [1, 0, 1]])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, 64))
    reach = draw(st.sampled_from([1, 4, 64]))
    parents = [-1] + [draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, size)]
    return DraftTree(tuple(parents), (0, *draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))))


@st.composite
def requests(draw: st.DrawFn) -> SequenceState:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    eos = frozenset(draw(st.sampled_from([[], [], [prompt[0]], [0, 5], list(range(0, VOCAB, 3))])))
    return SequenceState(prompt, draw(st.integers(1, 24)), eos)


@settings(max_examples=examples(120), deadline=None)
@given(
    waves=st.lists(st.lists(requests(), min_size=1, max_size=2), min_size=1, max_size=3),
    tree=trees(),
    drafter=st.sampled_from(ToyDrafter.KINDS),
    page_size=st.integers(1, 17),
    prefill_chunk=st.integers(1, 50),
)
def test_same_tokens_as_plain_decoding(
    waves: list[list[SequenceState]], tree: DraftTree, drafter: str, page_size: int, prefill_chunk: int
) -> None:
    """Ragged batches, sequences that join later, EOS anywhere; any tree, page size, chunk and drafter."""
    spec = decoder(tree, drafter, page_size=page_size, num_pages=600, prefill_chunk=prefill_chunk, sequences=6)
    finish(spec, waves)
    states = [sequence for wave in waves for sequence in wave]
    for state in states:
        same_as_plain(state)
    assert spec.stats.prefill_tokens == sum(len(s.prompt) for s in states)
    assert spec.stats.tokens == sum(len(s.new_tokens) - 1 for s in states)
    accepted = spec.stats.slots_written - spec.stats.prefill_tokens - spec.stats.sequence_steps
    assert sum(spec.stats.accepted_at_depth) == accepted


@pytest.mark.parametrize("page_size", sample(range(1, 18), [1, 4, 5, 16]))
def test_page_edges(page_size: int) -> None:
    """Whole paths accepted across all kinds of page boundaries."""
    states = [SequenceState(prompt, 30) for prompt in PROMPTS]
    finish(decoder(BUSHY, page_size=page_size, num_pages=256), [states])
    for state in states:
        same_as_plain(state)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("drafter", ["right", "half"])
def test_backends_in_float32(backend: str, drafter: str) -> None:
    """The loop over each backend's operators, in float32, where best tokens are unambiguous."""
    single = ToyTarget(dtype=torch.float32, backend=backend)
    states = [SequenceState(prompt, 40) for prompt in PROMPTS]
    finish(decoder(BUSHY, drafter, target=single, backend=backend), [states[:3], states[3:]])
    for state in states:
        same_as_plain(state)
        assert min(TARGET.margin(state.tokens[:i]) for i in range(len(state.prompt), len(state.tokens))) > 1e-4


def test_plain_decoding_is_no_constant() -> None:
    """The toy model is a good test: varied tokens that depend on the first token of the context."""
    texts = [plain(TARGET, prompt, 30) for prompt in PROMPTS]
    assert all(len(set(text)) > 6 for text in texts)
    long = PROMPTS[2]
    assert sum(TARGET.next_token([first, *long[1:]]) != TARGET.next_token(long) for first in range(VOCAB)) > VOCAB // 3


class Faulty(ToyTarget):
    """The toy target with a damaged batch."""

    def __init__(self, damage: Callable[[TreeBatch], TreeBatch]) -> None:
        super().__init__()
        self.damage = damage

    def forward(
        self, batch: TreeBatch, attention: StepAttention, keep: torch.Tensor | None, logits: bool
    ) -> TargetOutput:
        if batch.parents is not None:
            batch = self.damage(batch)
            attention = StepAttention(attention.pool, batch, attention.backend)
        return super().forward(batch, attention, keep, logits)


FAULTS: dict[str, Callable[[TreeBatch], TreeBatch]] = {
    "position": lambda b: dataclasses.replace(b, positions=b.positions + (torch.arange(len(b.tokens)) > 0)),
    "mask": lambda b: dataclasses.replace(b, tree_mask=torch.zeros_like(b.tree_mask)),
    "page": lambda b: dataclasses.replace(b, block_table=b.block_table.roll(1, 1)),
    "length": lambda b: dataclasses.replace(b, seq_lens=b.seq_lens - 1),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_change_tokens(fault: str | None) -> None:
    """A wrong position, mask, page or length changes the toy model's tokens."""
    target = ToyTarget() if fault is None else Faulty(FAULTS[fault])
    tree = DraftTree.from_paths([[0], [1], [1, 0], [1, 1], [1, 1, 0]])
    states = [SequenceState(prompt, 30) for prompt in PROMPTS if len(prompt) > 4]
    finish(decoder(tree, "last", target=target), [states])
    differ = [plain(TARGET, s.prompt, 30) != s.new_tokens for s in states]
    assert any(differ) == (fault is not None)


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_length_limit_inside_a_tree(max_new_tokens: int) -> None:
    """Exactly ``max_new_tokens`` tokens, wherever the accepted path would continue."""
    states = [SequenceState(PROMPTS[0], max_new_tokens), SequenceState(PROMPTS[1], 9)]
    finish(decoder(DraftTree.chain(4)), [states])
    assert [len(s.new_tokens) for s in states] == [max_new_tokens, 9]
    for state in states:
        same_as_plain(state)


@pytest.mark.parametrize("place", range(9))
def test_eos_inside_a_tree(place: int) -> None:
    """EOS is the last token, at each position of an accepted path, though the prompt has EOS too."""
    text = plain(TARGET, PROMPTS[2], 30)
    eos = frozenset([text[place]])
    state = SequenceState([*PROMPTS[2]], 30, eos)
    other = SequenceState([text[place], *PROMPTS[0]], 30, eos)
    finish(decoder(DraftTree.chain(4)), [[state, other]])
    assert state.new_tokens == text[: text.index(text[place]) + 1]
    same_as_plain(state)
    same_as_plain(other)


def test_stop_function_sees_each_token() -> None:
    """Called once per token with all tokens so far; ``True`` ends the sequence."""
    seen: list[list[int]] = []

    def stop(tokens: list[int]) -> bool:
        seen.append(list(tokens))
        return len(tokens) == 12

    state = SequenceState(PROMPTS[0], 30, stop=stop)
    finish(decoder(DraftTree.chain(5)), [[state]])
    assert state.tokens == PROMPTS[0] + plain(TARGET, PROMPTS[0], 7)
    assert seen == [state.tokens[:n] for n in range(6, 13)]
