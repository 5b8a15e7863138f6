"""The pass that every step makes: draft trees and a prompt chunk, forward, verify, commit.

:mod:`specmemo_kernels.engine.decode` runs it from the host, :mod:`specmemo_kernels.engine.device_step` from a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import torch

from specmemo_kernels.arguments import wrong_type
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import AnyDrafter, Drafter, DraftInput, DraftRows, FeatureDrafter
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import DeviceVerdict, Verdict
from specmemo_kernels.engine.walk import run_walks, token_scores
from specmemo_kernels.forward.batch import (
    DraftedTrees,
    TreeBatch,
    chunk_batch,
    concat_batches,
    continued_batch,
    tree_batch,
)
from specmemo_kernels.forward.step_attention import StepAttention, commit_accepted
from specmemo_kernels.forward.target import LOGIT_ROWS, TargetModel, TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor
AnyVerdict = TypeVar("AnyVerdict", Verdict, DeviceVerdict)


@dataclass(frozen=True)
class FilledTree:
    """``tokens`` ``[B, T]`` int64 for ``tree``, roots included; ``seconds`` that the drafter took."""

    tree: DraftTree
    tokens: Tensor
    seconds: float


def propose(
    drafter: Drafter,
    tree: Trees,
    sequences: Sequence[SequenceState],
    roots: Tensor,
    target: TargetModel,
    agree: Callable[[Tensor], Tensor] | None,
    whole: bool = False,
) -> FilledTree:
    """Fill a tree per sequence with the drafter's candidates; values outside the vocabulary become -1.

    A one-node tree skips the drafter. Depths for which it has no guess are left out.

    Args:
        roots: ``[B]`` int64, the newest tokens.
        whole: leave out all depths or none.
        agree: maps this process's candidates ``[B, T]`` to those that all ranks verify; ``None``: a single process.

    Raises:
        TypeError: the drafter didn't return a tensor.
        ValueError: its tensor isn't ``[sequences, tree nodes]`` int64.
    """
    if tree.size == 1:
        return FilledTree(ROOT, roots[:, None], 0.0)
    assert isinstance(tree, DraftTree), "dynamic trees are for drafters that read features"
    slots, tokens, hidden = [s.slot for s in sequences], [s.tokens for s in sequences], _hidden(sequences)
    started = time.perf_counter()
    draft = drafter.propose(DraftInput(tree, roots, hidden, tokens, slots))
    seconds = time.perf_counter() - started
    expected = (len(sequences), tree.size)
    if not isinstance(draft, Tensor):
        raise wrong_type(
            f"the result of {type(drafter).__name__}.propose", draft, f"a torch.int64 tensor of shape {expected}"
        )
    if tuple(draft.shape) != expected or draft.dtype != torch.int64:
        raise ValueError(
            f"{type(drafter).__name__}.propose returned {tuple(draft.shape)} {draft.dtype}, "
            f"expected {expected} torch.int64 (sequences, tree nodes)"
        )
    draft = only_tokens(draft if agree is None else agree(draft), target.vocab_size)
    if draft.device.type == "cpu":  # reading it from a GPU would block the host
        part, guesses = _without_empty_depths(tree, draft)
        if part.size == 1 or not whole:
            tree, draft = part, guesses
    draft = draft.to(target.device)
    draft[:, 0] = roots
    return FilledTree(tree, draft, seconds)


def propose_trees(
    drafter: AnyDrafter,
    reader: FeatureDrafter | None,
    tree: Trees,
    sequences: Sequence[SequenceState],
    pool: PagedKVPool,
    target: TargetModel,
    agree: Callable[[Tensor], Tensor] | None,
) -> tuple[TreeBatch, float]:
    """The verification batch of the drafter's trees, and the seconds that the drafter took.

    Args:
        reader: the drafter, if it reads features; ``agree`` then maps token, parent and depth of all nodes.
        agree: else as in :func:`propose`.
    """
    roots, lengths, table, longest = _roots(sequences, pool, target.device)
    if reader is None or tree.size == 1:
        filled = propose(cast(Drafter, drafter), tree, sequences, roots, target, agree)
        return tree_batch(filled.tree, filled.tokens, lengths, table, longest), filled.seconds
    rows, started = DraftRows(pool, roots, _hidden(sequences), lengths, table, longest), time.perf_counter()
    with torch.inference_mode():
        drafted = reader.draft(rows, tree)
    if agree is not None:
        drafted = _agreed(drafted, agree)
    return drafted_batch(drafted, tree, rows, target.vocab_size), time.perf_counter() - started


def _roots(
    sequences: Sequence[SequenceState], pool: PagedKVPool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The newest tokens ``[B]``; the tokens in pages ``[B]`` int32, their block table and their maximum."""
    columns = [[s.slot for s in sequences], [s.tokens[-1] for s in sequences], [len(s.tokens) - 1 for s in sequences]]
    slots, roots, lengths = torch.tensor(columns, device=device)
    return roots, lengths.int(), pool.block_table[slots], max(columns[2])


