"""The speculative loop: draft trees, verify them in one forward pass beside chunks of prompts, commit the accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels import ops
from specmemo_kernels.batch import TreeBatch, chunk_batch, side_by_side, tree_batch
from specmemo_kernels.drafting.base import Drafter, DraftInput, StatefulDrafter
from specmemo_kernels.paged_kv import PagedKVPool
from specmemo_kernels.sequence import SequenceState
from specmemo_kernels.stats import DecodeStats
from specmemo_kernels.step_attention import StepAttention
from specmemo_kernels.tree import DraftTree
from specmemo_kernels.tree_choice import TreeChooser
from specmemo_kernels.verify import GreedyVerifier, TargetModel, TargetOutput, Verdict, Verifier

Tensor = torch.Tensor

__all__ = [
    "GreedyVerifier",
    "SequenceState",
    "SpecDecoder",
    "TargetModel",
    "TargetOutput",
    "Verdict",
    "Verifier",
]


@dataclass(frozen=True)
class _Chunk:
    """Parts of prompts that one forward pass computes: ``(sequence, size)`` in order, and the metadata of their rows.

    ``ended`` are those whose context it completes: first the ``fresh`` ones, whose first token is to be found, then
    those that come back and have their newest token already. ``last_rows`` are their last rows in the chunk.
    """

    parts: list[tuple[SequenceState, int]]
    batch: TreeBatch
    fresh: list[SequenceState]
    ended: list[SequenceState]
    last_rows: Tensor


class SpecDecoder:
    """Generates for a changing set of sequences, all of which take part in every step.

    Args:
        target: the model.
        drafter: fills the tree.
        tree: the widest tree a step may verify.
        pool: pages; every open sequence holds a row of its block table.
        verifier: decides what is accepted.
        prefill_chunk: most prompt tokens per forward pass.
        backend: of the operators.
        stats: counters to add to.
        chooser: takes the part of the tree that pays for the sequences at hand; ``None``: always all of it.

    Attributes:
        sequences: those that take steps. prefilling: those whose context is being computed, in the order of admission.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tree: DraftTree,
        pool: PagedKVPool,
        verifier: Verifier,
        *,
        prefill_chunk: int,
        backend: str | None = None,
        stats: DecodeStats | None = None,
        chooser: TreeChooser | None = None,
    ) -> None:
        self.chooser = chooser
        self.target, self.drafter, self.tree, self.pool, self.verifier = target, drafter, tree, pool, verifier
        self.prefill_chunk, self.backend = prefill_chunk, backend
        self.stats = stats if stats is not None else DecodeStats()
        self.sequences: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self._seq_lens = torch.empty(0, dtype=torch.int32, device=target.device)
        self._roots = torch.empty(0, dtype=torch.int64, device=target.device)
        self._hidden: Tensor | None = None

    def admit(self, sequences: Sequence[SequenceState]) -> None:
        """Give sequences pages for their context, which the next steps compute, chunk by chunk.

        Raises:
            OutOfPages: one doesn't fit; none of this call was admitted.
        """
        opened: list[SequenceState] = []
        try:
            for sequence in sequences:
                sequence.slot, sequence.computed = self.pool.open(), 0
                opened.append(sequence)
                self.pool.reserve(sequence.slot, len(sequence.context))
        except BaseException:
            for sequence in opened:
                self.pool.close(sequence.slot)
                sequence.slot = -1
            raise
        self.prefilling += sequences

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Admit sequences and compute their context to the end, while the others wait; they join the next steps.

        Raises:
            OutOfPages: a prompt doesn't fit; no sequence of this call was started.
        """
        self.admit(sequences)
        try:
            while self.prefilling:
                self._forward(None)
        except BaseException:
            self.release(sequences)
            raise
        self._retire()

    def reserve(self, sequence: SequenceState) -> None:
        """Make sure of the pages that a running sequence may fill in the next step.

        Raises:
            OutOfPages: not enough are free; the sequence keeps what it had.
        """
        # The newest token isn't in pages yet, so the deepest path needs `max_depth` slots behind it.
        self.pool.reserve(sequence.slot, len(sequence.tokens) + self._step_tree().max_depth)

    def step(self) -> list[SequenceState]:
        """One forward pass: a tree for each running sequence, and the next chunk of the contexts still to be computed.

        Returns the sequences that it finished (their pages are free).

        Raises:
            OutOfPages: the accepted tokens might not fit; nothing was emitted.
        """
        trees = None
        if self.sequences:
            for sequence in self.sequences:
                self.reserve(sequence)
            trees = self._draft(self._step_tree())
        self._forward(trees)
        return self._retire()

    def release(self, sequences: Sequence[SequenceState]) -> None:
        """Take sequences out, whatever state they are in; their pages are free at once."""
        gone = {id(sequence) for sequence in sequences}
        for sequence in (*self.prefilling, *self.sequences):
            if id(sequence) in gone:
                self.pool.close(sequence.slot)
                if isinstance(self.drafter, StatefulDrafter):
                    self.drafter.close(sequence.slot)
                sequence.slot = -1
        self.prefilling = [s for s in self.prefilling if id(s) not in gone]
        keep = [i for i, s in enumerate(self.sequences) if id(s) not in gone]
        if len(keep) == len(self.sequences):
            return
        rows = torch.tensor(keep, dtype=torch.int64, device=self.target.device)
        self.sequences = [self.sequences[i] for i in keep]
        self._seq_lens, self._roots = self._seq_lens[rows], self._roots[rows]
        self._hidden = self._hidden[rows] if self._hidden is not None and keep else None

    def abort(self) -> None:
        """Close all sequences, whatever state they are in."""
        for sequence in (*self.sequences, *self.prefilling):
            sequence.finished = True
        self.release([*self.sequences, *self.prefilling])

    def _retire(self) -> list[SequenceState]:
        finished = [s for s in self.sequences if s.finished]
        self.release(finished)
        return finished

    def _step_tree(self) -> DraftTree:
        """The tree, without nodes deeper than the tokens anybody still wants."""
        tree = self.tree if self.chooser is None else self.chooser.tree_for(len(self.sequences))
        return tree.truncated(max(s.remaining for s in self.sequences) - 1)

    def _draft(self, tree: DraftTree) -> TreeBatch:
        """Let the drafter fill the tree; what isn't a token becomes -1 for the walk and 0 for the embedding."""
        assert self._hidden is not None
        slots, tokens = [s.slot for s in self.sequences], [s.tokens for s in self.sequences]
        draft = self.drafter.propose(DraftInput(tree, self._roots, self._hidden, tokens, slots))
        expected = (len(self.sequences), tree.size)
        if tuple(draft.shape) != expected or draft.dtype != torch.int64:
            raise ValueError(
                f"{type(self.drafter).__name__}.propose returned {tuple(draft.shape)} {draft.dtype}, "
                f"expected {expected} torch.int64 (sequences, tree nodes)"
            )
        draft = torch.where((draft < 0) | (draft >= self.target.vocab_size), -1, draft)
        if draft.device.type == "cpu":  # elsewhere a look at it would make the host wait
            tree, draft = _without_empty_depths(tree, draft)
        draft = draft.to(self.target.device)
        draft[:, 0] = self._roots
        rows = torch.tensor(slots, device=self.target.device)
        longest = max(map(len, tokens)) - 1
        return tree_batch(tree, draft, self._seq_lens, self.pool.block_table[rows], longest)

    def _forward(self, trees: TreeBatch | None) -> None:
        """One forward pass over trees and the next chunk, and everything that follows from it."""
        running = self.sequences if trees is not None else []
        chunk = self._next_chunk(trees)
        if chunk is None and trees is None:
            return
        batch, keep, nodes = trees, None, 0 if trees is None else trees.num_tree_nodes
        if chunk is not None:
            batch = chunk.batch if trees is None else side_by_side(trees, chunk.batch)
            keep = torch.cat([torch.arange(nodes, device=self.target.device), nodes + chunk.last_rows])
        assert batch is not None
        attention = StepAttention(self.pool, batch, self.backend)
        output = self.target.forward(batch, attention, keep, logits=self.verifier.needs_logits)
        fresh = chunk.fresh if chunk is not None else []
        verdict = self._verdict(trees, running, fresh, output.rows(nodes + len(fresh)))
        if trees is not None and verdict is not None:
            self._advance(trees, verdict, output)
        if chunk is not None:
            self._count_chunk(chunk)
            first = [tokens[0] for tokens in verdict.emitted[len(running) :]] if verdict is not None else []
            for sequence, token in zip(fresh, first, strict=True):
                sequence.take([token])
            self._join(chunk, output.hidden[nodes:])

    def _next_chunk(self, trees: TreeBatch | None) -> _Chunk | None:
        """The next part of the contexts in ``prefilling``, oldest first, as large as the rows of a step allow."""
        if not self.prefilling:
            return None
        room = self.prefill_chunk
        if trees is not None:  # the plan counts the larger of a chunk and all trees
            room = max(room, self.pool.max_nodes) - trees.num_tree_nodes
        parts = []
        for sequence in self.prefilling:
            if size := min(room, len(sequence.context) - sequence.computed):
                parts.append((sequence, size))
                room -= size
        device = self.target.device
        tokens = [torch.tensor(s.context[s.computed : s.computed + size], device=device) for s, size in parts]
        slots = torch.tensor([s.slot for s, _ in parts], device=device)
        batch = chunk_batch(tokens, [s.computed for s, _ in parts], self.pool.block_table[slots])
        ends = torch.tensor([size for _, size in parts]).cumsum(0).tolist()
        done = [(s, end - 1) for (s, size), end in zip(parts, ends, strict=True) if s.computed + size == len(s.context)]
        done.sort(key=lambda item: item[0].emitted > 0)
        rows = torch.tensor([row for _, row in done], dtype=torch.int64, device=device)
        return _Chunk(parts, batch, [s for s, _ in done if not s.emitted], [s for s, _ in done], rows)

    def _verdict(
        self,
        trees: TreeBatch | None,
        running: Sequence[SequenceState],
        fresh: Sequence[SequenceState],
        output: TargetOutput,
    ) -> Verdict | None:
        """The verifier's word on all trees; a new prompt's last row counts as a tree without drafts."""
        if fresh:
            device = self.target.device
            roots = torch.tensor([s.prompt[-1] for s in fresh], device=device)[:, None]
            lengths = torch.tensor([len(s.prompt) - 1 for s in fresh], dtype=torch.int32, device=device)
            table = self.pool.block_table[torch.tensor([s.slot for s in fresh], device=device)]
            first = tree_batch(DraftTree.chain(0), roots, lengths, table, max(len(s.prompt) for s in fresh) - 1)
            trees = first if trees is None else side_by_side(trees, first)
        return None if trees is None else self.verifier(trees, [*running, *fresh], output)

    def _advance(self, trees: TreeBatch, verdict: Verdict, output: TargetOutput) -> None:
        """Commit what the running sequences accepted, and let them take their tokens."""
        count = len(self.sequences)
        index, length = verdict.accept_index[:count], verdict.accept_length[:count]
        for group in self.pool.groups:
            device = group.k_pages.device
            there = trees.to(device)
            ops.commit_paged_kv(
                group.k_scratch, group.v_scratch, group.k_pages, group.v_pages,
                there.block_table, there.seq_lens, there.qo_indptr,
                index.to(device), length.to(device), k_scales=group.k_scales, v_scales=group.v_scales,
                backend=self.backend,
            )  # fmt: skip
        last = trees.qo_indptr[:-1] + index.gather(1, length[:, None].long())[:, 0]
        self._hidden = output.hidden[last.long()]
        self._roots = verdict.bonus_token[:count]
        self._seq_lens = self._seq_lens + length + 1
        emitted = verdict.emitted[:count]
        self.stats.record_step([len(tokens) - 1 for tokens in emitted], trees.num_tree_nodes, trees.max_depth)
        if self.chooser is not None:
            self.chooser.stepped()
        for sequence, tokens in zip(self.sequences, emitted, strict=True):
            sequence.steps += 1
            sequence.accepted += len(tokens) - 1
            self.stats.tokens += sequence.take(tokens)

    def _count_chunk(self, chunk: _Chunk) -> None:
        for sequence, size in chunk.parts:
            sequence.computed += size
            if sequence.preemptions:
                self.stats.recomputed_tokens += size
            else:
                self.stats.prefill_tokens += size
            self.stats.slots_written += size

    def _join(self, chunk: _Chunk, hidden: Tensor) -> None:
        """Sequences whose context is complete take part from now on; ``hidden`` are their last rows."""
        if not chunk.ended:
            return
        joined = {id(sequence) for sequence in chunk.ended}
        self.prefilling = [s for s in self.prefilling if id(s) not in joined]
        device = self.target.device
        roots = torch.tensor([s.tokens[-1] for s in chunk.ended], device=device)
        lengths = torch.tensor([len(s.tokens) - 1 for s in chunk.ended], dtype=torch.int32, device=device)
        self._hidden = hidden if self._hidden is None else torch.cat([self._hidden, hidden])
        self._roots = torch.cat([self._roots, roots])
        self._seq_lens = torch.cat([self._seq_lens, lengths])
        self.sequences = [*self.sequences, *chunk.ended]


def _without_empty_depths(tree: DraftTree, draft: Tensor) -> tuple[DraftTree, Tensor]:
    """The tree down to the deepest guess of any sequence (what an earlier guess is missing for can't be accepted)."""
    guessed = (draft >= 0).any(0).tolist()
    deepest = max((depth for depth, there in zip(tree.depths, guessed, strict=True) if there), default=0)
    kept = [node for node, depth in enumerate(tree.depths) if depth <= deepest]
    return tree.truncated(deepest), draft[:, kept] if len(kept) < tree.size else draft
