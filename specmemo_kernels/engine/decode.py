"""The speculative loop: draft trees, verify them in one forward pass beside chunks of prompts, commit the accepted.

A step is a transaction: tensors are made first, then the sequences change, on the host alone. Whatever fails on the
way, an allocation above all, leaves every sequence as it was, and the step can be tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import Drafter, PagedDrafter, StatefulDrafter
from specmemo_kernels.engine.overlap import OverlappedSteps, slots_ahead
from specmemo_kernels.engine.prefill import Chunk, first_trees, next_chunk
from specmemo_kernels.engine.propose import propose
from specmemo_kernels.engine.sequence import SequenceState, SwappedSequence
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.engine.verify import GreedyVerifier, Verdict, Verifier
from specmemo_kernels.forward.batch import TreeBatch, concat_batches
from specmemo_kernels.forward.step_attention import StepAttention, commit_accepted
from specmemo_kernels.forward.target import TargetModel, TargetOutput
from specmemo_kernels.tree.choice import DraftBacklog, TreeChooser
from specmemo_kernels.tree.draft_tree import DraftTree

Tensor = torch.Tensor

__all__ = ["GreedyVerifier", "SequenceState", "SpecDecoder", "TargetModel", "TargetOutput", "Verdict", "Verifier"]


@dataclass(frozen=True)
class _Timed:
    """When a step ``started`` (``time.perf_counter``), the seconds that its drafter took (``drafting``), and how many
    tokens it was ``behind`` before."""

    started: float
    drafting: float
    behind: int


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
        late: runs steps one ahead of the host, wherever it can; ``None``: each step is read before the next one.
        agree: as of :func:`propose`.

    Attributes:
        sequences: those that take steps. prefilling: those whose context is being computed, in the order of admission.
        max_tree: most nodes that a step verifies of each sequence, below the tree's size while memory is scarce.
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
        late: OverlappedSteps | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chooser, self.late, self.agree = chooser, late, agree
        self.target, self.drafter, self.tree, self.pool, self.verifier = target, drafter, tree, pool, verifier
        self.prefill_chunk, self.backend = prefill_chunk, backend
        self.stats = stats if stats is not None else DecodeStats()
        self.sequences: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self.max_tree = tree.size
        self._ended: list[SequenceState] = []

    @property
    def slots_ahead(self) -> int:
        """Slots behind a sequence's last token that candidates may come to need."""
        return slots_ahead(self.tree, self.late is not None)

    def admit(self, sequences: Sequence[SequenceState]) -> None:
        """Give sequences pages for their context; what kept ones don't hold the next steps compute, chunk by chunk.

        A swapped sequence is copied back and continues where it was.

        Raises:
            OutOfPages: one doesn't fit; none of this call was admitted.
        """
        opened: list[SequenceState] = []
        restored: list[Tensor | None] = []
        try:
            for sequence in sequences:
                sequence.slot, sequence.computed = self.pool.open(), 0
                opened.append(sequence)
                if sequence.swapped is None:  # else pages of its own are written to
                    sequence.computed = self.pool.reuse(sequence.slot, sequence.context)
                self.pool.reserve(sequence.slot, len(sequence.context))
                swapped = sequence.swapped
                if swapped is not None:
                    self.pool.swap_in(sequence.slot, swapped.pages)
                hidden = None if swapped is None else swapped.hidden
                restored.append(None if hidden is None else hidden.to(self.target.device))
        except BaseException:
            for sequence in opened:
                self.pool.close(sequence.slot, sequence.tokens[: sequence.computed])
                sequence.slot = -1
            raise
        for sequence, hidden in zip(sequences, restored, strict=True):
            if sequence.swapped is None:
                self.stats.reused_tokens += sequence.computed
            else:
                sequence.computed = sequence.swapped.pages.tokens
            sequence.swapped, sequence.hidden = None, hidden
            (self.prefilling if hidden is None else self.sequences).append(sequence)

    def swap_out(self, sequence: SequenceState) -> None:
        """Copy an open sequence's keys, values and hidden state to host memory (:meth:`release` frees its pages)."""
        running = sequence.hidden is not None
        pages = self.pool.swap_out(sequence.slot, len(sequence.context) if running else sequence.computed)
        sequence.swapped = SwappedSequence(
            pages, None if sequence.hidden is None else sequence.hidden.to("cpu", copy=True)
        )

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

    def reserve(self, sequence: SequenceState) -> None:
        """Make sure of the pages that a running sequence may fill in the next step.

        Raises:
            OutOfPages: not enough are free; the sequence keeps what it had.
        """
        # The newest token isn't in pages yet, so the deepest path needs `max_depth` slots behind it.
        self.pool.reserve(sequence.slot, len(sequence.tokens) + self._step_tree().max_depth)

    def step(self) -> list[SequenceState]:
        """One forward pass: a tree for each running sequence, and the next chunk of the contexts still to be computed.

        Returns the sequences that ended (their pages are free). Where steps run ahead (``late``), what is read is the
        pass before.

        Raises:
            OutOfPages: the accepted tokens might not fit.
            Exception: of the target, the drafter, the verifier, a ``stop``, or for want of memory. Either way nothing
                was emitted and the step may be tried again.
        """
        reason = self.late.why_not(self) if self.late is not None and self.sequences else "nobody takes steps"
        if self.late is not None and (reason is None or self.late.under_way):
            self._ended += self.late.step(self, launch=reason is None)
        elif self.sequences:
            started = time.perf_counter()
            for sequence in self.sequences:
                self.reserve(sequence)
            tree = self._step_tree()
            behind = self._behind() if self.chooser is not None and tree.size > 1 else 0
            trees, drafting = propose(self.drafter, tree, self.sequences, self.pool, self.target, self.agree)
            self._ended += self._forward(trees, _Timed(started, drafting, behind))
            if self.late is not None and reason is not None:
                self.stats.eager_reasons[reason] = self.stats.eager_reasons.get(reason, 0) + 1
        elif self.prefilling:
            self._ended += self._forward(None)
        ended, self._ended = self._ended, []
        return ended

    def settle(self) -> None:
        """Read all that is under way, before something is done with the sequences; the next step tells who ended."""
        while self.late is not None and self.late.under_way:
            self._ended += self.late.step(self, launch=False)

    def release(self, sequences: Sequence[SequenceState]) -> None:
        """Take sequences out, whatever state they are in; their pages are free at once."""
        gone = {id(sequence) for sequence in sequences}
        for sequence in (*self.prefilling, *self.sequences):
            if id(sequence) in gone:
                self.pool.close(sequence.slot, sequence.tokens[: sequence.computed])
                if isinstance(self.drafter, StatefulDrafter):
                    self.drafter.close(sequence.slot)
                sequence.slot, sequence.hidden = -1, None
        self.prefilling = [s for s in self.prefilling if id(s) not in gone]
        self.sequences = [s for s in self.sequences if id(s) not in gone]

    def abort(self) -> None:
        """Close all sequences, whatever state they are in."""
        for sequence in (*self.sequences, *self.prefilling):
            sequence.finished = True
        self.release([*self.sequences, *self.prefilling])
        if self.late is not None:
            self.late.drop()

    def next_tree(self) -> DraftTree:
        """What the next step verifies of each running sequence, if it wants that many tokens."""
        tree = self.tree
        if self.chooser is not None:
            tree = self.chooser.tree_for(len(self.sequences), self._backlog)
        return tree.pruned(min(tree.size, self.max_tree))

    def _step_tree(self) -> DraftTree:
        """The same without nodes deeper than the tokens anybody still wants."""
        return self.next_tree().truncated(max(s.remaining for s in self.sequences) - 1)

    def _behind(self) -> int:
        """Tokens of the running sequences, the newest ones apart, that the drafter doesn't know yet."""
        if not isinstance(self.drafter, PagedDrafter):
            return 0
        return sum(self.drafter.behind(sequence.slot, sequence.tokens) for sequence in self.sequences)

    def _backlog(self) -> DraftBacklog:
        return DraftBacklog(self._behind(), sum(s.remaining for s in self.sequences) / len(self.sequences))

    def _forward(self, trees: TreeBatch | None, timed: _Timed | None = None) -> list[SequenceState]:
        """One forward pass over trees and the next chunk, and everything that follows from it."""
        device, batch = self.target.device, trees
        chunk: Chunk | None = None
        keep: Tensor | None = None
        running = self.sequences if trees is not None else []
        nodes = 0 if trees is None else trees.num_tree_nodes
        if self.prefilling:
            # The plan counts the larger of a chunk and all trees.
            room = self.prefill_chunk if trees is None else max(self.prefill_chunk, self.pool.max_nodes) - nodes
            chunk = next_chunk(self.prefilling, room, self.pool, device)
            batch = chunk.batch if trees is None else concat_batches(trees, chunk.batch)
            keep = torch.cat([torch.arange(nodes, device=device), nodes + chunk.last_rows])
        assert batch is not None, "there is nothing to compute"
        output = self.target.forward(
            batch, StepAttention(self.pool, batch, self.backend), keep, logits=self.verifier.needs_logits
        )
        fresh = chunk.fresh if chunk is not None else []
        all_trees, hidden = trees, output.hidden
        emitted: list[list[int]] = []
        last: list[int] = []
        if fresh:
            first = first_trees(fresh, self.pool, device)
            all_trees = first if trees is None else concat_batches(trees, first)
        if all_trees is not None:
            verdict = self.verifier(all_trees, [*running, *fresh], output.rows(nodes + len(fresh)))
            emitted, last = verdict.emitted, verdict.last[: len(running)]
            if trees is not None:
                hidden = self._commit(trees, verdict, hidden)
        depth = 0 if trees is None else trees.max_depth
        finished = self.advance(running, emitted, nodes, depth, hidden.unbind(0), chunk)
        if self.chooser is not None and timed is not None and trees is not None and trees.tree is not None:
            rest = time.perf_counter() - timed.started - timed.drafting
            self.chooser.stepped(trees.tree, last, rest if chunk is None else None, timed.drafting, timed.behind)
        return finished

    def _commit(self, trees: TreeBatch, verdict: Verdict, hidden: Tensor) -> Tensor:
        """Write what the running sequences accepted behind their tokens, where a failed step may leave it.

        Returns their last accepted nodes' hidden states, and behind them the kept rows of chunks.
        """
        count, nodes = trees.num_trees, trees.num_tree_nodes
        index, length = verdict.accept_index[:count], verdict.accept_length[:count]
        commit_accepted(self.pool, trees, index, length, self.backend)
        if not trees.max_depth:  # each tree is its root
            return hidden
        last = trees.last_rows(index, length)
        if len(hidden) > nodes:
            last = torch.cat([last, torch.arange(nodes, len(hidden), dtype=last.dtype, device=last.device)])
        return hidden[last.long()]

    def advance(
        self,
        running: Sequence[SequenceState],
        emitted: Sequence[Sequence[int]],
        nodes: int,
        depth: int,
        hidden: Sequence[Tensor] | None,
        chunk: Chunk | None = None,
    ) -> list[SequenceState]:
        """The step's only part that changes sequences: all of them, or, if somebody's ``stop`` fails, none.

        Args:
            running: of the running sequences those that the step was for. nodes, depth: all their trees' nodes, and
                how deep each is.
            emitted: their tokens, and behind them the first ones of prompts that ``chunk`` completed.
            hidden: the states that the newest of these tokens came from; ``None``: a later step tells.

        Returns those that ended.
        """
        fresh, ended = (chunk.fresh, chunk.ended) if chunk is not None else ([], [])
        takers = [*running, *fresh]
        before = [len(sequence.tokens) for sequence in takers]
        try:
            taken = [sequence.take(tokens) for sequence, tokens in zip(takers, emitted, strict=True)]
        except BaseException:
            for sequence, length in zip(takers, before, strict=True):
                sequence.rollback(length)
            raise
        if running:
            accepted = [len(tokens) - 1 for tokens in emitted[: len(running)]]
            self.stats.record_step(accepted, nodes, depth)
            self.stats.tokens += sum(taken[: len(running)])
            for sequence, drafts in zip(running, accepted, strict=True):
                sequence.steps += 1
                sequence.accepted += drafts
                sequence.computed += drafts + 1
        for sequence, size in chunk.parts if chunk is not None else ():
            again = min(size, max(0, sequence.lost - sequence.computed))
            sequence.computed += size
            self.stats.recomputed_tokens += again
            self.stats.prefill_tokens += size - again
            self.stats.slots_written += size
        for sequence, state in zip([*running, *ended], hidden, strict=True) if hidden is not None else ():
            sequence.hidden = state
        joined = {id(sequence) for sequence in ended}
        self.prefilling = [s for s in self.prefilling if id(s) not in joined]
        self.sequences = [*self.sequences, *ended]
        finished = [s for s in self.sequences if s.finished]
        self.release(finished)
        return finished
