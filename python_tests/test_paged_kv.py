"""The page allocator under random use, compared with a model of page ownership."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from selection import examples
from torch.utils._python_dispatch import TorchDispatchMode

from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import OutOfPages, PagedKVPool

CPU = torch.device("cpu")
LAYER = LayerKV(2, 8, 8, torch.float32, CPU)


def small_pool(num_pages: int = 8, page_size: int = 4, max_sequences: int = 3) -> PagedKVPool:
    return PagedKVPool([LAYER], num_pages=num_pages, page_size=page_size, max_sequences=max_sequences, max_nodes=5)


class Allocator(RuleBasedStateMachine):
    """Open, reserve and close in any order; the model knows each sequence's pages by their reserved number."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5), max_sequences=st.integers(1, 4))
    def start(self, num_pages: int, page_size: int, max_sequences: int) -> None:
        self.num_pages, self.page_size, self.max_sequences = num_pages, page_size, max_sequences
        self.pool = small_pool(num_pages, page_size, max_sequences)
        self.tokens: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}

    def needed(self, tokens: int) -> int:
        return (tokens + self.page_size - 1) // self.page_size

    def free(self) -> int:
        return self.num_pages - sum(self.needed(n) for n in self.tokens.values())

    @rule()
    def open(self) -> None:
        if len(self.tokens) == self.max_sequences:
            with pytest.raises(OutOfPages, match=f"all {self.max_sequences} sequences"):
                self.pool.open()
            return
        slot = self.pool.open()
        assert slot not in self.tokens
        assert 0 <= slot < self.max_sequences
        self.tokens[slot], self.pages[slot] = 0, []

    @rule(data=st.data(), tokens=st.integers(0, 50))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        if not self.tokens:
            return
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        missing = self.needed(tokens) - self.needed(self.tokens[slot])
        if missing > self.free():
            table, free = self.pool.block_table.clone(), self.pool.free_pages
            with pytest.raises(OutOfPages, match=f"{tokens} tokens need {missing} more pages of {self.page_size}"):
                self.pool.reserve(slot, tokens)
            assert torch.equal(self.pool.block_table, table)
            assert self.pool.free_pages == free
            return
        self.pool.reserve(slot, tokens)
        self.tokens[slot] = max(self.tokens[slot], tokens)
        owned = self.pool.block_table[slot, : self.needed(self.tokens[slot])].tolist()
        assert owned[: len(self.pages[slot])] == self.pages[slot], "a page moved"
        self.pages[slot] = owned

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if not self.tokens:
            return
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.close(slot)
        del self.tokens[slot], self.pages[slot]

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.free_pages == self.free()
        for count in range(self.max_sequences + 2):
            assert self.pool.fits_sequences(count) == (len(self.tokens) + count <= self.max_sequences)
        every = [page for pages in self.pages.values() for page in pages]
        assert len(set(every)) == len(every)
        assert all(0 <= page < self.num_pages for page in every)
        for slot, pages in self.pages.items():
            assert self.pool.block_table[slot, : len(pages)].tolist() == pages


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_unlike_layers_are_stacked_by_kind() -> None:
    """Views per layer are in their kind's group, so that one launch commits all layers of a kind."""
    other = LayerKV(1, 6, 4, torch.bfloat16, CPU)
    pool = PagedKVPool([LAYER, other, LAYER], num_pages=3, page_size=4, max_sequences=2, max_nodes=5)
    assert [group.layers for group in pool.groups] == [(0, 2), (1,)]
    assert pool.k_pages[1].shape == (3, 4, 1, 6)
    assert pool.v_pages[1].shape == (3, 4, 1, 4)
    assert pool.k_scratch[1].shape == (5, 1, 6)
    assert pool.v_scratch[2].shape == (5, 2, 8)
    for layer, (group, place) in enumerate([(0, 0), (1, 0), (0, 1)]):
        for name in ("k_pages", "v_pages", "k_scratch", "v_scratch"):
            view, whole = getattr(pool, name)[layer], getattr(pool.groups[group], name)
            assert view.data_ptr() == whole[place].data_ptr()
            assert view.dtype == pool.layers[layer].dtype


