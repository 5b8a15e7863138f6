"""The paged KV cache: whose each page is, block tables, and which pages of finished sequences are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from specmemo_kernels.cache.kv_storage import HostPages, KVStorage, LayerKV, on_device
from specmemo_kernels.cache.prefix_index import PrefixIndex


class OutOfPages(RuntimeError):
    """A sequence needs more pages than are free; nothing was changed."""


class PagedKVPool(KVStorage):
    """Pages for all layers and sequences: handed out as tokens arrive, taken back when a sequence ends.

    Args:
        layers: what each layer stores; equal layers are stacked.
        num_pages, page_size: pages and tokens per page; the pool never grows by itself (:meth:`grow`, :meth:`resize`).
        max_sequences: rows of the block table.
        max_nodes: scratch slots, the most tree nodes that one step verifies over all sequences.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of 8-bit codes with a scale per token and head; ``None`` for
            pages in the layers' own dtype.
        keep: pages of closed sequences stay until they are needed otherwise, for sequences that begin the same.
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
        super().__init__(layers, num_pages=num_pages, page_size=page_size, max_nodes=max_nodes, kv_dtype=kv_dtype)
        self.block_table = torch.zeros(max_sequences, num_pages, dtype=torch.int32, device=self.device)
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._users: Counter[int] = Counter()
        # Pages that nobody uses but whose content is known; the oldest comes first.
        self._kept: dict[int, None] = {}
        self._index = PrefixIndex(page_size) if keep else None

    def resize(self, num_pages: int) -> None:
        """Really have ``num_pages`` pages, while no sequence is open: the old ones are freed before there are new ones.

        A failed allocation leaves a pool without pages, which can be resized again. Kept pages are gone either way.
        """
        assert not self._pages, f"sequences {sorted(self._pages)} are open; their pages would be lost"
        self.clear_cache()
        for pages in (0, num_pages):
            with torch.inference_mode(False):
                tables = self.block_table.new_zeros(len(self._free_slots), pages)
                self._renew_pages(pages)
            self.block_table, self._free_pages = tables, list(range(pages - 1, -1, -1))

    def grow(self, num_pages: int) -> None:
        """Have ``num_pages`` pages, more than now; sequences may be open, and keep their pages.

        Old and new pages exist at once while the content is copied. A failed allocation changes nothing.
        """
        old = self.num_pages
        assert num_pages > old, f"the pool has {old} pages, {num_pages} are not more"
        with torch.inference_mode(False):
            table = self.block_table.new_zeros(self.block_table.shape[0], num_pages)
            table[:, :old].copy_(self.block_table)
            self._extend_pages(num_pages)
        self.block_table = table
        self._free_pages = [*range(num_pages - 1, old - 1, -1), *self._free_pages]

    def swap_out(self, slot: int, tokens: int) -> HostPages:
        """A copy in host memory of the sequence's first ``tokens`` tokens; :meth:`close` then frees its pages."""
        return self.copy_out(self._pages[slot][: self.pages_for(tokens)], tokens)

    def swap_in(self, slot: int, pages: HostPages) -> None:
        """Copy back what :meth:`swap_out` saved into the sequence's own pages, which have been reserved."""
        self.copy_in(self._pages[slot][: self.pages_for(pages.tokens)], pages)

    @property
    def free_pages(self) -> int:
        """Pages for whoever needs some, the kept ones among them."""
        return len(self._free_pages) + len(self._kept)

    @property
    def cached_pages(self) -> int:
        """Free pages whose content is known: it serves whoever begins the same, until the page is needed otherwise."""
        return len(self._kept)

    def held_pages(self, slot: int) -> int:
        """Pages of one sequence, shared ones included."""
        return len(self._pages[slot])

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
        ids = on_device(torch.tensor(pages, dtype=torch.int32), self.device)
        self.block_table[slot, len(held) : len(held) + len(pages)] = ids
        held.extend(pages)
        self._users.update(pages)

    def _unlabel(self, page: int) -> None:
        if self._index is not None:
            self._index.drop(page)

    def cached_prefix_len(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` needn't be computed, because pages hold their keys and values."""
        return self._index.match(tokens)[1] if self._index is not None else 0

    def shared_pages(self, tokens: Sequence[int]) -> int:
        """How many pages :meth:`reuse` would share with open sequences: they take none of the free ones."""
        return sum(page in self._users for page in self._index.match(tokens)[0]) if self._index is not None else 0

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

    def clear_cache(self) -> None:
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

    def take_cached(self, other: PagedKVPool) -> None:
        """Copy the kept pages of ``other``, a pool of the same layers, as many as fit, the newest first.

        This pool must be unused; both exist while it happens.
        """
        newest = list(other._kept)[::-1][: len(self._free_pages)]
        place = {page: self._free_pages.pop() for page in newest}
        if not place or other._index is None:
            return
        self.copy_from(other, place)
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
