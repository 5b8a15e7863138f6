"""The speculative loop: draft trees, verify them in one forward pass with prompt chunks, commit the accepted nodes.

A step is a transaction: all tensors are allocated first, then the sequences change, on the host only. A failure before
that, such as an allocation, leaves every sequence as it was, and the step can be retried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.drafting.base import AnyDrafter, FeatureDrafter, PagedDrafter, StatefulDrafter
from specmemo_kernels.engine.overlap import OverlappedSteps, RecordedPass, slots_ahead
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.stats import DecodeStats
from specmemo_kernels.engine.tree_pass import (
    Chunk,
    next_chunk,
    prompt_scores,
    propose_trees,
    tree_pass,
)
from specmemo_kernels.engine.verify import Verdict, Verifier
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetModel, TargetOutput
from specmemo_kernels.tree.choice import DraftBacklog, TreeChooser
from specmemo_kernels.tree.tree_budget import Trees

Tensor = torch.Tensor


@dataclass(frozen=True)
class _StepTiming:
    """``started``: ``time.perf_counter()``; ``drafting``: drafter seconds, ``None``: they are the step's; ``behind``:
    tokens it computed first; ``timed``: the pass ran neither before nor with its capture."""

    started: float
    drafting: float | None
    behind: int
    timed: bool


class SpecDecoder:
    """Generates for a changing set of sequences; every step includes all of them.

    Args:
        tree: the largest tree of a step, or the largest size of dynamic trees.
        pool: pages; every open sequence holds a row of its block table.
        prefill_chunk: maximum prompt tokens of a pass without trees. A pass with trees has at most
            ``max(prefill_chunk, pool.max_nodes)`` rows in total.
        backend: name of the operators' backend.
        chooser: prunes the tree before each step; ``None``: every step verifies the whole tree.
        overlapped: runs steps from device state, on a GPU overlapped with the host; ``None``: all steps run eagerly.
        agree: as in :func:`specmemo_kernels.engine.tree_pass.propose`.

    Attributes:
        reader: the drafter, if it reads features.
        sequences: running sequences. prefilling: sequences in prefill, in the order of admission.
        max_tree: most nodes per sequence, below the tree's size while memory is low (:meth:`limit`).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: AnyDrafter,
        tree: Trees,
        pool: PagedKVPool,
        verifier: Verifier,
        *,
        prefill_chunk: int,
        backend: str | None = None,
        stats: DecodeStats | None = None,
        chooser: TreeChooser | None = None,
        overlapped: OverlappedSteps | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chooser, self.overlapped, self.agree = chooser, overlapped, agree
        self.target, self.drafter, self.tree, self.pool, self.verifier = target, drafter, tree, pool, verifier
        # Checked once, because each check of a protocol takes about 25 microseconds.
        self.reader = drafter if isinstance(drafter, FeatureDrafter) else None
        self.prefill_chunk, self.backend = prefill_chunk, backend
        self.stats = stats if stats is not None else DecodeStats()
        self.sequences: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self.max_tree = tree.size
        self._ended: list[SequenceState] = []

    def limit(self, max_tree: int, prefill_chunk: int, *, memory_low: bool) -> None:
        """Bound the next steps; if memory is low, drain steps in flight and free their graphs."""
        self.max_tree, self.prefill_chunk = max_tree, prefill_chunk
        if self.overlapped is not None:
            self.overlapped.suspended = memory_low
            if memory_low:
                self.drain()
                self.overlapped.steps.clear()

    @property
    def slots_ahead(self) -> int:
        """KV slots that a sequence may need behind its last token."""
        return slots_ahead(self.tree, 1 if self.overlapped is None else self.overlapped.max_in_flight)

    def admit(self, sequences: Sequence[SequenceState]) -> None:
        """Allocate pages for the sequences' contexts; the next steps compute what cached pages don't hold.

        A swapped sequence is copied back and continues where it was.

        Raises:
            OutOfPages: a sequence doesn't fit; none of this call was admitted.
        """
        opened: list[SequenceState] = []
        hidden_states: list[Tensor | None] = []
        try:
            for sequence in sequences:
                swapped = sequence.swapped  # a swapped sequence writes to its pages, so it shares none
                sequence.open(*self.pool.open_with(sequence.shareable if swapped is None else ()))
                opened.append(sequence)
                self.pool.reserve(sequence.slot, len(sequence.context))
                if swapped is not None:
                    self.pool.swap_in(sequence.slot, swapped.pages)
                hidden = None if swapped is None else swapped.hidden
                hidden_states.append(None if hidden is None else hidden.to(self.target.device))
        except BaseException:
            for sequence in opened:
                self.pool.close(sequence.slot, sequence.tokens, sequence.computed)
                sequence.close()
            raise
        for sequence, hidden in zip(sequences, hidden_states, strict=True):
            if sequence.swapped is None:
                self.stats.reused_tokens += sequence.computed
            else:
                sequence.resume(hidden)
            (self.prefilling if hidden is None else self.sequences).append(sequence)

    def swap_out(self, sequence: SequenceState) -> None:
        """Copy an open sequence's keys, values and hidden state to host memory (:meth:`release` frees its pages)."""
        tokens = sequence.computed if sequence.hidden is None else len(sequence.context)
        sequence.swap_out(self.pool.swap_out(sequence.slot, tokens))

    def reserve(self, sequence: SequenceState) -> None:
        """Reserve the pages that a running sequence may fill in the next step.

        Raises:
            OutOfPages: not enough are free; the sequence keeps what it had.
        """
        # The newest token isn't in pages yet, so the deepest path needs `max_depth` slots behind it.
        self.pool.reserve(sequence.slot, len(sequence.tokens) + self.step_tree().max_depth)

    def step(self) -> list[SequenceState]:
        """One forward pass: a tree for each running sequence, and the next prompt chunk.

        Returns the finished sequences, whose pages are free; with ``overlapped``, of the previous pass.

        Raises:
            OutOfPages: the accepted tokens might not fit.
            Exception: of the target, the drafter, the verifier or a ``stop``, or a failed allocation. Nothing was
                emitted, and the step can be retried.
        """
        reason: str | None = "there are no running sequences"
        if self.overlapped is not None and self.sequences:
            reason = self.overlapped.why_not(self)
        if self.overlapped is not None and (reason is None or self.overlapped.in_flight):
            self._ended += self.overlapped.step(self, launch=reason is None)
        elif self.sequences:
            started = time.perf_counter()
            for sequence in self.sequences:
                self.reserve(sequence)
            tree = self.step_tree()
            behind = self.behind(tree)
            recorded = RecordedPass(None)
            if self.overlapped is not None and reason is not None:
                recorded = self.overlapped.recorded_pass(self, tree, reason)
            trees, drafting = recorded.trees, recorded.drafting
            if trees is None:
                trees, drafting = self.propose(tree)
            if self.overlapped is not None and self.overlapped.steps.host_drafter is None:
                drafting = None  # part of the step's seconds, as where it is captured
            timing = _StepTiming(started, drafting, behind, recorded.timed)
            self._ended += self._forward(trees, timing, recorded.output)
            if recorded.reason:
                self.stats.eager_reasons[recorded.reason] = self.stats.eager_reasons.get(recorded.reason, 0) + 1
        elif self.prefilling:
            self._ended += self._forward(None)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Read all steps in flight; :meth:`step` returns the sequences that they finished."""
        while self.overlapped is not None and self.overlapped.in_flight:
            self._ended += self.overlapped.step(self, launch=False)

    def release(self, sequences: Sequence[SequenceState]) -> None:
        """Remove sequences in any state; their pages are free at once."""
        removed = {id(sequence) for sequence in sequences}
        for sequence in (*self.prefilling, *self.sequences):
            if id(sequence) in removed:
                if self.pool.is_open(sequence.slot):  # not if an interrupt left this function
                    self.pool.close(sequence.slot, sequence.tokens, sequence.computed)
                if isinstance(self.drafter, StatefulDrafter):
                    self.drafter.close(sequence.slot)
                sequence.close()
        self.prefilling = [s for s in self.prefilling if id(s) not in removed]
        self.sequences = [s for s in self.sequences if id(s) not in removed]

    def abort(self) -> None:
        """Close all sequences, and drop the steps in flight."""
        for sequence in (*self.sequences, *self.prefilling):
            sequence.finish()
        self.release([*self.sequences, *self.prefilling])
        if self.overlapped is not None:
            self.overlapped.drop()

    def next_tree(self) -> Trees:
        """The tree of the next step, before it is truncated to the sequences' remaining tokens."""
        tree = self.tree
        if self.chooser is not None:
            tree = self.chooser.tree_for(len(self.sequences), self._backlog)
        return tree.pruned(min(tree.size, self.max_tree))

    def step_tree(self) -> Trees:
        """:meth:`next_tree` without nodes deeper than any sequence's remaining tokens."""
        return self.next_tree().truncated(max(s.remaining for s in self.sequences) - 1)

    def propose(self, tree: Trees) -> tuple[TreeBatch, float]:
        """The trees to verify, and the seconds that the drafter took."""
        self._trim()
        return propose_trees(self.drafter, self.reader, tree, self.sequences, self.pool, self.target, self.agree)

    def _trim(self) -> None:
        """Free what captured steps hold, before another pass."""
        if self.overlapped is not None:
            self.overlapped.steps.trim()

    def behind(self, tree: Trees) -> int:
        """What the chooser is told of a step over ``tree``: tokens that the drafter computes before it drafts."""
        return self._behind() if self.chooser is not None and tree.size > 1 else 0

    def _behind(self) -> int:
        """Tokens that the drafter must compute before it drafts for the running sequences."""
        if not isinstance(self.drafter, PagedDrafter):
            return 0
        return sum(self.drafter.behind(sequence.slot, sequence.tokens) for sequence in self.sequences)

    def _backlog(self) -> DraftBacklog:
        return DraftBacklog(self._behind(), sum(s.remaining for s in self.sequences) / len(self.sequences))

    def _forward(
        self, trees: TreeBatch | None, timing: _StepTiming | None = None, output: TargetOutput | None = None
    ) -> list[SequenceState]:
        """Run one pass over trees and the next chunk, and advance the sequences; returns the finished sequences.

        ``output``: of a captured pass over ``trees``, without a chunk.
        """
        self._trim()
        running = self.sequences if trees is not None else []
        nodes, depth = (0, 0) if trees is None else (trees.num_tree_nodes, trees.max_depth)
        chunk: Chunk | None = None
        if self.prefilling:
            # The plan budgets max(prefill_chunk, max_nodes) rows: the chunk gets the rows that the trees leave.
            room = self.prefill_chunk if trees is None else max(self.prefill_chunk, self.pool.max_nodes) - nodes
            chunk = next_chunk(self.prefilling, room, self.pool, self.target.device)
        emitting = [*running, *(chunk.fresh if chunk is not None else ())]

        def verify(batch: TreeBatch, output: TargetOutput) -> Verdict:
            return self.verifier(batch, emitting, output)

        scored = [] if chunk is None else chunk.scored
        new_scores: list[TokenScore] = []

        def score(output: TargetOutput) -> None:
            assert chunk is not None, "only chunks have rows to score"
            new_scores.extend(prompt_scores(self.target, chunk, output, self.pool.max_nodes))

        with self._changing_states(running, chunk) as accepted:
            verdict, hidden = tree_pass(
                self.target, self.pool, self.backend, trees, chunk, verify, self.reader,
                logits=bool(scored) or not self.verifier.is_greedy(emitting), score=score, output=output,
            )  # fmt: skip
            emitted = [] if verdict is None else verdict.emitted
            scores = [] if verdict is None else verdict.scores
            finished = self.advance(running, emitted, nodes, hidden.unbind(0), chunk, scores)
            for row, each in zip(scored, new_scores, strict=True):
                row.sequence.take_prompt_score(each)
            if depth and verdict is not None:
                size = nodes // len(running)
                verified = enumerate(zip(running, verdict.paths, strict=False))
                accepted |= {s.slot: [i * size + node for node in path] for i, (s, path) in verified}
        self.release(finished)
        if self.chooser is not None and timing is not None and verdict is not None and trees is not None and trees.tree:
            seconds = time.perf_counter() - timing.started - (timing.drafting or 0.0)
            paths = verdict.paths[: len(running)]
            measured = chunk is None and timing.timed
            self.chooser.stepped(trees.tree, paths, seconds if measured else None, timing.drafting, timing.behind)
        return finished

    def _changing_states(
        self, running: Sequence[SequenceState], chunk: Chunk | None
    ) -> AbstractContextManager[dict[int, list[int]]]:
        """A pass over these sequences, which changes the states of recurrent layers (:meth:`StatePool.during_pass`)."""
        prefilling = [sequence for sequence, _ in (chunk.parts if chunk is not None else ())]
        slots = [s.slot for s in (*running, *prefilling)]
        if self.pool.states is None:
            return nullcontext({})
        return self.pool.states.during_pass(slots, [max(0, len(s.prompt) - s.computed) for s in prefilling])

    def advance(
        self,
        running: Sequence[SequenceState],
        emitted: Sequence[Sequence[int]],
        nodes: int,
        hidden: Sequence[Tensor] | None,
        chunk: Chunk | None = None,
        scores: Sequence[Sequence[TokenScore]] = (),
    ) -> list[SequenceState]:
        """Change the sequences after a pass: all of them, or none if a ``stop`` fails.

        Args:
            running: the sequences whose trees were verified. nodes: of all these trees.
            emitted: the tokens of ``running``, then the first tokens of the prompts that ``chunk`` completed.
            hidden: the states that predicted the newest of these tokens; ``None``: a later step returns them.
            scores: of ``emitted``; empty where no sequence wants them.

        Returns the finished sequences, which the caller must release.
        """
        fresh, ended = (chunk.fresh, chunk.ended) if chunk is not None else ([], [])
        emitting = [*running, *fresh]
        lengths = [len(sequence.tokens) for sequence in emitting]
        try:
            scored = scores or [()] * len(emitting)
            taken = [s.take(tokens, each) for s, tokens, each in zip(emitting, emitted, scored, strict=True)]
        except BaseException:
            for sequence, length in zip(emitting, lengths, strict=True):
                sequence.rollback(length)
            raise
        if running:
            accepted = [len(tokens) - 1 for tokens in emitted[: len(running)]]
            self.stats.record_step(accepted, nodes)
            self.stats.tokens += sum(taken[: len(running)])
            for sequence, drafts in zip(running, accepted, strict=True):
                sequence.record_step(drafts)
        for sequence, size in chunk.parts if chunk is not None else ():
            recomputed = sequence.record_prefill(size)
            self.stats.recomputed_tokens += recomputed
            self.stats.prefill_tokens += size - recomputed
            self.stats.slots_written += size
        for sequence, state in zip([*running, *ended], hidden, strict=True) if hidden is not None else ():
            sequence.set_hidden(state)
        joined = {id(sequence) for sequence in ended}
        self.prefilling = [s for s in self.prefilling if id(s) not in joined]
        self.sequences = [*self.sequences, *ended]
        return [s for s in self.sequences if s.finished]
