"""Many sequences through one :class:`SpecDecoder`: first come, first served, as many at once as pages allow."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Sequence

from specmemo_kernels.cache.paged_kv import OutOfPages, pages_for
from specmemo_kernels.drafting.base import DrafterResidency, can_offload
from specmemo_kernels.engine.decode import SpecDecoder
from specmemo_kernels.engine.page_demand import PageDemand, slots_to_end
from specmemo_kernels.engine.pressure import (
    DegradationLevel,
    MemoryPressureController,
    is_out_of_memory,
    levels,
    raise_exhausted,
    release_cached,
)
from specmemo_kernels.engine.sequence import SequenceState


class Scheduler:
    """Continuous batching: admits sequences in order of arrival and preempts the youngest when pages run out.

    A sequence is admitted when a row is free and there are pages for its context and one step; pages for the rest of
    its length are not reserved. Prefill runs in chunks inside the steps of the running sequences. When pages run out,
    the youngest sequence is preempted and requeued in order of arrival. Its pages are swapped out
    to host memory. If the pool is in host memory already, or the copy can't be allocated, its tokens are recomputed.
    Emitted tokens never change. The oldest sequence is never preempted for a younger one, so no sequence starves.

    An allocation that fails inside a step changes no sequence: the degradation level is lowered and the step retried.
    Lower levels free memory step by step. A smaller tree frees scratch and activations. A smaller pool frees spare
    pages; all sequences are preempted for the reallocation. Then the drafter moves to the host. At the
    lowest levels fewer sequences run at once.

    Args:
        decoder: a decoder without sequences; only the scheduler may call its ``admit``.
        max_sequences: most sequences at once, within the rows of the decoder's block table.
        memory_pressure: the degradation level in force; ``None``: a controller that only reacts to failed allocations.
        max_pages: most pages of the pool when memory isn't low; ``None``: its current number.
        growing: allocate pages as they are needed (:class:`PageDemand`), up to ``max_pages``; else all at once.

    :meth:`abort` may be called from any thread and from a sequence's ``stop``; everything else belongs to one thread.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        max_sequences: int,
        *,
        memory_pressure: MemoryPressureController | None = None,
        max_pages: int | None = None,
        growing: bool = False,
    ) -> None:
        rows = decoder.pool.block_table.shape[0]
        if not 1 <= max_sequences <= rows:
            raise ValueError(f"max_sequences is {max_sequences}, the pool has {rows} rows; give 1 to {rows}")
        if memory_pressure is None:
            offloadable = can_offload(decoder.drafter)
            memory_pressure = MemoryPressureController(
                levels(decoder.tree.size, decoder.prefill_chunk, max_sequences, offloadable)
            )
        self.memory_pressure = memory_pressure
        self.demand = PageDemand(
            decoder.pool.page_size,
            decoder.slots_ahead,
            decoder.tree.max_depth,
            max_pages or decoder.pool.num_pages,
            growing,
        )
        self._applied: DegradationLevel | None = None
        self._residency = DrafterResidency(decoder.drafter, decoder.pool)
        self.decoder, self.max_sequences = decoder, max_sequences
        self._waiting: list[SequenceState] = []
        self._arrivals = 0
        self._lock = threading.RLock()
        self._stepping = False
        self._aborting: deque[SequenceState] = deque()

    def submit(self, sequence: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            OutOfPages: it doesn't fit the pool even alone.
            ValueError: its prompt is empty, or ``max_new_tokens`` is below 1.
        """
        demand = self.demand
        if not sequence.prompt or sequence.max_new_tokens < 1:
            raise ValueError(
                f"a request has {len(sequence.prompt)} prompt tokens and max_new_tokens {sequence.max_new_tokens}; "
                "both must be at least 1"
            )
        slots = slots_to_end(sequence, demand.slots_ahead, growing=False)
        if pages_for(slots, demand.page_size) > demand.max_pages:
            raise OutOfPages(
                f"a prompt of {len(sequence.prompt)} and {sequence.max_new_tokens} new tokens may take {slots} slots, "
                f"the pool has {demand.max_pages * demand.page_size}; shorten the prompt or max_new_tokens, or raise "
                "memory_budget"
            )
        with self._lock:  # an abort of another thread replaces the list
            self._arrivals += 1
            sequence.queue(self._arrivals)
            self._waiting.append(sequence)

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        """Sequences without pages, in order of arrival."""
        return tuple(self._waiting)

    @property
    def active(self) -> tuple[SequenceState, ...]:
        """Sequences with pages, in order of arrival."""
        return tuple(sorted((*self.decoder.sequences, *self.decoder.prefilling), key=_arrival))

    @property
    def idle(self) -> bool:
        """Whether there are no sequences."""
        return not (self._waiting or self.decoder.sequences or self.decoder.prefilling)

    def abort(self, sequence: SequenceState) -> None:
        """End a sequence and keep its emitted tokens; no effect on a finished sequence.

        Its pages are free on return, or at the end of a step in progress. Only the stepping thread changes sequences:
        a sequence aborted by another thread may still get that step's tokens.
        """
        self._aborting.append(sequence)
        self._take_aborts()

    def _take_aborts(self) -> None:
        """Apply the queued aborts; a thread inside a step applies them at its end."""
        while self._aborting and self._lock.acquire(blocking=False):
            try:
                if self._stepping:  # called from a `stop` inside this step
                    return self._end_aborted()
                self._drop_aborted()
            finally:
                self._lock.release()

    def _end_aborted(self) -> None:
        while self._aborting:
            self._aborting.popleft().abort()

    def step(self) -> list[SequenceState]:
        """Admit the sequences that fit, then run one forward pass; returns the sequences that ended in it.

        Those that :meth:`abort` ended between two steps aren't among them.

        After an exception (of the model, the drafter or a ``stop``, or of an allocation at the lowest degradation
        level) the scheduler can only be closed.
        """
        with self._lock:
            self._stepping = True
            try:
                ended = self._drop_aborted()
                move = self.memory_pressure.review()
                self.decoder.stats.grows += move > 0
                if move < 0:
                    self._shrink()
                ended += self._step()
            finally:
                self._stepping = False
            ended += self._drop_aborted()
        self._take_aborts()  # queued since the line above
        return ended

    def run(self) -> None:
        """Step until all sequences are finished; all pages are free afterwards, also after an exception."""
        try:
            while not self.idle:
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Abort all sequences."""
        with self._lock:
            self._aborting.extend((*self._waiting, *self.active))
            self._drop_aborted()
            self.decoder.abort()

    def _step(self) -> list[SequenceState]:
        """The decoder's step, retried at lower degradation levels while allocations fail."""
        while True:
            try:
                self._requeue_lost()
                self._adapt(self.memory_pressure.level)
                self._admit()
                self._make_room()
                return self.decoder.step()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self._shrink():
                    raise_exhausted(error, self.memory_pressure.level)
            # The error is freed here, and with it the frames that held the failed pass's tensors.
            self.decoder.stats.retries += 1

    def _requeue_lost(self) -> None:
        """Preempt the sequences whose states a failed pass has changed; they are computed again."""
        states = self.decoder.pool.states
        lost = frozenset(states.lost) if states is not None else ()
        for sequence in self.active if lost else ():
            if sequence.slot in lost:
                self._requeue(sequence)

    def _shrink(self) -> bool:
        moved = self.memory_pressure.shrink(min(self.max_sequences, len(self.active) + len(self._waiting)))
        self.decoder.stats.shrinks += moved
        return moved

    def _adapt(self, level: DegradationLevel) -> None:
        """Apply a degradation level; after a failure the next call completes it."""
        if level is self._applied:
            return
        self._applied = None
        decoder, max_active = self.decoder, min(level.max_sequences, self.max_sequences)
        decoder.limit(level.max_tree, level.prefill_chunk, memory_low=self.memory_pressure.shrunk > 0)
        nodes = min(level.max_tree, decoder.tree.size) * max_active
        if decoder.pool.max_nodes < nodes or (self.memory_pressure.shrunk and decoder.pool.max_nodes > nodes):
            decoder.pool.resize_scratch(nodes)
        while len(self.active) > max_active:
            self._preempt(self.active[-1])
        pages = self._pages_needed(level, max_active)
        if decoder.pool.num_pages != pages:
            self._resize(pages)
        self._residency.ensure(level.heads, level.prefill_chunk)
        if self.memory_pressure.shrunk:
            release_cached({kv.device for kv in decoder.pool.layers})
        self._applied = level

    def _pages_needed(self, level: DegradationLevel, max_active: int) -> int:
        running = sorted((*self.active, *self._waiting), key=_arrival)[:max_active]
        return self.demand.of_pool(running, self.decoder.pool.num_pages, level.spare_pages)

    def _resize(self, pages: int) -> None:
        """Reallocate the pool: preempts all sequences, which are readmitted in order."""
        for sequence in reversed(self.active):
            self._preempt(sequence)
        self.decoder.pool.resize(pages)

    def _grow(self) -> bool:
        """Allocate more pages for the running sequences, which keep theirs; ``False`` if the pool may not grow."""
        level, pool = self.memory_pressure.level, self.decoder.pool
        if not self.demand.growing or not level.spare_pages:
            return False
        self.decoder.drain()
        pages = self._pages_needed(level, min(level.max_sequences, self.max_sequences))
        if pages <= pool.num_pages:
            return False
        pool.grow(pages)
        self._residency.ensure(level.heads, level.prefill_chunk)
        return True

    def _drop_aborted(self) -> list[SequenceState]:
        self._end_aborted()
        aborted = [s for s in (*self._waiting, *self.active) if s.finished]
        for sequence in aborted:
            sequence.finish()
        self._waiting = [s for s in self._waiting if not s.finished]
        self.decoder.release(aborted)
        return aborted

    def _admit(self) -> None:
        """Admit waiting sequences in order while there are pages for their next step."""
        pool, level = self.decoder.pool, self.memory_pressure.level
        max_active = min(self.max_sequences, level.max_sequences)
        while self._waiting and (active := len(self.active)) < max_active:
            sequence = self._waiting[0]
            if not active and self.demand.to_end(sequence) > pool.num_pages:  # after the pool has shrunk
                self._resize(self.demand.to_end(sequence))
                self._residency.ensure(level.heads, level.prefill_chunk)
            while active and not self._fits(sequence):
                if not self._grow():
                    return
            self.decoder.admit([sequence])
            del self._waiting[0]

    def _fits(self, sequence: SequenceState) -> bool:
        """Whether pages are free for the sequence's next step, and one more for each sequence that may still grow."""
        pool = self.decoder.pool
        growing = sum(self.demand.to_end(s) > pool.held_pages(s.slot) for s in self.active)
        missing = self.demand.next_step(sequence) + growing - pool.free_pages
        if missing > 0 and sequence.swapped is None:  # a swapped sequence shares no pages
            missing -= pool.shared_pages(sequence.shareable)
        return missing <= 0

    def _make_room(self) -> None:
        """Reserve each running sequence's pages for this step, oldest first; preempt the youngest for them."""
        for sequence in self.active:
            while any(sequence is s for s in self.decoder.sequences):
                try:
                    self.decoder.reserve(sequence)
                    break
                except OutOfPages:
                    if not self._grow():
                        self._preempt(self.active[-1])

    def _preempt(self, sequence: SequenceState) -> None:
        """Free a sequence's pages and requeue it; copy them to host memory first where that is allowed and fits."""
        self.decoder.drain()
        if sequence.slot < 0:  # finished in a step just read
            return
        layers, swap = self.decoder.pool.layers, self.memory_pressure.swap
        if swap or (swap is None and any(layer.device.type != "cpu" for layer in layers)):
            try:
                self.decoder.swap_out(sequence)
                self.decoder.stats.swaps += 1
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        self._requeue(sequence)

    def _requeue(self, sequence: SequenceState) -> None:
        """Free a sequence's pages and queue it again."""
        sequence.preempt()
        self.decoder.release([sequence])
        self.decoder.stats.preemptions += 1
        bisect.insort(self._waiting, sequence, key=_arrival)


def submit_all(scheduler: Scheduler, sequences: Sequence[SequenceState]) -> None:
    """Queue sequences in order; if one is refused, none stays queued.

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
