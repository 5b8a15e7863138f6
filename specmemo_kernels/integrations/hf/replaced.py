"""Replaces ``forward`` of modules while our passes run; plain passes, copies and saved models have the modules' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: A module and its ``forward`` during our passes.
Replacement = tuple[nn.Module, Callable[..., Any]]


class ReplacedForwards:
    """Counts the passes that need the replacements; passes of several threads may overlap."""

    def __init__(self) -> None:
        self._passes, self._lock = 0, threading.Lock()
        self._modules: list[nn.Module] = []

    @contextmanager
    def installed(self, replacements: Callable[[], Iterable[Replacement]]) -> Iterator[None]:
        """Replace in a block of code; the first of overlapping blocks decides what."""
        with self._lock:
            self._passes += 1
            if self._passes == 1:
                for module, forward in replacements():
                    vars(module)["forward"] = forward
                    self._modules.append(module)
        try:
            yield
        finally:
            with self._lock:
                self._passes -= 1
                while self._modules and not self._passes:
                    vars(self._modules.pop()).pop("forward", None)
