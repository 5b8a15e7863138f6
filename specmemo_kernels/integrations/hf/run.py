"""One run of the patched model: its sequences, their steps on every rank, and their new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specmemo_kernels.engine.scheduler import submit_all
from specmemo_kernels.engine.scores import TokenScore
from specmemo_kernels.engine.sequence import SequenceState
from specmemo_kernels.engine.verify import Verifier

if TYPE_CHECKING:
    from specmemo_kernels.integrations.hf.handle import SpecMemo


@dataclass(frozen=True)
class Piece:
    """The new ``tokens`` of request ``index`` from one step, and whether the request has ``finished``.

    ``scores``: of the tokens, if the request has ``logprobs``.
    """

    index: int
    tokens: list[int]
    finished: bool
    scores: list[TokenScore] = field(default_factory=list)


class PieceReader:
    """Reads a sequence's new tokens, step by step."""

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence, self.done = sequence, False
        self._sent = 0

    def read(self) -> Piece | None:
        """The tokens since the last call, and the end once; ``None``: nothing is new."""
        sequence, sent = self.sequence, self._sent
        if self.done or not (sequence.finished or sequence.emitted > sent):
            return None
        self._sent, self.done = sequence.emitted, sequence.finished
        return Piece(sequence.index, sequence.new_tokens[sent:], sequence.finished, sequence.scores[sent:])


class SequenceRun:
    """Generates sequences of a locked model, from their submission until :meth:`close`.

    Every rank of a tensor parallel model runs the same steps.

    Args:
        admitting: others may be submitted later, see :meth:`SpecMemo.scheduler`.

    Attributes:
        scheduler: takes further sequences and aborts, see :class:`Scheduler` for the threads.

    Raises:
        BudgetError, OutOfPages, ValueError: a sequence is refused; none is submitted.
    """

    def __init__(
        self, handle: SpecMemo, sequences: Sequence[SequenceState], verifier: Verifier, *, admitting: bool = False
    ) -> None:
        self._handle = handle
        self.scheduler = handle.scheduler(sequences, verifier, admitting=admitting)
        if not admitting:
            submit_all(self.scheduler, sequences)

    def step(self, sequences: Sequence[SequenceState], aborted: Sequence[int] = ()) -> None:
        """One step of all submitted sequences, after rank 0's aborts.

        Args:
            sequences: the same on all ranks. aborted: indices in them; only rank 0's count.
        """
        scheduler = self.scheduler
        for index in self._handle.ranks.step(sequences, scheduler.decoder.pool, aborted):
            scheduler.abort(sequences[index])
        scheduler.step()

    def close(self) -> None:
        """Abort what still runs and free the pages."""
        try:
            self.scheduler.close()
        finally:
            self._handle.record_bytes()
