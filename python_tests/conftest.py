"""Fresh memory is NaN (floats) or an extreme value (integers) in every test, so that reads of unwritten memory show."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from filelock import FileLock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first, so that no worker process ends long after the others."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def device_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One measurement of the CPU for pytest's worker processes and the processes that their tests start."""
    from specmemo_kernels.planning.device_probe import cache_file, probe

    if not hasattr(request.config, "workerinput"):
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent / "cache"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(shared))
        with FileLock(f"{shared}.lock"):
            if not cache_file("cpu").exists():
                probe("cpu", seconds=0.7).save(cache_file("cpu"))
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _poison_kernel_outputs()
    yield
    torch.use_deterministic_algorithms(False)


def _poison_kernel_outputs() -> None:
    """Poison the outputs of the C++ kernels, which torch doesn't fill; no effect if they aren't built."""
    if importlib.util.find_spec("specmemo_kernels.backends._cpu") is not None:
        from specmemo_kernels.backends import _cpu

        _cpu.fill_new_tensors(True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``graph=True``, steps overlap on a CPU as on a GPU, and run eagerly."""
    from specmemo_kernels.engine import overlap
    from specmemo_kernels.integrations.hf import pool

    monkeypatch.setitem(overlap.IN_FLIGHT, "cpu", 2)
    monkeypatch.delitem(pool.CAPTURES, "cpu")


@pytest.fixture
def device_state(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks that each step starts from the host's state; the number of steps that were told to, and of copies."""
    from specmemo_kernels.engine.device_step import StepState
    from specmemo_kernels.engine.step_graph import StepCache

    counts, load, copy = [0, 0], StepCache.load, StepState.load

    def loading(self: StepCache, sequences: Any) -> None:
        load(self, sequences)
        counts[0] += 1
        state, number = self._state, len(sequences)
        assert state is not None
        found = torch.stack([state.slots, state.roots, state.seq_lens.long()])[:, :number]
        assert found.T.tolist() == [[s.slot, s.tokens[-1], len(s.tokens) - 1] for s in sequences]
        assert torch.equal(state.hidden[:number], torch.stack([s.hidden for s in sequences]))

    def copying(self: StepState, sequences: Any) -> None:
        counts[1] += 1
        copy(self, sequences)

    monkeypatch.setattr(StepCache, "load", loading)
    monkeypatch.setattr(StepState, "load", copying)
    return counts
