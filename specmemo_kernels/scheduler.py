"""Many sequences through one :class:`SpecDecoder`: first come, first served, as many at once as pages allow."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

from specmemo_kernels.decode import SpecDecoder
from specmemo_kernels.paged_kv import OutOfPages
from specmemo_kernels.sequence import SequenceState


class Scheduler:
    """Admits sequences in the order they came, beside those that run, and takes pages back when they get scarce.

    A sequence is admitted when a place is free and the pages that it needs now are: its context and one step, not the
    worst case of its whole length. Contexts are computed in chunks inside the steps of the running sequences. When the
    running sequences can't all grow, the youngest gives its pages back and waits at its place in the order; later its
    tokens are computed anew, so nothing that it emitted changes. The oldest is never preempted, so everybody is served.

    Args:
        decoder: with nothing running; the scheduler alone admits to it.
        max_sequences: most sequences at once, within the rows of the decoder's block table.

    :meth:`abort` may be called from anywhere, also from another thread or a sequence's own ``stop``; everything else
    belongs to one thread.
    """

    def __init__(self, decoder: SpecDecoder, max_sequences: int) -> None:
        rows = decoder.pool.block_table.shape[0]
        if not 1 <= max_sequences <= rows:
            raise ValueError(f"max_sequences is {max_sequences}, the pool has {rows} rows; give 1 to {rows}")
        self.decoder, self.max_sequences = decoder, max_sequences
        self._waiting: list[SequenceState] = []
        self._arrivals = 0
        self._lock = threading.RLock()
        self._stepping = False

    def submit(self, sequence: SequenceState) -> None:
        """Queue a sequence behind all that came before.

        Raises:
            OutOfPages: it could never run, not even alone.
            ValueError: its prompt is empty, or it wants no tokens.
        """
        pool = self.decoder.pool
        if not sequence.prompt or sequence.max_new_tokens < 1:
            raise ValueError(
                f"a request has {len(sequence.prompt)} prompt tokens and max_new_tokens {sequence.max_new_tokens}; "
                "both must be at least 1"
            )
        most = self.most_slots(len(sequence.prompt), sequence.max_new_tokens)
        if pool.pages_for(most) > pool.num_pages:
            raise OutOfPages(
                f"a prompt of {len(sequence.prompt)} and {sequence.max_new_tokens} new tokens may take {most} slots, "
                f"the pool has {pool.num_pages * pool.page_size}; shorten the prompt or max_new_tokens, or raise "
                "memory_budget"
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._waiting.append(sequence)

    def most_slots(self, prompt: int, new_tokens: int) -> int:
        """Slots that a sequence may come to need: the deepest candidate lies ``max_depth`` behind its last token."""
        return prompt + new_tokens + self.decoder.tree.max_depth

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        """Those without pages, next one first."""
        return tuple(self._waiting)

    @property
    def active(self) -> tuple[SequenceState, ...]:
        """Those that hold pages, in the order they came."""
        return tuple(sorted((*self.decoder.sequences, *self.decoder.prefilling), key=_arrival))

    @property
    def idle(self) -> bool:
        """Whether nobody is left."""
        return not (self._waiting or self.decoder.sequences or self.decoder.prefilling)

    def abort(self, sequence: SequenceState) -> None:
        """End a sequence now; what it emitted stays with it. One that has ended stays as it is.

        Its pages are free on return, or, during a step, when that step ends.
        """
        if not sequence.finished:
            sequence.aborted = sequence.finished = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._stepping:
                    self._drop_aborted()
            finally:
                self._lock.release()

    def step(self) -> list[SequenceState]:
        """Admit whom there is room for, then one forward pass; returns the sequences that ended, also the aborted.

        After an exception (of the model, the drafter or a ``stop``) only :meth:`close` is left.
        """
        with self._lock:
            self._stepping = True
            try:
                ended = self._drop_aborted()
                self._admit()
                self._make_room()
                ended += self.decoder.step()
            finally:
                self._stepping = False
            return ended + self._drop_aborted()

    def run(self) -> None:
        """Steps until nobody is left; whatever happens, all pages are free afterwards."""
        try:
            while not self.idle:
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Abort everybody."""
        with self._lock:
            for sequence in (*self._waiting, *self.active):
                sequence.aborted = sequence.finished = True
            self._drop_aborted()

    def _drop_aborted(self) -> list[SequenceState]:
        gone = [s for s in (*self._waiting, *self.active) if s.finished]
        self._waiting = [s for s in self._waiting if not s.finished]
        self.decoder.release(gone)
        return gone

    def _admit(self) -> None:
        """The next ones in order, while each leaves a page for everybody who runs already."""
        pool = self.decoder.pool
        while self._waiting and (active := len(self.active)) < self.max_sequences:
            sequence = self._waiting[0]
            needed = pool.pages_for(len(sequence.context) + 1 + self.decoder.tree.max_depth)
            if active and needed + active > pool.free_pages:
                return
            self.decoder.admit([sequence])
            del self._waiting[0]

    def _make_room(self) -> None:
        """Pages for what each running sequence may accept in this step, oldest first; the youngest make way."""
        for sequence in self.active:
            while any(sequence is s for s in self.decoder.sequences):
                try:
                    self.decoder.reserve(sequence)
                    break
                except OutOfPages:
                    self._preempt(self.active[-1])

    def _preempt(self, sequence: SequenceState) -> None:
        self.decoder.release([sequence])
        sequence.preemptions += 1
        self.decoder.stats.preemptions += 1
        bisect.insort(self._waiting, sequence, key=_arrival)


def submit_all(scheduler: Scheduler, sequences: Sequence[SequenceState]) -> None:
    """Queue sequences in their order; if one is refused, none stays.

    Raises:
        OutOfPages, ValueError: as :meth:`Scheduler.submit`.
    """
    try:
        for sequence in sequences:
            scheduler.submit(sequence)
    except BaseException:
        scheduler.close()
        raise


def _arrival(sequence: SequenceState) -> int:
    return sequence.arrival
