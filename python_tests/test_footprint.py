"""The bound on a pass's memory holds for any number of rows; formulas grow with their inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmemo_kernels.drafting import base
from specmemo_kernels.forward import batch
from specmemo_kernels.planning.footprint import (
    GenerationShape,
    StepSize,
    fixed_parts,
    object_bytes,
    page_parts,
    pages_within,
)
from specmemo_kernels.planning.pass_bytes import PassBytes

moments = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=20)
rows = st.integers(1, 600)


def held(lines: list[tuple[int, int]], count: int) -> list[int]:
    """Bytes after each operator of a pass over ``count`` rows."""
    return [constant + slope * count for constant, slope in lines]


@given(moments, rows, rows, rows)
def test_a_bound_for_any_number_of_rows(lines: list[tuple[int, int]], few: int, more: int, other: int) -> None:
    """From two passes, for smaller, intermediate and larger passes; exact if the peak is at the same operator."""
    many = few + more
    bound = PassBytes.fitted((few, held(lines, few)), (many, held(lines, many)))
    assert bound.at(other) >= max(held(lines, other))
    assert bound == PassBytes(max(a for a, _ in lines), max(b for _, b in lines))


@given(moments, moments, rows, rows, rows)
def test_passes_with_other_operators(
    lines: list[tuple[int, int]], extra: list[tuple[int, int]], few: int, more: int, other: int
) -> None:
    """A branch that only the larger pass took: still a bound for passes with the same branch."""
    many = few + more
    bound = PassBytes.fitted((few, held(lines, few)), (many, held([*lines, *extra], many)))
    assert bound.at(other) >= max(held([*lines, *extra], other))


@given(moments, rows)
def test_rounding_goes_up(lines: list[tuple[int, int]], few: int) -> None:
    """Bytes per row that aren't whole numbers (bits packed into bytes)."""
    large, small = held(lines, few + 3), held(lines, few)
    bound = PassBytes.fitted((few, small), (few + 3, [size + 1 for size in large]))
    assert bound.at(few) >= max(small)
    assert bound.at(few + 3) >= max(large) + 1


ascending = st.lists(st.tuples(rows, st.integers(0, 10**6)), min_size=2, max_size=6, unique_by=lambda point: point[0])


@given(ascending, ascending, rows)
def test_bounds_in_steps(first: list[tuple[int, int]], second: list[tuple[int, int]], count: int) -> None:
    """The next larger size's bytes, and the larger of two bounds at every number of rows."""
    points, others = sorted(first), sorted(second)
    bound, other = PassBytes.stepwise(points), PassBytes.stepwise(others)
    if count <= points[-1][0]:
        assert bound.at(count) == next(held for rows, held in points if rows >= count)
    both = bound.elementwise_max(other)
    assert both.at(count) >= max(bound.at(count), other.at(count))
    if count <= min(points[-1][0], others[-1][0]):
        assert both.at(count) == max(bound.at(count), other.at(count))


@given(ascending, rows, st.integers(0, 10**6), rows)
def test_another_bound_for_few_rows(points: list[tuple[int, int]], few_rows: int, held: int, count: int) -> None:
    bound = PassBytes.stepwise(sorted(points))
    changed = bound.with_few(few_rows, PassBytes(held))
    assert changed.at(count) == (held if count <= few_rows else bound.at(count))


@pytest.mark.parametrize(
    ("few", "many"), [((0, [1]), (4, [1])), ((4, [1]), (4, [1])), ((4, []), (8, [])), ((2, [1]), (8, []))]
)
def test_passes_that_tell_nothing(few: tuple[int, list[int]], many: tuple[int, list[int]]) -> None:
    with pytest.raises(ValueError, match=f"got {few[0]} rows with {len(few[1])} operators and {many[0]} rows"):
        PassBytes.fitted(few, many)


SHAPE = GenerationShape(
    kv_bytes_per_token=1000, head_bytes=77, forward=PassBytes(50, 300), logits=PassBytes(5, 70), state_bytes=11
)
LOAD = StepSize(tree_size=6, sequences=3, chunk=40, page_size=16)


def test_rows_of_a_pass() -> None:
    """The larger of a chunk and a step."""
    assert (LOAD.nodes, LOAD.rows, replace(LOAD, chunk=10).rows) == (18, 40, 18)


def test_parts() -> None:
    """By hand, for a backend without a workspace."""
    fixed, page = fixed_parts(SHAPE, LOAD), page_parts(SHAPE, LOAD)
    assert fixed["heads"] == 77
    assert fixed["tree_scratch"] == 18 * 1000
    assert fixed["activations"] == 50 + 40 * 300 + 5 + 18 * 70 + 3 * 11, "as many rows as a chunk has, trees among them"
    wide = fixed_parts(SHAPE, replace(LOAD, chunk=17))
    assert wide["activations"] == 50 + 18 * 300 + 5 + 18 * 70 + 3 * 11, "a step, all of whose nodes get logits"
    assert page["kv_pages"] == 16 * 1000
    assert page["activations"] == 0


def test_splits() -> None:
    """States of all rows in all splits that the pages and the rows themselves can need."""
    shape = replace(SHAPE, split_size=512, split_row_bytes=100)
    for pages in range(200):
        slots = pages * LOAD.page_size + LOAD.rows
        planned = fixed_parts(shape, LOAD)["activations"] + pages * page_parts(shape, LOAD)["activations"]
        assert planned - fixed_parts(SHAPE, LOAD)["activations"] >= LOAD.rows * -(-slots // 512) * 100


@pytest.mark.parametrize("change", [{"tree_size": 70}, {"sequences": 4}, {"chunk": 50}])
def test_more_at_once_costs_more(change: dict[str, int]) -> None:
    less, more = fixed_parts(SHAPE, LOAD), fixed_parts(SHAPE, replace(LOAD, **change))
    assert more["metadata"] > less["metadata"]
    assert more["activations"] > less["activations"]


def test_metadata_is_copied_to_every_device() -> None:
    two = replace(SHAPE, devices=2)
    assert fixed_parts(two, LOAD)["metadata"] == 2 * fixed_parts(SHAPE, LOAD)["metadata"]
    assert page_parts(two, LOAD)["metadata"] == 2 * page_parts(SHAPE, LOAD)["metadata"]


def test_layouts_that_are_kept_are_counted() -> None:
    assert batch.tree_layout.cache_parameters()["maxsize"] == batch.CACHED_LAYOUTS
    assert base.candidate_columns.cache_parameters()["maxsize"] == batch.CACHED_LAYOUTS


@given(st.integers(0, 2**32), st.integers(1, 2**20), st.integers(1, 512))
def test_objects_of_pages(room: int, page_bytes: int, page_size: int) -> None:
    """As many pages as fit with their objects, of which a MiB isn't counted."""
    shape = GenerationShape(1, 0, PassBytes(), page_objects=True)
    pages = pages_within(shape, page_size, room, page_bytes)

    def needed(pages: int) -> int:
        objects = max(0, pages * (500 + 8 * page_size) - 2**20)
        assert object_bytes(shape, page_size, pages) == objects
        return pages * page_bytes + objects

    assert needed(pages) <= room < needed(pages + 1)
    elsewhere = replace(shape, page_objects=False)
    assert pages_within(elsewhere, page_size, room, page_bytes) == room // page_bytes
    assert object_bytes(elsewhere, page_size, pages) == 0
