"""The order of degradation and recovery, the freed memory, and that no token depends on it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from failing_allocations import FailingAllocations, failing_everywhere
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from test_families import batch, greedy
from test_out_of_memory import SAMPLED, Run, draft_model
from tiny_models import VOCAB, tiny_model
from toy_model import empty

import specmemo_kernels as sk
from specmemo_kernels.cache.kv_storage import LayerKV
from specmemo_kernels.cache.paged_kv import PagedKVPool
from specmemo_kernels.engine.pressure import MemoryPressureController, free_bytes, levels
from specmemo_kernels.engine.scheduler import submit_all


class Scripted:
    """A monitor that returns given numbers; the last one stays."""

    def __init__(self, free: Iterable[int]) -> None:
        self.script, self.given_back = list(free), 0

    def free(self) -> int:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def release_cached(self) -> None:
        self.given_back += 1


def test_the_order() -> None:
    """Tree and chunk first, then spare pages, the drafter, sequences; each level adds one degradation."""
    found = [(v.max_tree, v.prefill_chunk, v.spare_pages, v.heads, v.max_sequences) for v in levels(9, 64, 5, True)]
    assert found == [
        (9, 64, True, True, 5),
        (4, 32, True, True, 5),
        (2, 16, True, True, 5),
        (1, 16, True, True, 5),
        (1, 16, False, True, 5),
        (1, 16, False, False, 5),
        (1, 16, False, False, 2),
        (1, 16, False, False, 1),
    ]
    assert [v.heads for v in levels(1, 7, 1, False)] == [True, True]


def test_hysteresis() -> None:
    """Below ``keep_free`` the level falls at once and is polled every step; it rises after four polls with enough
    memory, and waits twice as long after a raise that was too early.
    """
    moves = []
    monitor = Scripted([50, 50, 50, 50, 110, 110, *[130] * 4, 90, 90, *[130] * 8])
    memory_pressure = MemoryPressureController(levels(4, 16, 1, False), monitor=monitor, keep_free=100, poll_every=1)
    for _ in range(17):
        move = memory_pressure.review()
        if move < 0:
            assert memory_pressure.shrink(1)
        moves.append((move, memory_pressure.shrunk))
    down, still = [(-1, 1), (-1, 2)], [(0, 2)] * 2
    assert moves == [*down, *still, *[(0, 2)] * 3, (1, 1), (-1, 2), *[(0, 2)] * 7, (1, 1)]
    assert monitor.given_back == 3


def test_looks_are_rare() -> None:
    monitor = Scripted([1000])
    memory_pressure = MemoryPressureController(levels(4, 16, 1, False), monitor=monitor, keep_free=100)
    asked = []
    monitor.free = lambda: asked.append(1) or 1000  # type: ignore[method-assign, func-returns-value]
    for _ in range(64):
        memory_pressure.review()
    assert len(asked) == 4


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("drafter", [None, draft_model])
def test_shrinks_and_grows_back(swap: bool, drafter: object) -> None:
    """Memory falls and returns while three sequences run: allocated bytes follow, the tokens don't change."""
    run = Run(pages=60, new_tokens=60, samplings=SAMPLED)
    if drafter is not None:
        run = Run(draft_model, pages=60, new_tokens=60, samplings=SAMPLED)
    expected = run.undisturbed()
    ladder = levels(run.tree.size, 5, 3, drafter is not None)
    down = len(ladder) - 1
    monitor = Scripted([*[0] * 2 * down, 1000])
    states = run.states()
    scheduler = run.scheduler(
        expected, MemoryPressureController(ladder, monitor=monitor, keep_free=100, swap=swap, poll_every=1)
    )
    submit_all(scheduler, states)
    pool, held = scheduler.decoder.pool, []
    while not scheduler.idle:
        scheduler.step()
        pool.check_integrity()
        running = len(scheduler.active)
        pages = getattr(scheduler.decoder.drafter, "page_bytes", 0)
        held.append((scheduler.memory_pressure.shrunk, pool.max_nodes, pool.page_bytes, running, pages))
    assert [state.tokens for state in states] == expected
    assert [shrunk for shrunk, *_ in held[:down]] == list(range(1, down + 1)), "one notch at each look"
    least, last = held[down - 1], held[-1]
    assert least[1] == 1
    assert least[2] < last[2] // 3
    assert least[3] == 1
    assert least[4] == 0
    assert last[:3] == (0, 3 * run.tree.size, 60 * 4 * sum(layer.bytes_per_token for layer in pool.layers))
    assert last[4] == (last[2] if drafter is not None else 0)
    assert (scheduler.decoder.stats.swaps > 0) == swap
    assert scheduler.decoder.stats.grows == down
    empty(pool)


