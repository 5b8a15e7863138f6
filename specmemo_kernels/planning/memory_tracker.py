"""Live and peak bytes of the tensors that code allocates, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operators return while the mode is active.

    It intercepts every operator and slows code down, so measure time in separate runs. Temporaries inside an operator
    aren't counted.

    Attributes:
        live, peak: bytes of live storages, now and at most.
        count: storages so far.
        trace: ``live`` after each operator, with ``trace=True``.
    """

    def __init__(self, trace: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.count = 0
        self.trace: list[int] = []
        self._keeps_trace = trace
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and is_composite(func):  # they aren't decomposed before dispatch then
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self._note_all(args, counts=False)
        if kwargs:
            self._note_all(kwargs.values(), counts=False)
        result = func(*args, **(kwargs or {}))
        self._note_all((result,), counts=True)
        if self._keeps_trace:
            self.trace.append(self.live)
        return result

    def _note_all(self, values: Iterable[Any], counts: bool) -> None:
        """:meth:`_note` the tensors among an operator's arguments or results, which may be in lists."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._note(value, counts)
            elif isinstance(value, list | tuple):
                self._note_all(value, counts)

    def _note(self, tensor: torch.Tensor, counts: bool) -> None:
        """Register a tensor's storage; a new one counts as live until it is freed."""
        if tensor.layout != torch.strided:  # such as a sparse adapter, whose parts are results of other operators
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes() if counts else 0
        # The storage's Python object lives as long as its memory.
        self._seen[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        self.live += size
        self.count += counts
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.live -= size


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator consists of others."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
