"""The paged KV cache: pages handed out as tokens arrive, block tables, and the scratch slots of a step's candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmemo_kernels.prefix_index import PrefixIndex

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
        keep: pages of closed sequences stay until they are needed otherwise, for sequences that begin the same.

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
        keep: bool = False,
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
        self._users: Counter[int] = Counter()
        # Pages that nobody uses but whose content is known; the oldest comes first.
        self._kept: dict[int, None] = {}
        self._index = PrefixIndex(page_size) if keep else None

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

        A failed allocation leaves a pool without pages, which can be resized again. Kept pages are gone either way.
        """
        assert not self._pages, f"sequences {sorted(self._pages)} are open; their pages would be lost"
        self.forget()
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
        """Pages for whoever needs some, the kept ones among them."""
        return len(self._free_pages) + len(self._kept)

    @property
    def kept_pages(self) -> int:
        """Free pages whose content is known: it serves whoever begins the same, until the page is needed otherwise."""
        return len(self._kept)

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
        if missing > self.free_pages:
            raise OutOfPages(
                f"{tokens} tokens need {missing} more pages of {self.page_size} tokens, {self.free_pages} of "
                f"{self.num_pages} are free; shorten the prompt or max_new_tokens, or raise memory_budget"
            )
        spare = min(missing, len(self._free_pages))  # kept pages, the oldest first, only where no other is left
        kept = [page for page, _ in zip(self._kept, range(missing - spare), strict=False)]
        self._hand_out(slot, [*self._free_pages[len(self._free_pages) - spare :][::-1], *kept])
        del self._free_pages[len(self._free_pages) - spare :]
        for page in kept:
            self._kept.pop(page)
            self._unlabel(page)

    def _hand_out(self, slot: int, pages: list[int]) -> None:
        """These are a sequence's next pages; nothing has changed if the table can't be written."""
        held = self._pages[slot]
        self.block_table[slot, len(held) : len(held) + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        held.extend(pages)
        self._users.update(pages)

    def _unlabel(self, page: int) -> None:
        if self._index is not None:
            self._index.drop(page)

    def known(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` needn't be computed, because pages hold their keys and values."""
        return self._index.match(tokens)[1] if self._index is not None else 0

    def reuse(self, slot: int, tokens: Sequence[int]) -> int:
        """Give a sequence that has no pages yet those that hold the longest known beginning of its ``tokens``.

        Full pages are shared, and nobody writes to them. A partly filled one belongs to this sequence from now on.

        Returns:
            How many tokens needn't be computed; the last one always must be.
        """
        if self._index is None or self._pages[slot]:
            return 0
        pages, known = self._index.match(tokens)
        if pages:
            self._hand_out(slot, pages)
        for page in pages:
            self._kept.pop(page, None)
        if known % self.page_size:
            self._unlabel(pages[-1])
        return known

    def close(self, slot: int, tokens: Sequence[int] = ()) -> None:
        """Retire a sequence: its pages and its row are free at once.

        Args:
            tokens: those whose keys and values its pages hold; a pool that keeps pages finds them by these.
        """
        pages = self._pages.pop(slot)
        if self._index is not None:
            self._index.label(pages, tokens)
        for page in reversed(pages):  # of kept pages the last of a text goes first, without which others still serve
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if self._index is not None and page in self._index:
                    self._kept[page] = None
                else:
                    self._free_pages.append(page)
        self._free_slots.append(slot)

    def forget(self) -> None:
        """Drop what is known about pages, while no sequence is open.

        Raises:
            RuntimeError: one is; when it closes, its pages would be labelled again.
        """
        if self._pages:
            raise RuntimeError(f"{len(self._pages)} sequences are open; close them first")
        if self._index is not None:
            self._index = PrefixIndex(self.page_size)
        self._free_pages.extend(self._kept)
        self._kept.clear()

    def take_kept(self, other: PagedKVPool) -> None:
        """Copy the kept pages of ``other``, a pool of the same layers, as many as fit, the newest first.

        This pool must be unused; both exist while it happens.
        """
        newest = list(other._kept)[::-1][: len(self._free_pages)]
        place = {page: self._free_pages.pop() for page in newest}
        if not place or other._index is None:
            return
        for mine, theirs in zip(self._stored(), other._stored(), strict=True):
            for old, new in place.items():
                mine[:, new].copy_(theirs[:, old])  # page by page, so that nothing else is held meanwhile
        self._index = other._index.moved(place)
        self._kept = {place[page]: None for page in reversed(newest)}

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every page has one owner, or users that share what it holds, and the block
        table says the same."""
        owners = Counter(self._free_pages) + Counter(self._kept.keys())
        used: Counter[int] = Counter()
        for slot, pages in self._pages.items():
            used.update(pages)
            table = self.block_table[slot, : len(pages)].tolist()
            assert table == pages, f"block table of sequence {slot} says {table}, the allocator {pages}"
        labels = set(self._index.pages()) if self._index is not None else set()
        owners.update({page: 1 if page in labels else count for page, count in used.items()})
        assert used == self._users, f"pages owned not once: {used} by the sequences, {self._users} by the allocator"
        assert labels <= self._kept.keys() | used.keys(), "pages owned not once: labelled ones that are free"
        assert self._kept.keys() <= labels, "pages owned not once: kept ones without a label"
        wrong = {page: count for page, count in owners.items() if count != 1 or not 0 <= page < self.num_pages}
        assert not wrong, f"pages owned not once: {wrong}"
        assert len(owners) == self.num_pages, f"pages owned not once: {self.num_pages - len(owners)} have no owner"
        slots = Counter(self._free_slots) + Counter(self._pages.keys())
        assert slots == Counter(range(self.block_table.shape[0])), f"sequence rows owned not once: {slots}"
