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


@dataclass(frozen=True)
class HostPages:
    """The first ``tokens`` tokens of a sequence in host memory: per group its pages' keys, values and scales as stored.

    Each part is ``[pages, num_layers, page_size, ...]``.
    """

    tokens: int
    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.nbytes for part in self.parts)


class PagedKVPool:
    """Pages for all layers and sequences.

    Args:
        layers: what each layer stores; equal layers are stacked.
        num_pages, page_size: pages and tokens per page; the pool never grows by itself (:meth:`resize`).
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
        self.device = self.layers[0].device
        self._kinds = {kind: tuple(i for i, la in enumerate(self.layers) if la == kind) for kind in self.layers}
        self._adopt([(*self._new_pages(kind, num_pages), *self._new_scratch(kind, max_nodes)) for kind in self._kinds])
        self.block_table = torch.zeros(max_sequences, num_pages, dtype=torch.int32, device=self.device)
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    def _new_pages(self, kind: LayerKV, num_pages: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and their scales."""
        shape = (len(self._kinds[kind]), num_pages, self.page_size, kind.num_kv_heads)
        codes = page_dtype(self.kv_dtype)
        k, v = (
            torch.empty(*shape, dim, dtype=codes or kind.dtype, device=kind.device)
            for dim in (kind.head_dim, kind.v_head_dim)
        )
        if codes is None:
            return k, v, None, None
        scales = [torch.empty(shape, dtype=torch.float32, device=kind.device) for _ in range(2)]
        return k, v, scales[0], scales[1]

    def _new_scratch(self, kind: LayerKV, max_nodes: int) -> tuple[Tensor, Tensor]:
        shape = (len(self._kinds[kind]), max_nodes, kind.num_kv_heads)
        k = torch.empty(*shape, kind.head_dim, dtype=kind.dtype, device=kind.device)
        return k, torch.empty(*shape, kind.v_head_dim, dtype=kind.dtype, device=kind.device)

    def _adopt(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]]) -> None:
        """These are the groups' pages, scales and scratch from now on."""
        self.groups = tuple(
            LayerGroup(layers, k, v, k_scratch, v_scratch, k_scales, v_scales)
            for layers, (k, v, k_scales, v_scales, k_scratch, v_scratch) in zip(
                self._kinds.values(), tensors, strict=True
            )
        )
        views = {layer: (group, i) for group in self.groups for i, layer in enumerate(group.layers)}
        order = [views[layer] for layer in range(len(self.layers))]
        self.k_pages = [group.k_pages[i] for group, i in order]
        self.v_pages = [group.v_pages[i] for group, i in order]
        self.k_scratch = [group.k_scratch[i] for group, i in order]
        self.v_scratch = [group.v_scratch[i] for group, i in order]
        self.k_scales = [None if group.k_scales is None else group.k_scales[i] for group, i in order]
        self.v_scales = [None if group.v_scales is None else group.v_scales[i] for group, i in order]

    def resize(self, num_pages: int) -> None:
        """Really have ``num_pages`` pages, while no sequence is open: the old ones are freed before there are new ones.

        A failed allocation leaves a pool without pages, which can be resized again.
        """
        assert not self._pages, f"sequences {sorted(self._pages)} are open; their pages would be lost"
        for pages in (0, num_pages):
            with torch.inference_mode(False):
                tables = self.block_table.new_zeros(len(self._free_slots), pages)
                new = [self._new_pages(kind, pages) for kind in self._kinds]
            self._adopt([(*n, g.k_scratch, g.v_scratch) for n, g in zip(new, self.groups, strict=True)])
            self.block_table, self.num_pages, self._free_pages = tables, pages, list(range(pages - 1, -1, -1))

    def resize_scratch(self, max_nodes: int) -> None:
        """Have ``max_nodes`` scratch slots, between steps; a failed allocation leaves none."""
        for nodes in (0, max_nodes):
            with torch.inference_mode(False):
                new = [self._new_scratch(kind, nodes) for kind in self._kinds]
            pages = [(g.k_pages, g.v_pages, g.k_scales, g.v_scales) for g in self.groups]
            self._adopt([(*p, *n) for p, n in zip(pages, new, strict=True)])
            self.max_nodes = nodes

    def swap_out(self, slot: int, tokens: int) -> HostPages:
        """A copy in host memory of the sequence's first ``tokens`` tokens; :meth:`close` then frees its pages.

        It goes page by page, as there may be no device memory left for a copy of all.
        """
        ids = self._pages[slot][: self.pages_for(tokens)]
        parts = []
        for tensor in self._stored():
            host = torch.empty(len(ids), *tensor[:, 0].shape, dtype=tensor.dtype, device="cpu")
            for place, page in enumerate(ids):
                host[place].copy_(tensor[:, page])
            parts.append(host)
        return HostPages(tokens, tuple(parts))

    def swap_in(self, slot: int, pages: HostPages) -> None:
        """Copy back what :meth:`swap_out` saved into the sequence's own pages, which have been reserved."""
        ids = self._pages[slot][: self.pages_for(pages.tokens)]
        for tensor, host in zip(self._stored(), pages.parts, strict=True):
            for place, page in enumerate(ids):
                tensor[:, page].copy_(host[place])

    def _stored(self) -> list[Tensor]:
        """Everything in which a page has its place, as ``[num_layers, num_pages, ...]``."""
        tensors = [t for g in self.groups for t in (g.k_pages, g.v_pages, g.k_scales, g.v_scales)]
        return [tensor for tensor in tensors if tensor is not None]

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
        new = self._free_pages[: -missing - 1 : -1]
        self.block_table[slot, len(held) : len(held) + missing] = torch.tensor(new, dtype=torch.int32)
        del self._free_pages[-missing:]  # nothing is taken before nothing can fail any more
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
