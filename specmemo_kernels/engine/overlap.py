"""Overlap scheduling: a step is launched before the tokens of the previous one are read.

While the set of sequences stays the same, each step starts from the previous step's state on the device
(:class:`specmemo_kernels.engine.device_step.DeviceStep`). The host reads a step's tokens while the next step runs. If
they finish a sequence, its results of the next step are discarded. Before any other change of the batch, steps in
flight are drained. A drafter on the host needs a step's tokens for the next one, so its steps are in flight alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from specmemo_kernels.cache.paged_kv import OutOfPages
from specmemo_kernels.engine.device_step import StepShape
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.step_graph import CaptureFailed, StepCache
from specmemo_kernels.engine.tree_pass import propose
from specmemo_kernels.engine.verify import read_rows
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.target import TargetOutput
from specmemo_kernels.tree.draft_tree import DraftTree
from specmemo_kernels.tree.tree_budget import TreeBudget, Trees

if TYPE_CHECKING:
    from specmemo_kernels.engine.decode import SpecDecoder

#: Most steps in flight, by type of device: on a CPU nothing runs beside the host.
IN_FLIGHT = {"cuda": 2, "cpu": 1}
#: Why a step isn't launched of which only the part before verification is captured.
HOST_VERIFIES = "sampling or logits processors run on the host"


def slots_ahead(tree: Trees, in_flight: int) -> int:
    """KV slots that a sequence may need behind its last token.

    Args:
        tree: the largest tree of a step; the nodes of its longest path are written behind the newest token.
        in_flight: most steps whose paths follow each other (:class:`OverlappedSteps`).
    """
    return in_flight * (tree.max_depth + 1) - 1


@dataclass(frozen=True)
class _Flight:
    """A step in flight, launched at ``started``. ``rows``: its verdict in host memory, complete after ``arrived``;
    ``timed``: neither before nor with a capture. ``drafting``: seconds of a drafter on the host, which had ``behind``
    tokens to compute first; ``None``: the step drafts."""

    sequences: list[SequenceState]
    tree: Trees
    rows: torch.Tensor
    arrived: torch.cuda.Event | None
    started: float
    timed: bool
    drafting: float | None
    behind: int


class RecordedPass(NamedTuple):
    """The output of a captured pass, or ``None`` and the reason.

    Attributes:
        trees: of the pass, or those that were filled before it couldn't be captured; ``None``: none were filled.
        drafting: seconds of a drafter on the host; ``None``: it didn't run.
        timed: no capture was made or tried, and the pass was like later ones.
    """

    output: TargetOutput | None
    reason: str = ""
    trees: TreeBatch | None = None
    drafting: float | None = None
    timed: bool = True


class OverlappedSteps:
    """The steady-state steps of one decoder.

    Args:
        steps: cached device steps, possibly shared with later decoders.
        max_in_flight: most steps in flight.
        must: raise where a step can't be captured; else steps run eagerly from then on.

    Attributes:
        suspended: launch nothing; set by the decoder when memory is low.
    """

    def __init__(self, steps: StepCache, max_in_flight: int, must: bool = False) -> None:
        self.steps, self.max_in_flight, self.must, self.suspended = steps, max_in_flight, must, False
        self._flights: deque[_Flight] = deque()
        self._read_at: float | None = None

    @property
    def in_flight(self) -> bool:
        """Whether launched steps haven't been read."""
        return bool(self._flights)

    def why_not(self, decoder: SpecDecoder) -> str | None:
        """Why the decoder's next step can't be launched now; ``None`` if it can, with its pages reserved."""
        if (reason := self._no_steps(decoder)) is not None:
            return reason
        if not decoder.verifier.is_greedy(decoder.sequences):
            return HOST_VERIFIES
        if self._flights and self._flights[-1].sequences != decoder.sequences:
            return "the set of sequences has changed"
        if all(sequence.remaining <= len(self._flights) for sequence in decoder.sequences):
            return "all sequences are about to end"
        ahead = sum(flight.tree.max_depth + 1 for flight in self._flights) + decoder.next_tree().max_depth
        try:
            for sequence in decoder.sequences:
                decoder.pool.reserve(sequence.slot, len(sequence.tokens) + ahead)
        except OutOfPages:
            return "too few pages are free"
        return None

    def recorded_pass(self, decoder: SpecDecoder, tree: Trees, reason: str) -> RecordedPass:
        """The captured pass over ``tree`` of a step that can't be launched for ``reason``, because the host verifies.

        Raises:
            CaptureFailed: the pass can't be captured, and ``must`` is true.
            Exception: of the target, or a failed allocation; the step can be retried.
        """
        if reason != HOST_VERIFIES:
            return RecordedPass(None, reason)
        if not self.steps.target.reads_hidden:
            return RecordedPass(None, f"{reason}, and the model computes logits outside of its lm_head")
        if decoder.reader is not None or not isinstance(tree, DraftTree):
            return RecordedPass(None, f"{reason}, and the drafter reads hidden states")
        if tree != decoder.next_tree():  # these trees come in many sizes
            return RecordedPass(None, "the last trees of an answer are truncated")
        count, trees, drafts = len(decoder.sequences), None, None
        drafting: float | None = None
        if self.steps.host_drafter is not None:
            trees, drafting = decoder.propose(tree)
            assert isinstance(trees.tree, DraftTree), "it is a part of the tree"
            tree, drafts = trees.tree, trees.tokens.view(count, -1)
        shape = self._shape(decoder, tree, decoder.tree.width if drafts is None else 0, verified=False)
        self.steps.load(decoder.sequences)
        self.steps.mark_current(())
        try:
            step, timed = self.steps.launch(shape, tree, drafts)
        except CaptureFailed:
            if self.must:
                raise
            return RecordedPass(None, self.steps.failed, trees, drafting, timed=False)
        decoder.stats.graph_steps += 1
        assert step.nodes is not None, "the host verifies"
        nodes = step.nodes[: count * tree.size]
        output = TargetOutput(nodes if tree.max_depth else nodes.clone(), None)
        return RecordedPass(output, "", step.trees(count) if trees is None else trees, drafting, timed)

    def _no_steps(self, decoder: SpecDecoder) -> str | None:
        """Why no pass of the decoder can be captured now."""
        if decoder.prefilling:
            return "a prompt is in prefill"
        if self.suspended or decoder.max_tree < decoder.tree.size:
            return "memory is low"
        if not self.steps.target.static:
            return "the target's forward pass needs the host"
        return self.steps.failed or None

    def _shape(self, decoder: SpecDecoder, tree: Trees, width: int, verified: bool = True) -> StepShape:
        """The shape of the decoder's next step over ``tree``.

        Padded steps over parts of a tree have the whole tree's depth, so that parts of a size have one shape.
        """
        sequences, depth = self.steps.padded(len(decoder.sequences), tree.size), tree.max_depth
        if self.steps.pads and depth:
            depth = decoder.tree.max_depth
        shape = StepShape(sequences, tree.size, depth, width, self._length_bound(decoder), verified=verified)
        if decoder.reader is not None and isinstance(tree, DraftTree):
            shape = replace(shape, tree=tree)  # its passes depend on the nodes of each depth
        return shape

    def _length_bound(self, decoder: SpecDecoder) -> int:
        """A bound of the tokens in pages of any sequence: a power of two, so that few graphs serve all lengths."""
        longest = max(len(s.prompt) + s.max_new_tokens for s in decoder.sequences) + decoder.slots_ahead
        room = decoder.pool.block_table.shape[1] * decoder.pool.page_size
        return int(min(room, 1 << (longest - 1).bit_length()))

    def step(self, decoder: SpecDecoder, launch: bool) -> list[SequenceState]:
        """Launch a step if ``launch``, and read the previous one; returns the sequences that it finished.

        Raises:
            Exception: of the target, the drafter or a ``stop``, or a failed allocation; the step can be retried.
        """
        if launch and len(self._flights) < self.max_in_flight:
            try:
                self._launch(decoder)
            except CaptureFailed:
                if self.must:
                    raise
                launch = False
        if self._flights and (len(self._flights) == self.max_in_flight or not launch):
            return self._read(decoder)
        return []

    def drop(self) -> None:
        """Wait for the steps in flight and discard them."""
        for flight in self._flights:
            if flight.arrived is not None:
                flight.arrived.synchronize()
        self._flights.clear()

    def _launch(self, decoder: SpecDecoder) -> None:
        sequences, tree = list(decoder.sequences), decoder.next_tree()
        if not self._flights:
            self.steps.load(sequences)
        self.steps.mark_current(())
        filled, behind = None, 0
        if self.steps.host_drafter is not None:
            self.steps.trim()
            tree = decoder.next_tree() if self.steps.pads else decoder.step_tree()
            behind = decoder.behind(tree)
            filled = propose(
                self.steps.host_drafter, tree, sequences, self.steps.roots(len(sequences)), decoder.target,
                decoder.agree, whole=self.steps.pads,
            )  # fmt: skip
            tree = filled.tree
        width = (tree if isinstance(tree, TreeBudget) else decoder.tree).width
        shape = self._shape(decoder, tree, width)
        device = decoder.target.device
        on_gpu = device.type == "cuda"
        # Allocated before the launch: a failure afterwards would lose the step.
        rows = torch.empty(len(sequences), 2 * shape.depth + 3, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        step, timed = self.steps.launch(shape, tree, None if filled is None else filled.tokens)
        decoder.stats.graph_steps += 1
        if not timed:  # the launch delayed the steps in flight
            self._flights = deque(replace(flight, timed=False) for flight in self._flights)
        if not timed or not self._flights:
            self._read_at = None
        rows.copy_(step.emitted[: len(sequences)], non_blocking=True)
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(device))  # the copy's stream, whatever device is current
        drafting = None if filled is None else filled.seconds
        self._flights.append(_Flight(sequences, tree, rows, arrived, started, timed, drafting, behind))

    def _read(self, decoder: SpecDecoder) -> list[SequenceState]:
        """Apply the oldest step's verdict to the sequences; a failure leaves it in flight, to be retried."""
        flight = self._flights[0]
        if flight.arrived is not None:
            flight.arrived.synchronize()
        emitted, paths = read_rows(flight.rows)
        running = {id(sequence) for sequence in decoder.sequences}
        rows = [row for row, sequence in enumerate(flight.sequences) if id(sequence) in running]
        if not rows:
            self._flights.popleft()
            return []
        hidden = None
        if len(self._flights) == 1:  # the last step in flight: an eager step, which reads them, may follow
            states = self.steps.hidden(len(flight.sequences))
            hidden = [states[row] for row in rows]
        alive, accepted = [flight.sequences[row] for row in rows], [emitted[row] for row in rows]
        finished = decoder.advance(alive, accepted, len(rows) * flight.tree.size, hidden)
        decoder.release(finished)
        self._flights.popleft()
        if not self._flights and len(rows) == len(flight.sequences) and not finished:
            self.steps.mark_current(flight.sequences)
        if decoder.chooser is not None:
            alive_paths = [paths[row] for row in rows]
            decoder.chooser.stepped(flight.tree, alive_paths, self._seconds(flight), flight.drafting, flight.behind)
        return finished

    def _seconds(self, flight: _Flight) -> float | None:
        """The time from the previous step's end, or without one in flight from the launch, to this step's end.

        ``None`` if one of them isn't ``timed``.
        """
        now, before = time.perf_counter(), self._read_at
        self._read_at = now if flight.timed else None
        return now - (flight.started if before is None else before) if flight.timed else None
