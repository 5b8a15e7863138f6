"""What generation memory consists of at every moment: the bytes of live tensors by part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from specmemo_kernels.planning.memory_tracker import MemoryTracker

#: In the order in which pictures stack them.
PARTS = ("heads", "KV cache", "candidates' KV", "logits", "activations")


class PartTracker(MemoryTracker):
    """A :class:`MemoryTracker` that knows parts.

    A tensor whose last dimension is the vocabulary is logits, what was named by :meth:`label` is what it was named,
    everything else is activations.

    Attributes:
        calls: of operators so far, the measure of time: clocks would show what tracking costs.
        changes: ``(calls, serial number of the storage, bytes)``, bytes below zero where it was freed.
        marks: ``(calls, what began then)``, see :meth:`mark`.
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
        """This tensor's storage belongs to ``part``, from its beginning on; one from before tracking is left out."""
        serial = self._serial.get(tensor.untyped_storage()._cdata)
        if serial is not None:
            self._parts[serial] = part

    def mark(self, what: str) -> None:
        """Something begins now."""
        self.marks.append((self.calls, what))

    def over_time(self, held: dict[str, int]) -> tuple[list[int], dict[str, list[int]]]:
        """Counts of calls, and the bytes of every part at each; ``held`` was there before."""
        now = dict.fromkeys(PARTS, 0) | held
        calls, series = [0], {part: [size] for part, size in now.items()}
        for when, serial, size in self.changes:
            now[self._parts[serial]] += size
            calls.append(when)
            for part, value in now.items():
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
    """transformers' growing cache, its tensors known to a tracker as the KV cache."""

    def __init__(self, tracker: PartTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def update(self, *args: Any, **kwargs: Any) -> Any:
        states = super().update(*args, **kwargs)
        for tensor in states:
            self._tracker.label(tensor, "KV cache")
        return states