def test_bytes_are_what_is_allocated() -> None:
    pool = PagedKVPool(
        [LAYER, LayerKV(1, 6, 4, torch.bfloat16, CPU)], num_pages=3, page_size=4, max_sequences=2, max_nodes=5
    )
    pages = [x for group in pool.groups for x in (group.k_pages, group.v_pages)]
    scratch = [x for group in pool.groups for x in (group.k_scratch, group.v_scratch)]
    assert pool.page_bytes == sum(x.nbytes for x in pages) == 3 * 4 * (2 * 16 * 4 + 10 * 2)
    assert pool.scratch_bytes == sum(x.nbytes for x in scratch) == 5 * (2 * 16 * 4 + 10 * 2)


class FailingOperator(TorchDispatchMode):
    """Fails in one operator, views included."""

    def __init__(self, site: int) -> None:
        super().__init__()
        self.left = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("out of memory on purpose")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("change", ["grow", "resize", "resize_scratch"])
def test_a_failed_change_leaves_sizes_that_agree(change: str, kv_dtype: str | None) -> None:
    """Whichever operator fails, and the next change succeeds."""
    layers = [LAYER, LayerKV(1, 6, 4, torch.bfloat16, CPU), LAYER]
    for site in range(200):
        pool = PagedKVPool(layers, num_pages=3, page_size=4, max_sequences=2, max_nodes=5, kv_dtype=kv_dtype)
        failing = FailingOperator(site)
        try:
            with failing:
                getattr(pool, change)(7)
        except torch.OutOfMemoryError:
            pool.check_integrity()
        assert pool.block_table.shape == (2, pool.num_pages)
        for name, size in (("pages", pool.num_pages), ("scratch", pool.max_nodes), ("scales", pool.num_pages)):
            tensors = [x for kind in "kv" for x in getattr(pool, f"{kind}_{name}") if x is not None]
            stacked = [x for kind in "kv" for g in pool.groups if (x := getattr(g, f"{kind}_{name}")) is not None]
            assert {len(tensor) for tensor in tensors} | {tensor.shape[1] for tensor in stacked} <= {size}
        getattr(pool, change)(9)
        pool.check_integrity()
        if failing.left >= 0:
            break
    assert site > 20


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_sequences"])
def test_empty_pools_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, it must be at least 1"):
        small_pool(**{name: 0})


def test_closed_sequences_are_unknown() -> None:
    """Closing twice would give one page to two sequences."""
    pool = small_pool()
    slot = pool.open()
    pool.reserve(slot, 9)
    pool.close(slot)
    with pytest.raises(KeyError):
        pool.close(slot)
    with pytest.raises(KeyError):
        pool.reserve(slot, 1)
    pool.check_integrity()


def test_the_whole_pool_for_one_sequence() -> None:
    """The block table is wide enough for all pages, and the pool is whole again afterwards."""
    pool = small_pool()
    slot = pool.open()
    pool.reserve(slot, 32)
    assert sorted(pool.block_table[slot].tolist()) == list(range(8))
    assert pool.free_pages == 0
    with pytest.raises(OutOfPages, match="33 tokens need 1 more pages of 4 tokens, 0 of 8 are free"):
        pool.reserve(slot, 33)
    pool.close(slot)
    assert pool.free_pages == 8


def _other_page_in_table(pool: PagedKVPool) -> None:
    pool.block_table[0, 1] += 1


def _page_lost(pool: PagedKVPool) -> None:
    pool._free_pages.pop()


def _page_free_and_owned(pool: PagedKVPool) -> None:
    pool._free_pages.append(pool._pages[0][0])


def _page_of_two(pool: PagedKVPool) -> None:
    pool._pages[1][0] = pool._pages[0][0]
    pool.block_table[1, 0] = pool.block_table[0, 0]


def _page_out_of_range(pool: PagedKVPool) -> None:
    pool._free_pages[0] = 8


def _row_lost(pool: PagedKVPool) -> None:
    pool._free_slots.pop()


def _row_free_and_used(pool: PagedKVPool) -> None:
    pool._free_slots.append(0)


@pytest.mark.parametrize(
    "tamper",
    [
        _other_page_in_table, _page_lost, _page_free_and_owned, _page_of_two, _page_out_of_range, _row_lost,
        _row_free_and_used,
    ],
    ids=lambda f: f.__name__.strip("_"),
)  # fmt: skip
def test_integrity_check_finds_damage(tamper: Callable[[PagedKVPool], None]) -> None:
    """Each kind of damage to consistent books."""
    pool = small_pool()
    for tokens in (9, 2):
        pool.reserve(pool.open(), tokens)
    pool.check_integrity()
    tamper(pool)
    with pytest.raises(AssertionError, match=r"block table of|pages in use|(labelled|cached) pages|exactly one owner"):
        pool.check_integrity()