def _hidden(sequences: Sequence[SequenceState]) -> Tensor:
    """``[B, size]``: the sequences' states."""
    return torch.stack([s.hidden for s in sequences if s.hidden is not None])


def drafted_batch(drafted: DraftedTrees, tree: Trees, rows: DraftRows, vocab_size: int) -> TreeBatch:
    """The verification batch of a :class:`FeatureDrafter`'s trees."""
    tokens = only_tokens(drafted.tokens, vocab_size)
    layout = None if isinstance(tree, DraftTree) else drafted.layout(tree.max_depth)
    return tree_batch(tree, tokens, rows.seq_lens, rows.block_table, rows.max_seq_len, layout)


def _agreed(drafted: DraftedTrees, agree: Callable[[Tensor], Tensor]) -> DraftedTrees:
    """Rank 0's trees, in one message."""
    parts = agree(torch.stack([drafted.tokens, drafted.parents.long(), drafted.depths]))
    return DraftedTrees(parts[0], parts[1].int(), parts[2])


#: The tree of steps without drafts.
ROOT = DraftTree.chain(0)


def only_tokens(draft: Tensor, vocab_size: int) -> Tensor:
    """Replace values outside the vocabulary by -1."""
    return draft.masked_fill(draft != draft.clamp(0, vocab_size - 1), -1)


def _without_empty_depths(tree: DraftTree, draft: Tensor) -> tuple[DraftTree, Tensor]:
    """Truncate the tree at the deepest candidate of any sequence."""
    guessed = (draft >= 0).any(0).tolist()
    deepest = max((depth for depth, has_guess in zip(tree.depths, guessed, strict=True) if has_guess), default=0)
    nodes = [node for node, depth in enumerate(tree.depths) if depth <= deepest]
    return tree.truncated(deepest), draft[:, nodes] if len(nodes) < tree.size else draft


@dataclass(frozen=True)
class ScoredRow:
    """A ``row`` of a chunk whose logits score the sequence's next ``token``."""

    sequence: SequenceState
    row: int
    token: int


@dataclass(frozen=True)
class Chunk:
    """The prompt tokens that one forward pass computes (chunked prefill).

    Attributes:
        parts: ``(sequence, size)`` in the order of their rows.
        batch: the rows' metadata.
        fresh: sequences whose prompt it completes; the verifier computes their first tokens.
        ended: ``fresh``, then preempted sequences whose context it completes.
        last_rows: ``[len(ended)]`` int64, the last row of each of ``ended`` in the chunk.
        first_trees: the last rows of ``fresh`` as single-node trees for the verifier; ``None`` without ``fresh``.
        next_tokens: ``[N]`` int64, the token behind each row; any token behind the last rows of ``fresh``.
        scored: the rows that score a prompt's next token.
    """

    parts: list[tuple[SequenceState, int]]
    batch: TreeBatch
    fresh: list[SequenceState]
    ended: list[SequenceState]
    last_rows: Tensor
    first_trees: TreeBatch | None
    next_tokens: Tensor
    scored: list[ScoredRow] = field(default_factory=list)


