"""Generation memory over time: the bytes of live tensors by part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from specmemo_kernels.planning.memory_tracker import MemoryTracker

#: In the stacking order of the pictures.
PARTS = ("heads", "KV cache", "candidates' KV", "logits", "activations")


class PartTracker(MemoryTracker):
    """A :class:`MemoryTracker` that counts bytes by part.

    Tensors whose last dimension is the vocabulary are logits, tensors passed to :meth:`label` are of that part, all
    other tensors are activations.

    Attributes:
        calls: operator calls so far, as the time axis; seconds would include the tracking.
        changes: ``(calls, serial number of the storage, bytes)``, negative bytes for a freed storage.
        marks: ``(calls, text)``, see :meth:`mark`.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.calls = 0
        self.changes: list[tuple[int, int, int]] = []
        self.marks: list[tuple[int, str]] = []
        self._vocab_size = vocab_size
        self._parts: list[str] = []
        self._serial: dict[int, int] = {}

    def label(self, tensor: torch.Tensor, part: str) -> None:
        """Count this tensor's storage as ``part`` since its allocation; storages from before tracking are ignored."""
        serial = self._serial.get(tensor.untyped_storage()._cdata)
        if serial is not None:
            self._parts[serial] = part

    def mark(self, text: str) -> None:
        """Add a mark at the current time."""
        self.marks.append((self.calls, text))

    def over_time(self, held: dict[str, int]) -> tuple[list[int], dict[str, list[int]]]:
        """Operator calls, and the bytes of every part at each; ``held``: bytes allocated before tracking."""
        live = dict.fromkeys(PARTS, 0) | held
        calls, series = [0], {part: [size] for part, size in live.items()}
        for call, serial, size in self.changes:
            live[self._parts[serial]] += size
            calls.append(call)
            for part, value in live.items():
                series[part].append(value)
        return calls, series

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, leaf: Any, counts: bool) -> None:
        before = self.live
        super()._note(leaf, counts)
        if self.live > before:
            self._serial[leaf.untyped_storage()._cdata] = len(self._parts)
            self.changes.append((self.calls, len(self._parts), self.live - before))
            self._parts.append("logits" if leaf.shape and leaf.shape[-1] == self._vocab_size else "activations")

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        serial = self._serial.pop(key, None)
        if serial is not None:
            self.changes.append((self.calls, serial, -size))


class LabelledCache(DynamicCache):
    """transformers' growing cache, which labels its tensors as the KV cache."""

    def __init__(self, tracker: PartTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def update(self, *args: Any, **kwargs: Any) -> Any:
        states = super().update(*args, **kwargs)
        for tensor in states:
            self._tracker.label(tensor, "KV cache")
        return states