def test_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy to the host is no error: the tokens are recomputed."""

    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PagedKVPool, "swap_out", none_left)
    run = Run(pages=9, new_tokens=14)
    expected, states = run.undisturbed(), run.states()
    scheduler = run.scheduler(expected, MemoryPressureController(levels(4, 5, 3, False), swap=True))
    submit_all(scheduler, states)
    scheduler.run()
    assert [state.tokens for state in states] == expected
    stats = scheduler.decoder.stats
    assert stats.preemptions > stats.swaps == 0
    assert stats.recomputed_tokens > 0
    assert stats.retries == 0
    empty(scheduler.decoder.pool)


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    kv_dtype=st.sampled_from([None, "int8", "fp8"]),
    page_size=st.integers(1, 6),
    data=st.data(),
)
def test_swapping_keeps_every_byte(
    tokens: list[int], kv_dtype: str | None, page_size: int, data: st.DataObject
) -> None:
    """Pages of several groups, codes and scales, restored to other pages of a reallocated pool."""
    cpu = torch.device("cpu")
    layers = [LayerKV(2, 8, 12, torch.bfloat16, cpu), LayerKV(1, 8, 8, torch.float32, cpu)] * 2
    pool = PagedKVPool(layers, num_pages=90, page_size=page_size, max_sequences=4, max_nodes=1, kv_dtype=kv_dtype)
    for tensor in pool._stored():
        tensor.copy_(torch.randint(0, 100, tensor.shape).to(tensor.dtype))

    def contents(slot: int, count: int) -> list[torch.Tensor]:
        place = torch.arange(count)
        page = pool.block_table[slot, place // page_size].long()
        both = [*pool.k_pages, *pool.v_pages, *pool.k_scales, *pool.v_scales]
        return [tensor[page, place % page_size].clone() for tensor in both if tensor is not None]

    slots = [pool.open() for _ in tokens]
    for slot, count in zip(slots, tokens, strict=True):
        pool.reserve(slot, count)
    before = [contents(slot, count) for slot, count in zip(slots, tokens, strict=True)]
    saved = [pool.swap_out(slot, count) for slot, count in zip(slots, tokens, strict=True)]
    per_page = sum(layer.page_bytes_per_token(kv_dtype) for layer in layers) * page_size
    assert [pages.nbytes for pages in saved] == [per_page * pool.pages_for(count) for count in tokens]
    for slot in slots:
        pool.close(slot)
    pool.resize(sum(map(pool.pages_for, tokens)))
    for index in data.draw(st.permutations(range(len(tokens)))):
        slots[index] = pool.open()
        pool.reserve(slots[index], tokens[index])
        pool.swap_in(slots[index], saved[index])
    pool.check_integrity()
    for slot, count, old in zip(slots, tokens, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(contents(slot, count), old, strict=True))


def heads() -> sk.MedusaHeads:
    torch.manual_seed(1)
    made = sk.MedusaHeads(32, VOCAB, 3)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


@pytest.mark.parametrize(
    "kwargs", [{}, pytest.param({"do_sample": True, "top_k": 9, "repetition_penalty": 1.3}, marks=pytest.mark.slow)]
)
def test_a_transformers_model(kwargs: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site of every step of ``generate``, including the model's own code."""
    model, inputs = tiny_model("llama", num_hidden_layers=1), batch((9,))

    def generated() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(**inputs, max_new_tokens=5, **({"do_sample": False} | kwargs))

    expected = generated()
    with sk.patch(model, heads(), tree=4, prefill_chunk=8) as handle:
        handle.memory_pressure.levels = handle.memory_pressure.levels[:1] * 1000
        with failing_everywhere(monkeypatch) as mode:
            assert torch.equal(generated(), expected)
        assert handle.stats.retries == mode.failures > 100
        assert handle.pool is not None
        empty(handle.pool)


def test_outside_of_steps() -> None:
    """While transformers prepares a call or the result is built, the error is raised; the model is usable."""
    model, inputs = tiny_model("llama", num_hidden_layers=1), batch((9, 4))
    expected = greedy(model, inputs, 6)
    with sk.patch(model, heads(), tree=4) as handle:
        counting = FailingAllocations(lambda site: False)
        with counting:
            greedy(model, inputs, 6)
        outcomes = {True: 0, False: 0}
        for site in range(0, counting.site, counting.site // 20):
            handle.release()
            try:
                with FailingAllocations(lambda now, site=site: now == site):  # type: ignore[misc]
                    found = greedy(model, inputs, 6)
                assert torch.equal(found, expected)
                outcomes[True] += 1
            except torch.OutOfMemoryError:
                outcomes[False] += 1
            if handle.pool is not None:
                empty(handle.pool)
        assert min(outcomes.values()) > 1
        assert torch.equal(greedy(model, inputs, 6), expected)


def test_keep_free() -> None:
    """The argument reaches the monitor, whose number for this machine is plausible; a wrong size is refused."""
    model, inputs = tiny_model("llama", num_hidden_layers=1), batch((9,))
    expected = greedy(model, inputs, 40)
    with sk.patch(model, heads(), tree=6, keep_free=free_bytes(torch.device("cpu")) * 100) as handle:
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert handle.stats.shrinks == handle.memory_pressure.shrunk > 3
        assert handle.memory_pressure.level.max_tree == 1
    with sk.patch(model, heads(), tree=6, keep_free="1B") as handle:
        assert torch.equal(greedy(model, inputs, 40), expected)
        assert handle.stats.shrinks == 0
    with pytest.raises(ValueError, match="keep_free is 'much', expected bytes or a size"):
        sk.patch(model, heads(), keep_free="much")
    assert not hasattr(model, "specmemo")