def next_chunk(prefilling: Sequence[SequenceState], room: int, pool: PagedKVPool, device: torch.device) -> Chunk | None:
    """Pick the next tokens, at most ``room``, of the contexts still to be computed, oldest first.

    ``None``: there is room for fewer tokens than the pool's states take.
    """
    parts, least = [], 1 if pool.states is None else pool.states.least_rows
    for sequence in prefilling:
        if size := _part(sequence, room, least):
            parts.append((sequence, size))
            room -= size
    if not parts:
        return None
    tokens = [torch.tensor(s.context[s.computed : s.computed + size], device=device) for s, size in parts]
    slots = torch.tensor([s.slot for s, _ in parts], device=device)
    batch = chunk_batch(tokens, [s.computed for s, _ in parts], pool.block_table[slots])
    ends = torch.tensor([size for _, size in parts], device="cpu").cumsum(0).tolist()
    done = [(s, end - 1) for (s, size), end in zip(parts, ends, strict=True) if s.computed + size == len(s.context)]
    done.sort(key=lambda item: item[0].emitted > 0)
    rows = torch.tensor([row for _, row in done], dtype=torch.int64, device=device)
    fresh = [s for s, _ in done if not s.emitted]
    first = _first_trees(fresh, pool, device) if fresh else None
    following = [token for s, size in parts for token in _behind(s.tokens, s.computed, size)]
    scored = [row for (s, size), end in zip(parts, ends, strict=True) for row in _scored_rows(s, size, end - size)]
    return Chunk(parts, batch, fresh, [s for s, _ in done], rows, first, torch.tensor(following, device=device), scored)


def _part(sequence: SequenceState, room: int, least: int) -> int:
    """How many of a context's next tokens to compute: ``least`` of its prompt at once, but for its first ones."""
    size, prompt = min(room, len(sequence.context) - sequence.computed), len(sequence.prompt) - sequence.computed
    if 0 < prompt - size < least:  # too few would be left
        size = prompt - least
    return size if size > 0 and (not sequence.computed or size >= min(prompt, least)) else 0


def _scored_rows(sequence: SequenceState, size: int, first_row: int) -> list[ScoredRow]:
    """The rows, of a sequence's next ``size`` tokens, that score prompt tokens."""
    start = sequence.computed
    places = range(max(sequence.unscored, start + 1), min(len(sequence.prompt), start + size + 1))
    return [ScoredRow(sequence, first_row + place - 1 - start, sequence.prompt[place]) for place in places]


def prompt_scores(target: TargetModel, chunk: Chunk, output: TargetOutput, max_nodes: int) -> list[TokenScore]:
    """The scores of ``chunk.scored``, whose rows ``output`` has; at most ``max_nodes`` rows of logits at a time."""
    requested = [(i, row.token, row.sequence.logprobs or 0) for i, row in enumerate(chunk.scored)]
    rows = min(LOGIT_ROWS, max_nodes)
    return run_walks([token_scores(requested)], partial(target.row_logits, output), rows)[0]


def _behind(tokens: list[int], start: int, size: int) -> list[int]:
    """The tokens behind ``size`` tokens from ``start`` on, with 0 for one that doesn't exist yet."""
    following = tokens[start + 1 : start + size + 1]
    return following if len(following) == size else [*following, 0]


def _first_trees(fresh: Sequence[SequenceState], pool: PagedKVPool, device: torch.device) -> TreeBatch:
    roots = torch.tensor([s.prompt[-1] for s in fresh], device=device)[:, None]
    lengths = torch.tensor([len(s.prompt) - 1 for s in fresh], dtype=torch.int32, device=device)
    table = pool.block_table[torch.tensor([s.slot for s in fresh], device=device)]
    return tree_batch(ROOT, roots, lengths, table, max(len(s.prompt) for s in fresh) - 1)


