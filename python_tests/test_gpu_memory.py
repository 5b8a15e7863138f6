"""A GPU with less memory than the plan: a cap that torch enforces, and offloaded heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from test_families import batch, greedy
from tiny_models import VOCAB, tiny_model

import specmemo_kernels as sk
from specmemo_kernels.engine.pressure import DeviceMonitor
from specmemo_kernels.engine.scheduler import Scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
MIB = 2**20
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
BUDGET = 128 * MIB
#: torch's allocator takes blocks of 2 and 20 MiB for tensors below 10 MiB.
SLACK = 48 * MIB


def heads() -> sk.MedusaHeads:
    torch.manual_seed(1)
    made = sk.MedusaHeads(32, VOCAB, 3)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


@pytest.fixture
def cap() -> Iterator[Callable[[int], None]]:
    """A function that limits this process's memory to some bytes beyond its present use."""

    def set_cap(size: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
        torch.cuda.reset_peak_memory_stats()

    yield set_cap
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(("size", "shrinks"), [(BUDGET + SLACK, False), (56 * MIB, True)], ids=["the plan", "less"])
def test_generation_under_a_cap(size: int, shrinks: bool, cap: Callable[[int], None]) -> None:
    """With the plan's bytes and some slack nothing degrades. Where not even the pages (70 MiB) fit, allocations fail,
    and the tokens are the same.
    """
    model, inputs = tiny_model("llama", **SIZES).cuda(), batch((500, 420, 380, 450))
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    with sk.patch(model, heads(), tree=8, memory_budget=BUDGET, prefill_chunk=64) as handle:
        expected = greedy(model, inputs, 60)
        handle.release()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        cap(size)
        assert torch.equal(greedy(model, inputs, 60), expected)
        assert torch.cuda.max_memory_reserved() - before <= size
        assert (handle.stats.shrinks > 0) == shrinks
        with pytest.raises(sk.BudgetError):
            greedy(model, inputs, 10_000)


def test_heads_leave_and_come_back() -> None:
    """Under pressure heads leave the device, and so do preempted pages; all return, and no token differs."""
    model, inputs = tiny_model("llama", **SIZES).cuda(), batch((30, 12))
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    expected = greedy(model, inputs, 80)
    with sk.patch(model, heads(), tree=8, keep_free="1MiB") as handle:
        own = handle.drafter.nbytes
        memory_pressure, seen, step = handle.memory_pressure, [], Scheduler.step
        memory_pressure.poll_every = 1

        class Falling(DeviceMonitor):
            looks = 0

            def free(self) -> int:
                self.looks += 1
                return 0 if self.looks <= 2 * len(memory_pressure.levels) - 2 else super().free()

        memory_pressure.monitor = Falling([torch.device("cuda", 0)])

        def watched(scheduler: Scheduler) -> list[object]:
            result = step(scheduler)
            seen.append((memory_pressure.level.heads, handle.drafter.nbytes))
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "step", watched)
            assert torch.equal(greedy(model, inputs, 80), expected)
        assert {held for there, held in seen if not there} == {0}
        assert {held for there, held in seen if there} == {own}
        assert handle.stats.swaps > 0
        assert memory_pressure.shrunk == 0
