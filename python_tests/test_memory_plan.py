"""Memory plans are always within the budget; a refusal names a budget that is enough."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selection import examples

from specmemo_kernels.planning.footprint import GenerationShape, StepSize, fixed_parts, page_parts, pass_bytes
from specmemo_kernels.planning.memory_plan import BudgetError, MemoryPlan, divide_budget, format_bytes, parse_bytes
from specmemo_kernels.planning.pass_bytes import PassBytes
from specmemo_kernels.tree.draft_tree import DraftTree

TREES = [
    DraftTree.chain(0),
    DraftTree.chain(4),
    DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [2]]),
    DraftTree.chain(63),
]
shapes = st.builds(
    GenerationShape,
    kv_bytes_per_token=st.integers(1, 600_000),
    head_bytes=st.integers(0, 2 * 10**9),
    forward=st.builds(PassBytes, st.integers(0, 10**7), st.integers(0, 300_000)),
    logits=st.builds(PassBytes, st.integers(0, 10**5), st.integers(0, 600_000)),
    state_bytes=st.integers(0, 10**5),
    split_size=st.sampled_from([0, 512, 1000]),
    split_row_bytes=st.integers(0, 20_000),
    devices=st.integers(1, 3),
)
problems = st.fixed_dictionaries(
    {
        "shape": shapes,
        "tree": st.sampled_from(TREES),
        "page_size": st.sampled_from([1, 7, 16, 64]),
        "max_sequences": st.integers(1, 20),
        "prefill_chunk": st.integers(1, 600),
        "slots": st.one_of(st.just(1), st.integers(1, 3000)),
    }
)
budgets = st.integers(0, 40).flatmap(lambda power: st.integers(2**power, 2 ** (power + 1)))


def test_sizes_that_are_read() -> None:
    """Decimal and binary units, with and without blanks; fractions are truncated to whole bytes."""
    sizes = {
        "1": 1, 1: 1, 4096: 4096, 1e9: 10**9, "512 MB": 512 * 10**6, "2GiB": 2 * 2**30, " 1.5 KiB ": 1536,
        "1KB": 1000, "3B": 3, "0.5TiB": 2**39, "1TB": 10**12, "1.0005 KB": 1000, 2**60 + 1: 2**60 + 1,
    }  # fmt: skip
    assert {size: parse_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "-1", -5, 0, "0", "0.0MiB", "0.5", "0.0001 KB", "2 gigabytes", "2G", "1iB", "2gib", "1e9x", "1,5GB",
     "nan", "inf", "9" * 400, 10**30, 2.5, None, True],
)  # fmt: skip
def test_sizes_that_are_refused(size: object) -> None:
    """Anything below one byte; the message repeats it."""
    with pytest.raises(ValueError, match=re.escape(f"memory_budget is {size!r}")):
        parse_bytes(size)  # type: ignore[arg-type]


def test_sizes_that_are_written() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2**20: "1.0 MiB", 5 * 2**30: "5.00 GiB", 2**45: "32768.00 GiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes


@settings(deadline=None)
@given(st.integers(1, 2**45))
def test_written_sizes_are_read_back(size: int) -> None:
    """To the digits shown: a twentieth of a KiB or MiB, half a hundredth of a GiB."""
    read = parse_bytes(format_bytes(size))
    unit = 1 if size < 1024 else 2**10 if size < 2**20 else 2**20 if size < 2**30 else 2**30
    assert abs(read - size) <= unit * (0.005 if unit == 2**30 else 0.05) + 1


@settings(max_examples=examples(400), deadline=None)
@given(problems, budgets)
def test_a_plan_stays_within_its_budget(problem: dict[str, object], budget: int) -> None:
    """Parts equal the cost of the plan's numbers and add up to at most the budget; or the error names a budget that
    works.
    """
    try:
        plan = divide_budget(**problem, budget=budget)
    except BudgetError as error:
        plan, refusal = None, str(error)
    if plan is None:
        assert format_bytes(budget) in refusal
        enough = parse_bytes(re.search(r"give at least ([\d.]+ \w+)", refusal)[1])
        assert enough > budget
        assert divide_budget(**problem, budget=enough).max_tokens >= problem["slots"]
        return
    check_parts(plan, problem)
    assert plan.max_tokens >= problem["slots"]
    assert sum(plan.parts.values()) <= budget == plan.budget
    assert 1 <= plan.max_sequences <= problem["max_sequences"]
    assert 1 <= plan.prefill_chunk <= problem["prefill_chunk"]
    assert plan.prefill_chunk <= max(plan.max_tokens, 32), "no prompt is longer than the cache"
    page = page_parts(problem["shape"], load_of(plan))
    assert budget - sum(plan.parts.values()) < sum(page.values()), "one more page would have fitted"


def load_of(plan: MemoryPlan) -> StepSize:
    return StepSize(plan.tree.size, plan.max_sequences, plan.prefill_chunk, plan.page_size)


def check_parts(plan: MemoryPlan, problem: dict[str, object]) -> None:
    """Compare each part with its definition."""
    shape, nodes = problem["shape"], plan.tree.size * plan.max_sequences
    assert plan.max_nodes == nodes
    assert plan.tree is problem["tree"]
    assert plan.page_size == problem["page_size"]
    load, pages = load_of(plan), plan.max_pages or 0
    fixed, page = fixed_parts(shape, load), page_parts(shape, load)
    assert plan.parts == {
        name: fixed.get(name, 0) + pages * page.get(name, 0) for name in plan.parts.keys() | fixed.keys()
    }
    assert plan.parts["heads"] == shape.head_bytes
    assert plan.parts["tree_scratch"] == nodes * shape.kv_bytes_per_token
    assert plan.parts["activations"] >= shape.forward.at(nodes) + shape.logits.at(nodes)
    assert plan.parts["activations"] >= shape.forward.at(plan.prefill_chunk)
    if plan.max_pages is not None:
        assert plan.max_tokens == plan.max_pages * plan.page_size
        assert plan.parts["kv_pages"] == plan.max_tokens * shape.kv_bytes_per_token


@settings(max_examples=examples(200), deadline=None)
@given(problems, budgets, st.integers(0, 10**9))
def test_more_memory_never_hurts(problem: dict[str, object], budget: int, more: int) -> None:
    """A larger budget never fails if a smaller one worked; no fewer sequences, and in similar plans no fewer pages."""
    try:
        small = divide_budget(**problem, budget=budget)
    except BudgetError:
        assume(False)
    large = divide_budget(**problem, budget=budget + more)
    assert large.max_sequences >= small.max_sequences
    if (large.max_sequences, large.prefill_chunk) == (small.max_sequences, small.prefill_chunk):
        assert large.max_pages >= small.max_pages
    if large.max_sequences == small.max_sequences:
        assert large.prefill_chunk >= small.prefill_chunk


@settings(deadline=None)
@given(problems)
def test_without_a_budget_nothing_is_cut(problem: dict[str, object]) -> None:
    plan = divide_budget(**problem, budget=None)
    check_parts(plan, problem)
    assert plan.max_pages is None
    assert plan.max_tokens is None
    assert "kv_pages" not in plan.parts
    assert (plan.max_sequences, plan.prefill_chunk) == (problem["max_sequences"], problem["prefill_chunk"])


SHAPE = GenerationShape(kv_bytes_per_token=1024, head_bytes=2**20, forward=PassBytes(0, 4096), logits=PassBytes(0, 512))


def test_the_chunk_gives_way_before_the_batch() -> None:
    """With less and less budget the chunk halves down to 32, then the sequences, then the plan is refused."""
    seen, refusal = [], ""
    for kib in range(4000, 900, -20):
        try:
            plan = divide_budget(SHAPE, TREES[1], budget=kib * 1024, page_size=16)
        except BudgetError as error:
            refusal = str(error)
            break
        if not seen or seen[-1] != (plan.prefill_chunk, plan.max_sequences):
            seen.append((plan.prefill_chunk, plan.max_sequences))
    else:
        pytest.fail("a budget below the heads' own size was accepted")
    assert "one page of 16 tokens (16.4 KiB)" in refusal
    assert "heads 1.0 MiB" in refusal
    assert seen[0] == (256, 8)
    assert seen[-1] == (32, 1)
    assert [s for _, s in seen] == sorted((s for _, s in seen), reverse=True)
    assert [c for c, s in seen if s == 8] == [256, 128, 64, 32]


def test_libraries_that_only_large_chunks_use() -> None:
    """A chunk whose library buffers would starve the pages gives way; small budgets hold without the buffers."""
    libraries = PassBytes(4 << 20).with_few(128, PassBytes(0))
    shape, without = replace(SHAPE, libraries=libraries), divide_budget(SHAPE, TREES[1], budget=4 << 20, page_size=16)
    small, middle, large = (divide_budget(shape, TREES[1], budget=size << 20, page_size=16) for size in (4, 7, 12))
    assert [plan.prefill_chunk for plan in (without, small, middle, large)] == [256, 128, 128, 256]
    assert [plan.parts["workspace"] for plan in (small, middle, large)] == [0, 0, 4 << 20]
    always = replace(SHAPE, libraries=PassBytes(4 << 20))  # no chunk is without them: as with so much less budget
    plan = divide_budget(always, TREES[1], budget=8 << 20, page_size=16)
    assert (plan.prefill_chunk, plan.max_pages) == (without.prefill_chunk, without.max_pages)


def test_exact_edge() -> None:
    """One byte less than one page and the minimum of everything else is refused; that much is accepted."""
    load = StepSize(tree_size=5, sequences=1, chunk=32, page_size=16)
    least = sum(fixed_parts(SHAPE, load).values()) + sum(page_parts(SHAPE, load).values())
    assert least > SHAPE.head_bytes + 5 * 1024 + 32 * 4096 + 16 * 1024
    plan = divide_budget(SHAPE, TREES[1], budget=least, page_size=16)
    assert (plan.max_pages, plan.max_sequences, plan.prefill_chunk) == (1, 1, 32)
    with pytest.raises(BudgetError, match=r"memory_budget 1\.2 MiB is too small for one page.*: 1 B missing"):
        divide_budget(SHAPE, TREES[1], budget=least - 1, page_size=16)


def test_chunk_and_sequences_make_room() -> None:
    """A longer sequence costs the chunk first, then sequences; the refusal names the pages and a shorter context."""
    kept = [divide_budget(SHAPE, TREES[1], budget=2 << 20, page_size=16, slots=slots) for slots in (1, 500, 600, 750)]
    assert all(plan.max_tokens >= slots for plan, slots in zip(kept, (1, 500, 600, 750), strict=True))
    sizes = [(plan.max_sequences, plan.prefill_chunk) for plan in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    with pytest.raises(BudgetError, match=r"too small for 63 pages of 16 tokens .*give at least .*, a shorter context"):
        divide_budget(SHAPE, TREES[1], budget=2 << 20, page_size=16, slots=1000)


def test_a_refusal_names_the_largest_part() -> None:
    """And the missing bytes."""
    with pytest.raises(BudgetError, match=r": \d+\.\d KiB missing, the largest part is heads; give at least"):
        divide_budget(SHAPE, TREES[1], budget=900 * 1024, page_size=16)
    wide = GenerationShape(kv_bytes_per_token=1024, head_bytes=0, forward=PassBytes(0, 2**20))
    with pytest.raises(BudgetError, match=r"activations 32\.0 MiB.*, the largest part is activations; give at least"):
        divide_budget(wide, TREES[1], budget=2**20, page_size=16)


@pytest.mark.parametrize("budget", [None, 2**28])
def test_plans_are_json_and_text(budget: int | None) -> None:
    plan, size = divide_budget(SHAPE, TREES[2], budget=budget, page_size=16), StepSize(TREES[2].size, 8, 256, 16)
    data = json.loads(json.dumps(plan.to_json()))
    names = ("drafter", "heads", "head_bits", "kernels", "kv_dtype", "tokens_per_step", "tokens_per_second")
    for name in (*names, "step_seconds"):
        assert data.pop(name) is None, "nothing is predicted where no device is known"
    assert data.pop("reasons") == []
    assert DraftTree.from_paths(data.pop("tree")) == plan.tree
    assert data == {
        "max_sequences": plan.max_sequences, "page_size": 16, "max_pages": plan.max_pages,
        "prefill_chunk": plan.prefill_chunk, "budget": budget, "parts": plan.parts,
        "pass_bytes": pass_bytes(SHAPE, size), "kept_steps": SHAPE.kept_steps,
    }  # fmt: skip
    text = str(plan)
    assert "at most 8 sequences at once" in text
    one = str(divide_budget(SHAPE, TREES[0], budget=budget, page_size=16, max_sequences=1))
    assert "tree of 1 node, depth 0" in one
    assert "at most 1 sequence at once" in one
    assert "tree of 6 nodes, depth 2" in text
    assert "heads 1.0 MiB" in text
    assert ("budget none" in text and "KV: as needed" in text) == (budget is None)
    assert (f"budget 256.0 MiB; tree of 6 nodes, depth 2; KV: {plan.max_pages} pages of 16 tokens" in text) == (
        budget is not None
    )