def tree_pass(
    target: TargetModel,
    pool: PagedKVPool,
    backend: str | None,
    trees: TreeBatch | None,
    chunk: Chunk | None,
    verify: Callable[[TreeBatch, TargetOutput], AnyVerdict],
    reader: FeatureDrafter | None = None,
    *,
    logits: bool = False,
    score: Callable[[TargetOutput], None] | None = None,
    output: TargetOutput | None = None,
) -> tuple[AnyVerdict | None, Tensor]:
    """Compute trees and a prompt chunk in one forward pass, verify the trees, and commit their accepted nodes.

    Then ``reader`` reads the features of accepted nodes and prompt tokens.

    Only pages and scratch slots behind the sequences' ends change, so a pass that fails can be repeated.

    Args:
        trees, chunk: at most one is ``None``.
        verify: called with the trees and the target's output for their nodes. Behind ``trees`` it gets a single-node
            tree for each prompt that the chunk completes, in the order of ``chunk.fresh``.
        logits: ``verify`` or ``score`` reads rows of logits.
        score: called with the output of the rows ``chunk.scored``, if there are any.
        output: of a captured pass over ``trees`` alone; ``None``: ``target`` computes it.

    Returns:
        The verdict (``None`` where there was nothing to verify), and states ``[num_trees + len(chunk.ended), size]`` at
        the last accepted nodes, then at completed prompts' ends: the target's hidden states, or those
        of ``reader``.
    """
    batch = _joined(trees, None if chunk is None else chunk.batch)
    verified = _joined(trees, None if chunk is None else chunk.first_trees)
    assert batch is not None, "there is nothing to compute"
    nodes, keep = 0 if trees is None else trees.num_tree_nodes, None
    if chunk is not None:
        extra = torch.tensor([scored.row for scored in chunk.scored], dtype=torch.int64, device=target.device)
        keep = torch.cat([torch.arange(nodes, device=target.device), nodes + chunk.last_rows, nodes + extra])
    if output is None:
        output = target.forward(batch, StepAttention(pool, batch, backend, target.invariant), keep, logits=logits)
    if chunk is not None and chunk.scored and score is not None:
        kept = nodes + len(chunk.ended)
        score(output.rows(len(chunk.scored), kept))
        output = replace(output.rows(kept), features=output.features)
    verdict = None if verified is None else verify(verified, output.rows(len(verified.tokens)))
    committed = None
    if trees is not None and verdict is not None and trees.max_depth:  # the roots of single-node trees were appended
        committed = verdict.accept_index[: trees.num_trees], verdict.accept_length[: trees.num_trees]
        commit_accepted(pool, trees, *committed, backend)
    if reader is not None:
        return verdict, _advance(reader, pool, trees, chunk, verdict, output)
    if trees is None or committed is None:
        return verdict, output.hidden
    last = trees.last_rows(*committed)
    if chunk is not None:
        ended = torch.arange(nodes, len(output.hidden), dtype=last.dtype, device=last.device)
        last = torch.cat([last, ended])
    return verdict, output.hidden.index_select(0, last)


@torch.inference_mode()
def _advance(
    reader: FeatureDrafter,
    pool: PagedKVPool,
    trees: TreeBatch | None,
    chunk: Chunk | None,
    verdict: Verdict | DeviceVerdict | None,
    output: TargetOutput,
) -> Tensor:
    """The states of ``reader`` after a pass, as of :func:`tree_pass`."""
    features, states, nodes = output.features, [], 0
    assert features is not None, "the target captures what its drafter reads"
    if trees is not None:
        assert verdict is not None, "trees were verified"
        count, nodes = trees.num_trees, trees.num_tree_nodes
        index, tokens = verdict.accept_index[:count], verdict.tokens[:count]
        path = (trees.qo_indptr[:count, None] + index.clamp(min=0)).flatten()
        batch = continued_batch(tokens, trees.seq_lens, trees.block_table, trees.max_seq_len)
        last = batch.qo_indptr[:-1] + verdict.accept_length[:count]
        states.append(reader.advance(batch, features.index_select(0, path), last.long(), pool))
    if chunk is not None:
        following = chunk.next_tokens
        if chunk.fresh:
            assert verdict is not None, "first tokens were computed"
            firsts = verdict.tokens[len(verdict.tokens) - len(chunk.fresh) :, 0]
            following = following.index_copy(0, chunk.last_rows[: len(chunk.fresh)], firsts)
        batch = replace(chunk.batch, tokens=following, _elsewhere={})
        states.append(reader.advance(batch, features[nodes:], chunk.last_rows, pool))
    return torch.cat(states) if len(states) > 1 else states[0]


def _joined(trees: TreeBatch | None, other: TreeBatch | None) -> TreeBatch | None:
    return concat_batches(trees, other) if trees is not None and other is not None else trees or other
