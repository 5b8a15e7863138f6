"""The paged KV cache: pages handed out as tokens arrive, block tables, and the scratch slots of a step's candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

#: What quantised pages hold, by the name that plans and users give it.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: A float32 per token and head: the scale of any key fits it, and it adds no rounding of its own. At head_dim 128
#: that is 3 % of a page; float16 would save half of it and lose the scales of keys that are very small or large.
SCALE_BYTES = 4


def page_dtype(kv_dtype: str | None) -> torch.dtype | None:
    """The dtype of quantised pages, ``None`` for pages in the layers' own.

    Raises:
        ValueError: a name that isn't known.
    """
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ValueError(
            f"kv_dtype is {kv_dtype!r}, expected {', '.join(map(repr, KV_DTYPES))} or None (not quantised)"
        )
    return None if kv_dtype is None else KV_DTYPES[kv_dtype]


class OutOfPages(RuntimeError):
    """A sequence needs more pages than are free; nothing was changed."""


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer stores per token: ``num_kv_heads`` keys of ``head_dim`` and values of ``v_head_dim``."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Key and value bytes of one token in this layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    def page_bytes_per_token(self, kv_dtype: str | None) -> int:
        """What one token takes in pages: codes and two scales per head where they are quantised."""
        codes = page_dtype(kv_dtype)
        if codes is None:
            return self.bytes_per_token
        return self.num_kv_heads * ((self.head_dim + self.v_head_dim) * codes.itemsize + 2 * SCALE_BYTES)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that store the same thing, stacked so that one launch commits all of them.

    ``k_pages`` is ``[num_layers, num_pages, page_size, num_kv_heads, head_dim]``, ``k_scratch``
    ``[num_layers, max_nodes, num_kv_heads, head_dim]``; values likewise. Quantised pages have ``k_scales``
    ``[num_layers, num_pages, page_size, num_kv_heads]`` float32; scratch is never quantised.
    """

    layers: tuple[int, ...]
    k_pages: Tensor
    v_pages: Tensor
    k_scratch: Tensor
    v_scratch: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


class PagedKVPool:
    """Pages for all layers and sequences.

    Args:
        layers: what each layer stores; equal layers are stacked.
        num_pages, page_size: pages and tokens per page; the pool never grows beyond them.
        max_sequences: rows of the block table.
        max_nodes: scratch slots, the most tree nodes that one step verifies over all sequences.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of 8-bit codes with a scale per token and head; ``None`` for
            pages in the layers' own dtype.

    Attributes:
        k_pages, v_pages, k_scratch, v_scratch: per layer, views into the groups.
        k_scales, v_scales: likewise, ``None`` for each layer unless pages are quantised.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        max_nodes: int,
        kv_dtype: str | None = None,
    ) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"PagedKVPool: {name} is {value}, it must be at least 1")
        self.layers = tuple(layers)
        self.num_pages, self.page_size, self.max_nodes, self.kv_dtype = num_pages, page_size, max_nodes, kv_dtype
        self.groups = tuple(self._allocate(kind) for kind in dict.fromkeys(self.layers))
        views = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        order = [views[layer] for layer in range(len(self.layers))]
        self.k_pages = [group.k_pages[i] for group, i in order]
        self.v_pages = [group.v_pages[i] for group, i in order]
        self.k_scratch = [group.k_scratch[i] for group, i in order]
        self.v_scratch = [group.v_scratch[i] for group, i in order]
        self.k_scales = [None if group.k_scales is None else group.k_scales[i] for group, i in order]
        self.v_scales = [None if group.v_scales is None else group.v_scales[i] for group, i in order]
        self.device = self.layers[0].device
        self.block_table = torch.zeros(max_sequences, num_pages, dtype=torch.int32, device=self.device)
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    def _allocate(self, kind: LayerKV) -> LayerGroup:
        layers = tuple(i for i, layer in enumerate(self.layers) if layer == kind)

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(len(layers), *shape, dtype=dtype, device=kind.device)

        codes = page_dtype(self.kv_dtype)
        stored = codes or kind.dtype
        pages, scratch = (self.num_pages, self.page_size, kind.num_kv_heads), (self.max_nodes, kind.num_kv_heads)
        return LayerGroup(
            layers,
            make(stored, *pages, kind.head_dim),
            make(stored, *pages, kind.v_head_dim),
            make(kind.dtype, *scratch, kind.head_dim),
            make(kind.dtype, *scratch, kind.v_head_dim),
            None if codes is None else make(torch.float32, *pages),
            None if codes is None else make(torch.float32, *pages),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, scales included."""
        per_token = sum(layer.page_bytes_per_token(self.kv_dtype) for layer in self.layers)
        return per_token * self.num_pages * self.page_size

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch slots."""
        return sum(layer.bytes_per_token for layer in self.layers) * self.max_nodes

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def fits_sequences(self, count: int) -> bool:
        """Whether ``count`` more sequences find a row in the block table."""
        return len(self._free_slots) >= count

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def open(self) -> int:
        """A row of the block table for a new sequence.

        Raises:
            OutOfPages: all rows are taken.
        """
        if not self._free_slots:
            raise OutOfPages(f"all {self.block_table.shape[0]} sequences of the pool are in use; close one first")
        slot = self._free_slots.pop()
        self._pages[slot] = []
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        """Make sure that sequence ``slot`` has pages for its first ``tokens`` tokens.

        Raises:
            OutOfPages: not enough free pages; the sequence keeps what it had.
        """
        held = self._pages[slot]
        missing = self.pages_for(tokens) - len(held)
        if missing <= 0:
            return
        if missing > len(self._free_pages):
            raise OutOfPages(
                f"{tokens} tokens need {missing} more pages of {self.page_size} tokens, {len(self._free_pages)} of "
                f"{self.num_pages} are free; shorten the prompt or max_new_tokens, or raise memory_budget"
            )
        new = [self._free_pages.pop() for _ in range(missing)]
        self.block_table[slot, len(held) : len(held) + missing] = torch.tensor(new, dtype=torch.int32)
        held.extend(new)

    def close(self, slot: int) -> None:
        """Retire a sequence: its pages and its row are free at once."""
        self._free_pages.extend(reversed(self._pages.pop(slot)))
        self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every page has exactly one owner and the block table says the same."""
        owners = Counter(self._free_pages)
        for slot, pages in self._pages.items():
            owners.update(pages)
            table = self.block_table[slot, : len(pages)].tolist()
            assert table == pages, f"block table of sequence {slot} says {table}, the allocator {pages}"
        wrong = {page: count for page, count in owners.items() if count != 1 or not 0 <= page < self.num_pages}
        assert not wrong, f"pages owned not once: {wrong}"
        assert len(owners) == self.num_pages, f"pages owned not once: {self.num_pages - len(owners)} have no owner"
        slots = Counter(self._free_slots) + Counter(self._pages.keys())
        assert slots == Counter(range(self.block_table.shape[0])), f"sequence rows owned not once: {slots}"
