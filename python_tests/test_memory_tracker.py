"""The memory tracker counts storages allocated under it, once each, while they live."""

from __future__ import annotations

import torch

from specmemo_kernels.planning.memory_tracker import MemoryTracker

KIB = 256  # floats of 4 bytes


def test_live_and_peak() -> None:
    """Freed memory leaves ``live`` at once and stays in ``peak``."""
    with MemoryTracker() as tracker:
        a = torch.zeros(KIB)
        b = torch.ones(2 * KIB)
        assert (tracker.live, tracker.peak) == (3072, 3072)
        del a
        assert (tracker.live, tracker.peak) == (2048, 3072)
        c = torch.ones(KIB)
        assert (tracker.live, tracker.peak) == (3072, 3072)
        c = b + b
        assert (tracker.live, tracker.peak) == (4096, 5120), "both results live until the name moves on"
        del b, c
    assert (tracker.live, tracker.peak) == (0, 5120)


def test_views_and_changes_in_place_are_free() -> None:
    """They share the storage; the storage goes when the last of them does."""
    with MemoryTracker() as tracker:
        a = torch.zeros(4, KIB)
        rows = a[1:3].reshape(-1).view(2, -1)
        a.add_(1).mul_(2)
        rows.copy_(rows * 0 + 1)
        assert tracker.live == 4096
        assert tracker.peak == 4096 + 2 * 2048
        del a
        assert tracker.live == 4096
        del rows
        assert tracker.live == 0


def test_sparse_tensors() -> None:
    """They have no storage; their dense results count."""
    weight = torch.eye(16).to_sparse()
    with MemoryTracker() as tracker:
        result = torch.ones(16, 16) + weight
        assert tracker.live == result.nbytes


def test_trace() -> None:
    """Bytes after each operator, in order; only on request."""
    with MemoryTracker(trace=True) as tracker, MemoryTracker() as silent:
        a = torch.zeros(KIB)
        b = a + 1
        a.view(2, -1)
        del a
        b.mul_(2)
    assert tracker.trace == [1024, 2048, 2048, 1024]
    assert max(tracker.trace) == tracker.peak == silent.peak
    assert silent.trace == []


def test_what_was_there_before_is_left_out() -> None:
    """Reading, changing or freeing it doesn't count; results computed from it do."""
    weight = torch.ones(100, KIB)
    with MemoryTracker() as tracker:
        weight.mul_(2)
        row = weight[3]
        assert tracker.live == tracker.peak == 0
        total = row + row
        assert tracker.live == 1024
        del weight, row
        assert tracker.live == 1024
    del total
    assert (tracker.live, tracker.peak) == (0, 1024)


def test_several_results() -> None:
    """Each storage of a tuple or list counts; views of one storage count once."""
    x = torch.arange(KIB, dtype=torch.float32)
    with MemoryTracker() as tracker:
        values, indices = x.sort()
        assert tracker.live == KIB * 4 + KIB * 8
        halves = values.split(KIB // 2)
        assert tracker.live == KIB * 12
        del values
        assert tracker.live == KIB * 12
        del halves
        assert tracker.live == KIB * 8
        del indices
    assert tracker.live == 0


def test_freed_after_the_block_and_ended_by_an_exception() -> None:
    """Counting stops with the block; later frees are still subtracted, and an error leaves no dispatch mode active."""
    tracker = MemoryTracker()
    kept = []
    try:
        with tracker:
            kept.append(torch.ones(KIB))
            raise RuntimeError
    except RuntimeError:
        kept.append(torch.ones(KIB))
    assert tracker.live == 1024
    kept.clear()
    assert (tracker.live, tracker.peak) == (0, 1024)


def test_many_short_lives() -> None:
    """Storages that reuse one address are told apart."""
    with MemoryTracker() as tracker:
        for _ in range(200):
            x = torch.ones(KIB)
            y = x * 2
            del x, y
    assert (tracker.live, tracker.peak) == (0, 2048)


def test_parts_of_composite_operators() -> None:
    """In inference mode, allocations inside a composite operator count as in normal mode."""
    few, many = torch.ones(1, 2, 5, KIB), torch.ones(8, 2, KIB, 3)  # matmul copies the first for each of the second
    trackers = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), MemoryTracker() as tracker:
            product = few @ many
        trackers.append((tracker.live, tracker.peak))
        assert tracker.live == product.nbytes
    assert trackers[0] == trackers[1]
    assert trackers[0][1] > trackers[0][0], "nothing but the result was made"


def test_modules_and_gradients_off() -> None:
    """A layer's output counts, its weights don't."""
    layer = torch.nn.Linear(KIB, 2 * KIB)
    with torch.no_grad(), MemoryTracker() as tracker:
        y = layer(torch.ones(3, KIB))
    assert tracker.live == y.nbytes
    assert tracker.peak == y.nbytes + 3 * 1024
