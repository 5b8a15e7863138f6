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
    for piece, part in _OWN.items():
        if piece in name:
            return part
    return "model matmuls" if name in _MATMULS else "other model operators"


def breakdown(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by part, medians over the steps; they add up to the median step.

    Profiled steps, in groups of ``steps``, time the operators (on a GPU their kernels). They alternate with unprofiled
    steps, which give the whole time. The profiler's overhead inside an operator counts for the operator, so the host's
    share is a lower bound. Recorded steps of a CPU are eager under the profiler and have more operators there, so the
    host's share may be negative.
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
        by_step: dict[int, Counter[str]] = {}
        for event in profiler.events():
            if outermost(event):
                micros = event.device_time_total if on_gpu else event.cpu_time_total
                by_step.setdefault(event.cpu_parent.id, Counter())[part_of(event.name)] += micros
        spent += by_step.values()
    parts = {part: statistics.median(step_micros[part] for step_micros in spent) / 1e3 for part in PARTS[:-1]}
    return parts | {"host": statistics.median(whole) * 1e3 - sum(parts.values())}


def outermost(event: Any) -> bool:
    """Whether no other operator called this one."""
    parent = event.cpu_parent
    return event.device_type == torch.autograd.DeviceType.CPU and parent is not None and parent.name == _STEP
