"""Plans for models that needn't be loaded: heads, tree, pages and blocks with the most predicted speed in a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.backends.kernel_config import KernelConfig, attention_configs
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.device import DeviceProfile, known_device
from specmemo_kernels.planning.footprint import HeadsSpec, check_ranks, page_token_bytes, weight_bytes
from specmemo_kernels.planning.memory_plan import (
    BudgetError,
    MemoryPlan,
    counted,
    format_at_least,
    format_bytes,
    parse_bytes,
)
from specmemo_kernels.planning.model_spec import ModelSpec, ranks_share
from specmemo_kernels.planning.search import (
    PAGE_SIZES,
    PlanCandidate,
    PlanRequest,
    candidates,
    fastest,
    least_bytes,
    on_device,
    parts_of,
    tree_paths,
)
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy
from specmemo_kernels.tree.draft_tree import DraftTree

Model = ModelSpec | str | Path
Device = DeviceProfile | str


def problem_of(
    model: Model | Any,
    device: Device,
    workload: Workload,
    *,
    heads: HeadsSpec | None = None,
    accuracy: Accuracy = DEFAULT_ACCURACY,
    tp: int = 1,
    max_nodes: int = 64,
    workspace_bytes: int = 0,
    kv_dtype: str | None = None,
) -> PlanRequest:
    """What :func:`plan_memory` and :func:`minimum_budget` work on, from what a caller has.

    Args:
        model: a :class:`ModelSpec`, a configuration (object, file, folder or hub id).
        device: a profile, or the name of a known device.
        heads: the heads that could be loaded; five with vocabulary matrices of their own, as Medusa publishes.
            ``HeadsSpec(head_bits=4)`` plans with those in 4-bit codes, and with the accuracies of heads that aren't.
        kv_dtype: ``"int8"`` or ``"fp8"`` for keys and values in pages as codes with scales, half the bytes of 16 bits
            and not lossless; ``None`` (default): in the model's dtype.

    Raises:
        ValueError: an unknown device, sizes that make no sense, a dtype or head size that the device's kernels can't
            compute in.
    """
    if not isinstance(model, ModelSpec):
        model = ModelSpec.load(model) if isinstance(model, str | Path) else ModelSpec.from_config(model)
    check_ranks(model, tp)
    profile = known_device(device) if isinstance(device, str) else device
    problem = PlanRequest(
        on_device(model, profile), profile, workload, heads or HeadsSpec(), accuracy, tp, max_nodes, workspace_bytes,
        kv_dtype,
    )  # fmt: skip
    _kernels(problem, PAGE_SIZES[0])
    return problem


def _kernels(problem: PlanRequest, page_size: int) -> tuple[KernelConfig, ...] | None:
    """The block sizes that the GPU's kernels will have, ``None`` on other devices.

    Raises:
        ValueError: they can't compute this.
    """
    spec, device = problem.spec, problem.device
    if device.kernel_target is None:
        return None
    group = spec.num_qo_heads // problem.tp // spec.kv_heads_of_rank(problem.tp)
    sizes = (spec.head_dim, spec.v_head_dim, group, getattr(torch, spec.dtype))
    try:
        return attention_configs(device.kernel_target, *sizes, page_size, quantised=problem.kv_dtype is not None)
    except ValueError as error:
        raise ValueError(f"{spec.name} on {device.name}: {error}") from error


def plan_memory(
    model: Model | Any, device: Device, budget: int | str | None, workload: Workload, **options: Any
) -> MemoryPlan:
    """The plan with the most predicted tokens per second whose parts, the model's weights included, fit ``budget``.

    Every combination of heads, tree, sequences at once, prefill chunk and page size is tried (:mod:`search`), so no
    other is better by the same formulas; of equally fast ones the smallest is taken.

    Args:
        model, device, options: as for :func:`problem_of`.
        budget: bytes, or ``"16GiB"``; at most the device's memory, which ``None`` stands for.

    Raises:
        BudgetError: nothing fits; it names the part and what would.
    """
    problem = problem_of(model, device, workload, **options)
    return choose(problem, candidates(problem), budget)


def choose(problem: PlanRequest, choices: list[PlanCandidate], budget: int | str | None) -> MemoryPlan:
    """:func:`plan_memory` over choices that are there already."""
    asked = problem.device.memory if budget is None else parse_bytes(budget)
    limit = min(asked, problem.device.memory)
    best, free = fastest(choices, limit), fastest(choices, math.inf)
    if best is None or free is None:
        raise BudgetError(_nothing_fits(problem, choices, limit))
    paths = tree_paths(problem, best.heads, best.tree_size)
    return MemoryPlan(
        tree=DraftTree.from_paths(paths), max_sequences=best.sequences, page_size=best.page_size,
        max_pages=best.num_pages, prefill_chunk=best.chunk, budget=limit, parts=parts_of(problem, best),
        heads=best.heads, head_bits=problem.heads.head_bits, kv_dtype=problem.kv_dtype,
        tokens_per_step=best.tokens_per_step, tokens_per_second=best.speed.tokens_per_second,
        step_seconds=best.speed.step_seconds,
        reasons=tuple(_reasons(problem, choices, best, free, asked)), kernels=_kernels(problem, best.page_size),
    )  # fmt: skip


def minimum_budget(model: Model | Any, device: Device, workload: Workload, retain: float = 0.96, **options: Any) -> int:
    """The smallest budget that keeps ``retain`` of the speed that unlimited memory allows, in bytes.

    ``retain=0`` is the smallest that runs at all. The same options and formulas as :func:`plan_memory`.

    Raises:
        ValueError: ``retain`` outside 0..1.
    """
    problem = problem_of(model, device, workload, **options)
    return smallest_budget(candidates(problem), retain)


def smallest_budget(choices: list[PlanCandidate], retain: float) -> int:
    """:func:`minimum_budget` over choices that are there already."""
    if not 0 <= retain <= 1:
        raise ValueError(f"retain is {retain}, it must lie within 0..1")
    wanted = retain * max(c.speed.tokens_per_second for c in choices)
    return min(c.total_bytes for c in choices if c.speed.tokens_per_second >= wanted)


def _reasons(
    problem: PlanRequest, choices: list[PlanCandidate], best: PlanCandidate, free: PlanCandidate, asked: int
) -> list[str]:
    """Why this tree, whether memory or the device decided, and what was adapted."""
    device = problem.device
    alike = [c for c in choices if (c.sequences, c.chunk) == (best.sequences, best.chunk)]
    plain = next(c for c in alike if c.heads == 0)
    widest = max(alike, key=lambda c: (c.tree_size, c.tokens_per_step))
    lines = []
    for other in (best, widest) if widest.tree_size > best.tree_size else (best,):
        cost = other.speed.step_seconds / plain.speed.step_seconds
        lines.append(
            f"a step over {counted(other.tree_size, 'node')} takes {cost:.2f} times a plain step and writes "
            f"{other.tokens_per_step:.2f} tokens: {other.tokens_per_step / cost:.2f} times the plain speed"
        )
    if widest.tree_size > best.tree_size and widest.total_bytes <= min(asked, device.memory):
        lines.append(f"a larger tree would fit, but costs more time on {device.name} than it gains")
    if best.speed.tokens_per_second < free.speed.tokens_per_second:
        share = best.speed.tokens_per_second / free.speed.tokens_per_second
        lines.append(f"memory is the limit: {share:.1%} of the speed that {format_bytes(free.total_bytes)} would allow")
    if best.sequences < problem.workload.batch:
        lines.append(f"{problem.workload.batch} sequences run {best.sequences} at a time")
    if problem.kv_dtype is not None:
        lines.append(f"keys and values are kept in {problem.kv_dtype}: tokens may differ from the model's own")
    if asked > device.memory:
        lines.append(f"{device.name} has {format_bytes(device.memory)}, less than the budget")
    return lines


def _nothing_fits(problem: PlanRequest, choices: list[PlanCandidate], limit: int) -> str:
    """Which parts the least plan has, how much is missing, and what would do."""
    spec = problem.spec
    least = min(choices, key=lambda c: c.total_bytes)
    parts = parts_of(problem, least)
    needed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    largest = max(parts, key=lambda name: parts[name])
    advice = [f"a budget of {format_at_least(least.total_bytes)}"]
    others = least.total_bytes - parts["weights"]
    for bits in (8.0, 4.5):
        smaller = spec.with_weights(bits)
        if spec.weight_bits is None and weight_bytes(smaller, problem.tp) + others <= limit:
            advice.append(f"weights in {bits:g} bits ({format_bytes(smaller.weight_bytes)})")
            break
    if others and limit > least.total_bytes - parts["kv_pages"]:
        room = limit - (least.total_bytes - parts["kv_pages"])
        tokens = room // page_token_bytes(spec, problem.kv_dtype, problem.tp)
        advice.append(f"a context of about {tokens // least.sequences} tokens")
    if problem.kv_dtype is None and (coded := least_bytes(replace(problem, kv_dtype="int8"))) <= limit:
        advice.append(f"pages in int8, which is not lossless (kv_dtype='int8': {format_at_least(coded)})")
    for ranks in (2, 4, 8):
        shared = problem.tp == 1 and ranks_share(spec.num_qo_heads, spec.num_kv_heads, ranks)
        if shared and least_bytes(replace(problem, tp=ranks)) <= limit:
            advice.append(f"{ranks} such devices (tp={ranks})")
            break
    return (
        f"{format_bytes(limit)} is too small for {spec.name} on {problem.device.name}: the least plan needs {needed}; "
        f"{format_bytes(least.total_bytes - limit)} missing, the largest part is {largest}. What would do: "
        + "; or ".join(advice)
    )
