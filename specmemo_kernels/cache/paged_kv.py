"""Paged KV cache: page allocator, block tables and cached pages of finished sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from specmemo_kernels.cache.kv_storage import HostPages, KVStorage, LayerKV, on_device
from specmemo_kernels.cache.prefix_index import PrefixIndex
from specmemo_kernels.cache.state_pool import MixerSpec, StatePool

#: In a block table: no page. The operators write nothing there.
NO_PAGE = -1


class OutOfPages(RuntimeError):
    """A sequence needs more pages than are free; nothing was changed."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


class PagedKVPool(KVStorage):
    """Page pool of all layers and sequences.

    Args:
        layers: sizes of each layer; equal layers are stacked.
        num_pages, page_size: pages and tokens per page. Only :meth:`grow` and :meth:`resize` change their number.
        max_sequences: rows of the block table.
        max_nodes: scratch slots, the maximum of tree nodes per step over all sequences.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of 8-bit codes with a scale per token and head; ``None``: pages in
            the layers' dtype.
        keep: cache the pages of closed sequences for prefix reuse, until their memory is needed.
        mixers: sizes of the recurrent and convolution layers.

    Attributes:
        states: their states; ``None`` without such layers.
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
        mixers: Sequence[MixerSpec] = (),
    ) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"PagedKVPool: {name} is {value}, it must be at least 1")
        super().__init__(layers, num_pages=num_pages, page_size=page_size, max_nodes=max_nodes, kv_dtype=kv_dtype)
        self.block_table = torch.zeros(max_sequences, num_pages, dtype=torch.int32, device=self.device)
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._users: Counter[int] = Counter()
        self._cached: dict[int, None] = {}  # labelled pages without users, the oldest first
        self._keep = keep
        self._pairs = any(layer.of_drafter for layer in self.layers)
        self._index = PrefixIndex(page_size)  # empty unless ``keep``
        self.states = StatePool(mixers, max_sequences, max_nodes) if mixers else None

    def resize(self, num_pages: int) -> None:
        """Replace all pages by ``num_pages`` new ones while no sequence is open. Clears the cache.

        Old pages are freed first. A failed allocation leaves a pool without pages, which can be resized again.
        """
        assert not self._pages, f"sequences {sorted(self._pages)} are open; their pages would be lost"
        self.clear_cache()
        for pages in (0, num_pages):
            with torch.inference_mode(False):
                tables, free = self.block_table.new_zeros(len(self._free_slots), pages), list(range(pages - 1, -1, -1))
                self._replace_pages(pages, block_table=tables, _free_pages=free)

    def grow(self, num_pages: int) -> None:
        """Grow to ``num_pages`` pages; open sequences keep their pages.

        Old and new pages exist at once during the copy. A failed allocation changes nothing.
        """
        old = self.num_pages
        assert num_pages > old, f"the pool has {old} pages, {num_pages} are not more"
        with torch.inference_mode(False):
            table = self.block_table.new_zeros(self.block_table.shape[0], num_pages)
            table[:, :old].copy_(self.block_table)
            free = [*range(num_pages - 1, old - 1, -1), *self._free_pages]
            self._replace_pages(num_pages, copy=True, block_table=table, _free_pages=free)

    def swap_out(self, slot: int, tokens: int) -> HostPages:
        """Copy a sequence's first ``tokens`` tokens to host memory; :meth:`close` then frees its pages."""
        pages = self.copy_out(self._pages[slot][: self.pages_for(tokens)], tokens)
        return pages if self.states is None else replace(pages, state=self.states.copy_out(slot))

    def swap_in(self, slot: int, pages: HostPages) -> None:
        """Copy the result of :meth:`swap_out` into a sequence's reserved pages."""
        self.copy_in(self._pages[slot][: self.pages_for(pages.tokens)], pages)
        if self.states is not None and pages.state is not None:
            self.states.copy_in(slot, pages.state)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch slots, the mixers' rows included."""
        return super().scratch_bytes + (0 if self.states is None else self.states.row_bytes)

    def resize_scratch(self, max_nodes: int) -> None:
        if self.states is not None:
            self.states.resize_rows(max_nodes)
        super().resize_scratch(max_nodes)

    @property
    def free_pages(self) -> int:
        """Pages without users, cached ones included."""
        return len(self._free_pages) + len(self._cached)

    @property
    def cached_pages(self) -> int:
        """Free pages with the content of finished sequences, for prefix reuse."""
        return len(self._cached)

    def held_pages(self, slot: int) -> int:
        """Pages of one sequence, shared ones included."""
        return len(self._pages[slot])

    def fits_sequences(self, count: int) -> bool:
        """Whether the block table has ``count`` free rows."""
        return len(self._free_slots) >= count

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return pages_for(tokens, self.page_size)

    def open(self) -> int:
        """Allocate a block table row for a new sequence.

        Raises:
            OutOfPages: all rows are taken.
        """
        return self.open_with(())[0]

    def open_with(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Allocate a row for a sequence, with the cached pages of the longest prefix of ``tokens``.

        Full pages are shared and never written to. A partly filled page moves to this sequence, and so does the state
        of recurrent layers.

        Returns:
            The row, and the number of cached tokens; the last of ``tokens`` must always be computed.

        Raises:
            OutOfPages: all rows are taken.
        """
        if not self._free_slots:
            raise OutOfPages(f"all {self.block_table.shape[0]} sequences of the pool are in use; close one first")
        pages, cached_tokens, slot = self._cached_prefix(tokens)
        resume = slot is not None
        if slot is None:
            slot = self._free_slots[-1] if self.states is None else self.states.free_slot(self._free_slots)
        self._pages[slot] = []
        try:
            self._append_pages(slot, pages)
        except BaseException:
            del self._pages[slot]
            raise
        self._free_slots.remove(slot)
        if self.states is not None:
            self.states.open(slot, resume=resume)
        for page in pages:
            self._cached.pop(page, None)
        if cached_tokens % self.page_size:
            self._index.drop(pages[-1])
        return slot, cached_tokens

    def reserve(self, slot: int, tokens: int) -> None:
        """Allocate the missing pages for the first ``tokens`` tokens of sequence ``slot``.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
        """
        missing = self.pages_for(tokens) - len(self._pages[slot])
        if missing <= 0:
            return
        if missing > self.free_pages:
            raise OutOfPages(
                f"{tokens} tokens need {missing} more pages of {self.page_size} tokens, {self.free_pages} of "
                f"{self.num_pages} are free; shorten the prompt or max_new_tokens, or raise memory_budget"
            )
        keep_free = max(0, len(self._free_pages) - missing)
        free = self._free_pages[keep_free:][::-1]
        evicted = [page for page, _ in zip(self._cached, range(missing - len(free)), strict=False)]
        self._append_pages(slot, [*free, *evicted])
        del self._free_pages[keep_free:]
        for page in evicted:
            self._cached.pop(page)
            self._index.drop(page)

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        """Append to a sequence's pages; a failed write of the block table changes nothing."""
        held = self._pages[slot]
        ids = on_device(torch.tensor(pages, dtype=torch.int32, device="cpu"), self.device)
        self.block_table[slot, len(held) : len(held) + len(pages)] = ids
        held.extend(pages)
        self._users.update(pages)

    def _labels(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the keys and values of each token's slot depend on, besides the slots before it.

        That is the token. A drafter's layer also reads the next token, so then it is both, for all tokens but the last.
        """
        return [a << 32 | b for a, b in pairwise(tokens)] if self._pairs else tokens

    def cached_prefix_len(self, tokens: Sequence[int]) -> int:
        """Number of leading ``tokens`` that a new sequence needn't compute."""
        return self._cached_prefix(tokens)[1]

    def shared_pages(self, tokens: Sequence[int]) -> int:
        """Pages that :meth:`open_with` would share with open sequences; they take no free page."""
        return sum(page in self._users for page in self._cached_prefix(tokens)[0])

    def _cached_prefix(self, tokens: Sequence[int]) -> tuple[list[int], int, int | None]:
        """Pages of the longest cached prefix, its length, and the row with the state of recurrent layers behind it."""
        labels = self._labels(tokens)
        if self.states is None:
            return *self._index.match(labels), None
        for slot in self.states.begins(labels):
            length = len(self.states.cached[slot])
            pages, cached_tokens = self._index.match(labels[: length + 1])
            if cached_tokens == length:
                return pages, length, slot
        return [], 0, None

    def close(self, slot: int, tokens: Sequence[int] = (), computed: int | None = None) -> None:
        """Free a sequence's pages and row.

        ``tokens``: the sequence's tokens, of which the first ``computed`` (``None``: all) are in its pages. A pool with
        ``keep`` caches the pages under these tokens.
        """
        pages = self._pages.pop(slot)
        labels = self._labels(tokens)[:computed] if self._keep else ()
        if self.states is not None:
            labels = self.states.close(slot, labels)
        self._index.label(pages, labels)
        for page in reversed(pages):  # eviction order: a prefix is useful without its end
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._index:
                    self._cached[page] = None
                else:
                    self._free_pages.append(page)
        self._free_slots.append(slot)

    def is_open(self, slot: int) -> bool:
        """Whether a sequence holds row ``slot``."""
        return slot in self._pages

    @property
    def idle(self) -> bool:
        """Whether no sequence holds a page or a row. An interrupt of :meth:`close` may leave some held for ever."""
        rows, slots = self.block_table.shape[0], len(self._free_slots)
        return not self._pages and not self._users and slots == rows and self.free_pages == self.num_pages

    def clear_cache(self) -> None:
        """Drop all cached pages, while no sequence is open.

        Raises:
            RuntimeError: a sequence is open; its pages would be labelled again when it closes.
        """
        if self._pages:
            raise RuntimeError(f"{len(self._pages)} sequences are open; close them first")
        self._index = PrefixIndex(self.page_size)
        self._free_pages.extend(self._cached)
        self._cached.clear()
        if self.states is not None:
            self.states.cached.clear()

    def take_cached(self, other: PagedKVPool) -> None:
        """Copy cached pages of ``other``, a pool of the same layers, into this unused pool: the newest that fit."""
        newest = list(other._cached)[::-1][: len(self._free_pages)]
        new_pages = {page: self._free_pages.pop() for page in newest}
        if not new_pages:
            return
        self.copy_from(other, new_pages)
        self._index = other._index.moved(new_pages)
        self._cached = {new_pages[page]: None for page in reversed(newest)}
        if self.states is not None and other.states is not None:
            self.states.take_cached(other.states)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless each page is free, cached or in use, and the block table agrees."""
        owners = Counter(self._free_pages) + Counter(self._cached.keys())
        used: Counter[int] = Counter()
        for slot, pages in self._pages.items():
            used.update(pages)
            table = self.block_table[slot, : len(pages)].tolist()
            assert table == pages, f"block table of sequence {slot} is {table}, the allocator has {pages}"
        labels = set(self._index.pages())
        owners.update({page: 1 if page in labels else count for page, count in used.items()})
        assert used == self._users, f"pages in use: {used} by the sequences, {self._users} by the allocator"
        assert labels <= self._cached.keys() | used.keys(), "labelled pages are free"
        assert self._cached.keys() <= labels, "cached pages have no label"
        wrong = {page: count for page, count in owners.items() if count != 1 or not 0 <= page < self.num_pages}
        assert not wrong, f"pages without exactly one owner: {wrong}"
        assert len(owners) == self.num_pages, f"pages without exactly one owner: {self.num_pages - len(owners)}"
        slots = Counter(self._free_slots) + Counter(self._pages.keys())
        assert slots == Counter(range(self.block_table.shape[0])), f"sequence rows without exactly one owner: {slots}"
