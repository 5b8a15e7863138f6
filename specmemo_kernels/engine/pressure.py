"""Degradation under memory pressure: the levels in order, and when the level changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

from specmemo_kernels.engine.memory_monitor import MemoryMonitor

#: The monitor is asked every so many steps; at every one while memory is below the mark.
LOOK_EVERY = 16
#: So many looks in a row must find memory plenty before something is taken back; twice as many after each time that
#: turned out too early, at most ``_LONGEST``.
_PATIENCE, _LONGEST = 4, 256
#: What counts as plenty, over the bytes to keep free.
_PLENTY = 1.25
#: Rows of a prefill chunk below which shrinking it gains nothing.
_LEAST_CHUNK = 16


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's own error, Python's, or one of those that only their text tells apart."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    known = (
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "cannot allocate memory",
        "bad_alloc",
        "alloc_failed",
        "resource temporarily unavailable",  # no memory for the stack of a thread
    )
    return isinstance(error, RuntimeError) and any(words in text for words in known)


def raise_exhausted(error: BaseException, level: DegradationLevel) -> NoReturn:
    """Raise a failed allocation that ``level`` couldn't avoid, with the remedy in a note.

    Raises:
        torch.OutOfMemoryError, MemoryError: never the bare ``RuntimeError`` of torch's allocator on a CPU.
    """
    import torch

    failure = error
    if not isinstance(error, MemoryError | torch.OutOfMemoryError):
        failure = torch.OutOfMemoryError(str(error))
    failure.add_note(
        f"specmemo: memory ran out with nothing left to give up ({level}); free some, shorten the prompt or "
        "max_new_tokens, or patch with a smaller memory_budget"
    )
    if failure is error:
        raise failure
    raise failure from error


@dataclass(frozen=True)
class DegradationLevel:
    """What generation may use at one level of degradation.

    Attributes:
        max_tree: nodes that a step verifies per sequence. prefill_chunk: prompt tokens per forward pass.
        spare_pages: whether there are pages for all that running sequences may come to need; else for their next step,
            and for the oldest one to its end.
        heads: whether the drafter is on its device.
        max_sequences: sequences that run at once; the others wait, in host memory if they had begun.
    """

    max_tree: int
    prefill_chunk: int
    spare_pages: bool
    heads: bool
    max_sequences: int


def levels(max_tree: int, prefill_chunk: int, max_sequences: int, heads: bool) -> tuple[DegradationLevel, ...]:
    """From everything to the least: rows of a forward pass, down to one node per sequence; pages that nobody needs yet;
    the drafter, if it can go (``heads``); sequences, down to one.
    """
    found = [DegradationLevel(max_tree, prefill_chunk, True, True, max_sequences)]
    while found[-1].max_tree > 1 or found[-1].prefill_chunk > _LEAST_CHUNK:
        chunk = max(min(_LEAST_CHUNK, prefill_chunk), found[-1].prefill_chunk // 2)
        found.append(replace(found[-1], max_tree=max(1, found[-1].max_tree // 2), prefill_chunk=chunk))
    found.append(replace(found[-1], spare_pages=False))
    if heads:
        found.append(replace(found[-1], heads=False))
    while found[-1].max_sequences > 1:
        found.append(replace(found[-1], max_sequences=found[-1].max_sequences // 2))
    return tuple(found)


class MemoryPressureController:
    """The degradation level in force. It outlives a single generation.

    Args:
        levels: of :func:`levels`.
        monitor: reads the free memory; ``None``: only failed allocations lower the level, and raising it is tried from
            time to time (if that fails, the step is retried at the lower level).
        keep_free: bytes below which the engine shrinks.
        swap: whether a preempted sequence's pages are copied to host memory; ``None``: where that isn't the memory that
            pages are in anyway.
        look_every: polling interval in steps.
    """

    def __init__(
        self,
        levels: Sequence[DegradationLevel],
        *,
        monitor: MemoryMonitor | None = None,
        keep_free: int = 0,
        swap: bool | None = None,
        look_every: int = LOOK_EVERY,
    ) -> None:
        self.levels, self.monitor, self.keep_free, self.swap = tuple(levels), monitor, keep_free, swap
        self.look_every = look_every
        self._place = self._steps = self._calm = 0
        self._patience, self._grown, self._pressed = _PATIENCE, False, False

    @property
    def level(self) -> DegradationLevel:
        """What may be used now."""
        return self.levels[self._place]

    @property
    def shrunk(self) -> int:
        """How many notches have been given up."""
        return self._place

    def shrink(self, sequences: int) -> bool:
        """Give up one notch more, while ``sequences`` run; ``False``: nothing is left."""
        self._calm = 0
        if self._grown:
            self._patience, self._grown = min(2 * self._patience, _LONGEST), False
        for place, (old, new) in enumerate(pairwise(self.levels[self._place :]), start=self._place + 1):
            if new.max_sequences == old.max_sequences or new.max_sequences < sequences:
                self._place = place
                return True
        return False

    def review(self) -> int:
        """Asked before each step: -1 to shrink, 1 to grow (which is done), 0 to go on."""
        self._steps += 1
        if self._steps % self.look_every and not self._pressed:
            return 0
        calm = True
        if self.monitor is not None:
            free = self.monitor.free()
            if free < self.keep_free:
                self.monitor.give_back()
                free = self.monitor.free()
            self._pressed = free < self.keep_free
            if self._pressed:
                return -1
            calm = free >= _PLENTY * self.keep_free
        self._calm = self._calm + 1 if calm else 0
        if self._calm < self._patience:
            return 0
        self._calm = 0
        if not self._place:
            self._patience, self._grown = _PATIENCE, False
            return 0
        self._place, self._grown = self._place - 1, True
        return 1
