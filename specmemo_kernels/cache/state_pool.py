"""States of recurrent and convolution layers (mixers): one per sequence and layer, and the rows not yet in them.

A mixer's state can't drop a rejected token. So verification runs from a copy, which is thrown away, and the mixer's
input rows are kept. When the accepted rows are known, the next pass feeds them to the mixer, from the state on.

A closed sequence's state stays where it is until another sequence needs the memory. A text that begins with exactly the
tokens in it, as the next turn of a conversation, goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class MixerSpec:
    """Sizes of one mixer.

    ``states``: shape (without the sequence dimension) and dtype of each of its state tensors. ``hidden_size``,
    ``dtype``: of its input rows. ``least_rows``: the fewest rows of a prompt in a pass, its first
    pass excepted.
    """

    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    least_rows: int = 1

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.states)

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept input row."""
        return self.hidden_size * self.dtype.itemsize


@dataclass(frozen=True)
class HostState:
    """Host copy of a sequence's states, and of its accepted rows that are not in them. ``[mixer]`` each."""

    states: tuple[tuple[Tensor, ...], ...]
    rows: tuple[Tensor, ...]
    started: bool

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensors in self.states for tensor in tensors) + sum(r.nbytes for r in self.rows)


class StatePool:
    """States of all mixers and sequences.

    Args:
        mixers: sizes of each mixer.
        max_sequences: number of sequences. max_nodes: most tree nodes of a pass.

    Attributes:
        states: of each mixer, its state tensors ``[max_sequences, ...]``.
        rows: of each mixer, its input rows ``[max_nodes, hidden_size]`` in the last pass over trees.
        accepted: the rows of each sequence, in order, that are part of its text but not of its states.
        cached: of closed sequences, the labels of the tokens in their states (:class:`PrefixIndex`), the oldest first.
        lost: sequences whose states a failed pass has changed; they must be closed and computed again.
        slots: the sequences of the current pass, in the order of its batch. prompt_rows: rows of each of its chunks
            that are part of the prompt.
    """

    def __init__(self, mixers: Sequence[MixerSpec], max_sequences: int, max_nodes: int) -> None:
        self.mixers = tuple(mixers)
        self.states = [
            [torch.zeros(max_sequences, *shape, dtype=dtype, device=mixer.device) for shape, dtype in mixer.states]
            for mixer in self.mixers
        ]
        self.accepted: dict[int, list[int]] = {}
        self.slots: list[int] = []
        self.prompt_rows: list[int] = []
        self._included: list[set[int]] = [set() for _ in self.mixers]  # sequences whose accepted rows are in the state
        self._started: set[int] = set()
        self._changed: set[int] = set()
        self.lost: set[int] = set()
        self.cached: dict[int, Sequence[int]] = {}
        self.rows = self._new_rows(max_nodes)

    def _new_rows(self, count: int) -> list[Tensor]:
        return [torch.empty(count, m.hidden_size, dtype=m.dtype, device=m.device) for m in self.mixers]

    def resize_rows(self, max_nodes: int) -> None:
        """Reallocate the rows, between passes; accepted rows are kept. A failed allocation changes nothing."""
        kept = [row for rows in self.accepted.values() for row in rows]
        new = self._new_rows(max(max_nodes, len(kept)))
        for rows, old in zip(new, self.rows, strict=True):
            rows[: len(kept)] = old[kept]
        places = iter(range(len(kept)))
        self.rows, self.accepted = new, {slot: [next(places) for _ in rows] for slot, rows in self.accepted.items()}

    @property
    def least_rows(self) -> int:
        """The largest of the mixers' ``least_rows``."""
        return max(mixer.least_rows for mixer in self.mixers)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for states in self.states for state in states)

    @property
    def row_bytes(self) -> int:
        """Bytes of all kept rows."""
        return sum(rows.nbytes for rows in self.rows)

    def begins(self, labels: Sequence[int]) -> list[int]:
        """The closed sequences whose states have only the first of these tokens, and not the last one."""
        found = [slot for slot, known in self.cached.items() if known == [*labels[: min(len(known), len(labels) - 1)]]]
        return sorted(found, key=lambda slot: -len(self.cached[slot]))

    def free_slot(self, free: Sequence[int]) -> int:
        """One of the ``free`` slots, if possible without a closed sequence's state, else with the oldest."""
        return next((slot for slot in reversed(free) if slot not in self.cached), next(iter(self.cached), free[-1]))

    def open(self, slot: int, *, resume: bool = False) -> None:
        """Start a sequence: with zeros, or with the state of the closed sequence."""
        if self.cached.pop(slot, None) is not None and resume:
            self._started.add(slot)
            return
        for states in self.states:
            for state in states:
                state[slot].zero_()

    def close(self, slot: int, labels: Sequence[int] = ()) -> Sequence[int]:
        """End a sequence whose pages hold tokens with these labels, none if its state may be dropped.

        Returns:
            The labels of the tokens in its state, which is cached; none if it isn't.
        """
        missing = len(self.accepted.pop(slot, ()))
        whole = slot in self._started and slot not in self.lost | self._changed
        whole = whole and not (missing and any(slot in included for included in self._included))
        known = list(labels[: len(labels) - missing]) if whole else []
        for slots in (self._started, self._changed, self.lost, *self._included):
            slots.discard(slot)
        if known:
            self.cached[slot] = known
        return known

    def take_cached(self, other: StatePool) -> None:
        """Copy the newest cached states of another pool of the same mixers into this unused pool."""
        count = len(self.states[0][0])
        for new, old in zip(range(count), reversed(other.cached), strict=False):
            for states, sources in zip(self.states, other.states, strict=True):
                for state, source in zip(states, sources, strict=True):
                    state[new].copy_(source[old])
            self.cached = {new: other.cached[old], **self.cached}

    def started(self, slot: int) -> bool:
        """Whether the sequence's state has seen a token."""
        return slot in self._started

    @contextmanager
    def during_pass(self, slots: list[int], prompt_rows: list[int]) -> Iterator[dict[int, list[int]]]:
        """A pass over these sequences: those with trees, then those with prompt chunks.

        Yields a dict for the rows of each verified sequence that become part of its text, root first; none for trees of
        one node, which are part of the states at once. If the pass fails, the sequences whose states it has changed are
        :attr:`lost`.
        """
        self.slots, self.prompt_rows = slots, prompt_rows
        accepted: dict[int, list[int]] = {}
        try:
            yield accepted
        except BaseException:
            self.lost |= self._changed
            self._changed.clear()
            raise
        self._started |= self._changed | accepted.keys()
        self._changed.clear()
        self.accepted = accepted
        for included in self._included:
            included.clear()

    def change(self, slots: Iterable[int]) -> None:
        """Note that a pass changes these states in place."""
        self._changed.update(slots)

    def missing(self, mixer: int) -> dict[int, list[int]]:
        """The accepted rows of each sequence that are not in the state of a mixer yet."""
        included = self._included[mixer]
        return {slot: rows for slot, rows in self.accepted.items() if slot not in included}

    @contextmanager
    def including(self, mixer: int, slots: Iterable[int]) -> Iterator[None]:
        """A block that writes states of a mixer in which these sequences' accepted rows are included."""
        new = set(slots) - self._changed
        self._changed |= new  # a block that fails halfway leaves some tensors of a state written and others not
        yield
        self._changed -= new
        self._included[mixer].update(slots)

    @classmethod
    def with_text(cls, mixers: Sequence[MixerSpec], max_nodes: int) -> StatePool:
        """A pool for measurements: one sequence, whose states have seen tokens."""
        pool = cls(mixers, 1, max_nodes)
        pool._started.add(0)
        return pool

    def copy_out(self, slot: int) -> HostState:
        """Copy a sequence's states and accepted rows to host memory."""
        index = self.accepted.get(slot, [])
        states = tuple(tuple(state[slot].to("cpu", copy=True) for state in states) for states in self.states)
        rows = tuple(
            rows[[] if slot in included else index].cpu()
            for rows, included in zip(self.rows, self._included, strict=True)
        )
        return HostState(states, rows, slot in self._started)

    def copy_in(self, slot: int, copy: HostState) -> None:
        """Write the result of :meth:`copy_out` to an open sequence, with more rows if too few are free.

        After a failure (of an allocation) the sequence has no state that :meth:`close` would keep.
        """
        count = max((len(rows) for rows in copy.rows), default=0)
        held = sum(map(len, self.accepted.values()))
        if count > len(self.rows[0]) - held:  # as after resize_rows, whose nodes may be fewer than the accepted rows
            self.resize_rows(held + count)
        for states, parts in zip(self.states, copy.states, strict=True):
            for state, part in zip(states, parts, strict=True):
                state[slot].copy_(part)
        if count:
            used = {row for rows in self.accepted.values() for row in rows}
            free = [row for row in range(len(self.rows[0])) if row not in used][:count]
            for mixer, (rows, kept) in enumerate(zip(self.rows, copy.rows, strict=True)):
                if len(kept):
                    rows[free] = kept.to(rows.device)
                else:
                    self._included[mixer].add(slot)
            self.accepted[slot] = free
        if copy.started:
            self._started.add(slot)
