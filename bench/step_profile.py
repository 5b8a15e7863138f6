"""A decode step's time by part, from torch's profiler."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

#: Parts of a step, in the order of the table. ``host`` is the time outside of operators.
PARTS = ("model matmuls", "attention", "other model operators", "head", "verify", "commit", "host")

_MATMULS = {
    "aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "specmemo::linear", "specmemo::gated_mlp"
}  # fmt: skip
#: Parts of a step by a part of a GPU kernel's name, also in graphs. cuBLAS's names have nvjet, gemm, splitK or gemv.
_KERNELS = {
    "tree_attention": "attention", "merge_splits": "attention", "lm_head": "head", "verify_tree": "verify",
    "commit_paged": "commit", "linear_kernel": "model matmuls", "nvjet": "model matmuls", "gemm": "model matmuls",
    "splitK": "model matmuls", "gemv": "model matmuls",
}  # fmt: skip
#: :func:`breakdown` runs this many times its ``steps``, half of them profiled.
PASSES = 4
#: Name of a profiled step.
_STEP = "one step"
#: Operators of only one part of a step, by a part of their name.
_OWN = {
    "specmemo::tree_attention": "attention", "scaled_dot_product": "attention",
    "specmemo::lm_head": "head", "aten::baddbmm": "head",
    "specmemo::verify": "verify", "specmemo::commit": "commit",
    "medusa::head": "head", "medusa::verify": "verify", "medusa::commit": "commit",
}  # fmt: skip


def part_of(name: str) -> str:
    """The part of the step that an operator belongs to."""
    return _matching(_OWN, name) or ("model matmuls" if name in _MATMULS else "other model operators")


def part_of_kernel(name: str) -> str:
    """The part of the step that a GPU kernel belongs to."""
    return _matching(_KERNELS, name) or "other model operators"


def _matching(parts: dict[str, str], name: str) -> str | None:
    return next((part for piece, part in parts.items() if piece in name), None)


def breakdown(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by part, medians over the steps; they add up to the median step.

    Profiled steps, in groups of ``steps``, time the operators (on a GPU the kernels, means over the steps). They
    alternate with unprofiled steps, which give the whole time. The profiler's overhead inside an operator counts for
    the operator, so the host's share is a lower bound. Recorded steps of a CPU are eager under the profiler and have
    more operators there, so the host's share may be negative.
    """
    on_gpu = device.type == "cuda"
    whole: list[float] = []
    spent: list[Counter[str]] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(PASSES // 2):
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
            whole.append(time.perf_counter() - begin)
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                with record_function(_STEP):
                    step()
            if on_gpu:
                torch.cuda.synchronize(device)
        spent += _of_kernels(profiler.events(), steps) if on_gpu else _of_operators(profiler.events())
    parts = {part: statistics.median(step_micros[part] for step_micros in spent) / 1e3 for part in PARTS[:-1]}
    return parts | {"host": statistics.median(whole) * 1e3 - sum(parts.values())}


def _of_operators(events: Any) -> list[Counter[str]]:
    """Microseconds by part of each step."""
    by_step: dict[int, Counter[str]] = {}
    for event in events:
        if outermost(event):
            by_step.setdefault(event.cpu_parent.id, Counter())[part_of(event.name)] += event.cpu_time_total
    return list(by_step.values())


def _of_kernels(events: Any, steps: int) -> list[Counter[str]]:
    """Mean microseconds by part; a graph's kernels have no operator."""
    total: Counter[str] = Counter()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name != _STEP:
            total[part_of_kernel(event.name)] += event.time_range.elapsed_us() / steps
    return [total]


def outermost(event: Any) -> bool:
    """Whether no other operator called this one."""
    parent = event.cpu_parent
    return event.device_type == torch.autograd.DeviceType.CPU and parent is not None and parent.name == _STEP
