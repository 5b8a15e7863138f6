"""Degradation under memory pressure: free memory, the levels in order, and when the level changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from specmemo_kernels.planning.host_allocator import release_host_memory
from specmemo_kernels.planning.host_memory import host_free

#: Polling interval in steps; every step while free memory is below ``keep_free``.
POLL_EVERY = 16
#: Consecutive polls with enough free memory before the level is raised; doubled after each raise that was reverted, up
#: to ``_MAX_PATIENCE``.
_PATIENCE, _MAX_PATIENCE = 4, 256
#: Free memory, relative to ``keep_free``, that counts as enough.
_ENOUGH = 1.25
#: Rows of a prefill chunk below which shrinking it saves nothing.
_MIN_CHUNK = 16


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's error, Python's, or a ``RuntimeError`` with such a message."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    messages = (
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "cannot allocate memory",
        "bad_alloc",
        "alloc_failed",
        "resource temporarily unavailable",  # no memory for the stack of a thread
    )
    return isinstance(error, RuntimeError) and any(message in text for message in messages)


def raise_exhausted(error: BaseException, level: DegradationLevel) -> NoReturn:
    """Raise the error of an allocation that failed at the lowest ``level``, with the remedy in a note.

    Raises:
        torch.OutOfMemoryError, MemoryError: never the bare ``RuntimeError`` of torch's allocator on a CPU.
    """
    failure = error
    if not isinstance(error, MemoryError | torch.OutOfMemoryError):
        failure = torch.OutOfMemoryError(str(error))
    failure.add_note(
        f"specmemo: out of memory at the lowest degradation level ({level}); free memory, shorten the prompt or "
        "max_new_tokens, or patch with a smaller memory_budget"
    )
    if failure is error:
        raise failure
    raise failure from error


@dataclass(frozen=True)
class DegradationLevel:
    """What generation may use at one level of degradation.

    Attributes:
        max_tree: nodes per sequence and step. prefill_chunk: prompt tokens per forward pass.
        spare_pages: pages for the running sequences' whole lengths; else for one step, and for the oldest to its end.
        heads: the drafter is on its device.
        max_sequences: sequences that run at once.
    """

    max_tree: int
    prefill_chunk: int
    spare_pages: bool
    heads: bool
    max_sequences: int


def levels(max_tree: int, prefill_chunk: int, max_sequences: int, heads: bool) -> tuple[DegradationLevel, ...]:
    """The levels from full use down: fewer rows per pass, no spare pages, no drafter, fewer sequences.

    ``heads``: the drafter can be offloaded; otherwise that level is left out.
    """
    steps_down = [DegradationLevel(max_tree, prefill_chunk, True, True, max_sequences)]
    while steps_down[-1].max_tree > 1 or steps_down[-1].prefill_chunk > _MIN_CHUNK:
        chunk = max(min(_MIN_CHUNK, prefill_chunk), steps_down[-1].prefill_chunk // 2)
        steps_down.append(replace(steps_down[-1], max_tree=max(1, steps_down[-1].max_tree // 2), prefill_chunk=chunk))
    steps_down.append(replace(steps_down[-1], spare_pages=False))
    if heads:
        steps_down.append(replace(steps_down[-1], heads=False))
    while steps_down[-1].max_sequences > 1:
        steps_down.append(replace(steps_down[-1], max_sequences=steps_down[-1].max_sequences // 2))
    return tuple(steps_down)


class MemoryMonitor(Protocol):
    """Interface: reads the devices' free memory and returns cached memory to them."""

    def free(self) -> int:
        """Free bytes on the device with the least free memory."""

    def release_cached(self) -> None:
        """Return memory cached by allocators to the device."""


class DeviceMonitor:
    """Reads the GPU driver, and the operating system for a CPU.

    Args:
        devices: the devices of a model and its pages.

    Raises:
        ValueError: a CPU on a system without ``/proc``.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = sorted(set(devices), key=str)
        if any(device.type == "cpu" for device in self.devices) and not Path("/proc/self/status").exists():
            raise ValueError(
                "keep_free: free memory of a CPU is read from /proc, which this system lacks; leave keep_free out"
            )

    def free(self) -> int:
        return min(free_bytes(device) for device in self.devices)

    def release_cached(self) -> None:
        release_cached(self.devices)


def release_cached(devices: Iterable[torch.device]) -> None:
    """Return memory cached by allocators and libraries to the devices."""
    kinds = {device.type for device in devices}
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    if "cpu" in kinds:
        release_host_memory()


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device.

    On a GPU within ``torch.cuda.set_per_process_memory_fraction``; on a CPU
    :func:`specmemo_kernels.planning.host_memory.host_free`.
    """
    if device.type == "cpu":
        return host_free()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, allowed - torch.cuda.memory_reserved(device))


class MemoryPressureController:
    """Holds the degradation level across generations; lowers it under memory pressure, raises it afterwards.

    Args:
        levels: of :func:`levels`.
        monitor: reads the free memory; ``None``: failed allocations lower the level, and some steps later it is raised
            on trial.
        keep_free: bytes of free memory below which the level is lowered.
        swap: copy a preempted sequence's pages to host memory; ``None``: unless pages are in host memory already.
        poll_every: polling interval in steps.
    """

    def __init__(
        self,
        levels: Sequence[DegradationLevel],
        *,
        monitor: MemoryMonitor | None = None,
        keep_free: int = 0,
        swap: bool | None = None,
        poll_every: int = POLL_EVERY,
    ) -> None:
        self.levels, self.monitor, self.keep_free, self.swap = tuple(levels), monitor, keep_free, swap
        self.poll_every = poll_every
        self._index = self._steps = self._calm_polls = 0
        self._patience, self._grown, self._pressed = _PATIENCE, False, False

    @property
    def level(self) -> DegradationLevel:
        """The level in force."""
        return self.levels[self._index]

    @property
    def shrunk(self) -> int:
        """The number of levels below full use."""
        return self._index

    def shrink(self, sequences: int) -> bool:
        """Lower the level to the next one that frees something while ``sequences`` run; ``False`` at the lowest."""
        self._calm_polls = 0
        if self._grown:
            self._patience, self._grown = min(2 * self._patience, _MAX_PATIENCE), False
        for index, (old, new) in enumerate(pairwise(self.levels[self._index :]), start=self._index + 1):
            if new.max_sequences == old.max_sequences or new.max_sequences < sequences:
                self._index = index
                return True
        return False

    def review(self) -> int:
        """Poll before a step: -1 if the level must be lowered, 1 if it was raised, else 0."""
        self._steps += 1
        if self._steps % self.poll_every and not self._pressed:
            return 0
        calm = True
        if self.monitor is not None:
            free = self.monitor.free()
            if free < self.keep_free:
                self.monitor.release_cached()
                free = self.monitor.free()
            self._pressed = free < self.keep_free
            if self._pressed:
                return -1
            calm = free >= _ENOUGH * self.keep_free
        self._calm_polls = self._calm_polls + 1 if calm else 0
        if self._calm_polls < self._patience:
            return 0
        self._calm_polls = 0
        if not self._index:
            self._patience, self._grown = _PATIENCE, False
            return 0
        self._index, self._grown = self._index - 1, True
        return 1
