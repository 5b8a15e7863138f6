"""Allocations that fail at chosen places."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels.engine.scheduler import Scheduler
from specmemo_kernels.engine.sequence import SequenceState


def storages(values: Iterable[Any]) -> set[int]:
    """The storages of the tensors among an operator's arguments or results, which may be in lists."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, list | tuple):
            found |= storages(value)
    return found


class FailingAllocations(TorchDispatchMode):
    """Fails at chosen sites: operators that allocate a tensor, and each of this package's operators.

    The operator has already run (written to pages, drawn from a generator), which is the worst time to fail.

    Args:
        fails: called with a site's number, counted from 0 since the last :meth:`restart`; ``True``: fail.
    """

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.fails, self.site, self.failures = fails, 0, 0
        self.armed = True

    def restart(self) -> None:
        self.site = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = storages((args, [*kwargs.values()] if kwargs else []))
        result = func(*args, **(kwargs or {}))
        # lift_fresh: a new tensor from Python numbers.
        fresh = func is torch.ops.aten.lift_fresh.default or storages((result,)) - known
        if self.armed and (fresh or func.namespace == "specmemo"):
            self.site += 1
            if self.fails(self.site - 1):
                self.failures += 1
                raise torch.OutOfMemoryError(f"out of memory on purpose, at {func}")
        return result


class AtEverySite(FailingAllocations):
    """Inside ``Scheduler.step``, every site fails once, and the try after it goes on to the next that hasn't yet.

    Two sites are the same if the whole way of calls to them is, with and without running sequences and with and without
    prompts still to compute; in a loop the first two rounds are different sites. What a function named ``sparing`` does
    never fails.

    Args:
        parts: sites are divided by their way of calls, in every process alike, and only those of ``part`` fail. Cases
            that share code get different parts, so that each of its sites fails in one of them.
    """

    def __init__(self, sparing: str = "", parts: int = 1, part: int = 0) -> None:
        super().__init__(self._is_new)
        self.armed, self.sparing = False, sparing
        self.parts, self.part = parts, part
        self.kind: tuple[bool, bool] = (False, False)
        self.seen: set[Any] = set()
        self._rounds: Counter[Any] = Counter()

    def restart(self) -> None:
        super().restart()
        self._rounds.clear()

    def _is_new(self, _: int) -> bool:
        way, names, frame = [], [], sys._getframe(2)
        while frame.f_back is not None and frame.f_code is not Scheduler.step.__code__:
            if frame.f_code.co_name == self.sparing:
                return False
            way.append((frame.f_code, frame.f_lineno))
            names.append((frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        place = tuple(way)
        self._rounds[place] += 1
        site = (self.kind, place, min(2, self._rounds[place]))
        if site in self.seen:
            return False
        self.seen.add(site)
        if zlib.crc32(repr((self.kind, names, site[2])).encode()) % self.parts != self.part:
            return False
        self.restart()
        return True


@contextmanager
def failing_everywhere(
    monkeypatch: pytest.MonkeyPatch, sparing: str = "", parts: int = 1, part: int = 0
) -> Iterator[AtEverySite]:
    """Let all steps of all schedulers fail at all of their sites, or at those of one part."""
    mode, own = AtEverySite(sparing, parts, part), Scheduler.step

    def step(scheduler: Scheduler) -> list[SequenceState]:
        mode.kind = (bool(scheduler.decoder.sequences), bool(scheduler.waiting or scheduler.decoder.prefilling))
        mode.restart()
        mode.armed = True
        try:
            return own(scheduler)
        finally:
            mode.armed = False

    with monkeypatch.context() as patch, mode:
        patch.setattr(Scheduler, "step", step)
        yield mode
    print(f"{mode.failures} of {len(mode.seen)} sites failed")
    assert mode.failures > len(mode.seen) / (2 * parts)
