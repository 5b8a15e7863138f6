"""Plans from a configuration: the heads, tree, pages and kernel blocks that are fastest within a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specmemo_kernels.backends.kernel_config import KernelConfig, attention_configs, max_state_bytes
from specmemo_kernels.backends.kernel_target import TARGETS
from specmemo_kernels.planning.baselines import Workload
from specmemo_kernels.planning.cpu_workspace import cpu_workspace
from specmemo_kernels.planning.device import DeviceProfile
from specmemo_kernels.planning.drafter_spec import DrafterSpec, HeadsSpec
from specmemo_kernels.planning.known_devices import known_device
from specmemo_kernels.planning.memory_plan import (
    BudgetError,
    MemoryPlan,
    counted,
    format_at_least,
    format_bytes,
    parse_bytes,
)
from specmemo_kernels.planning.model_spec import ModelSpec, ranks_share
from specmemo_kernels.planning.predicted_shape import check_ranks, page_token_bytes, weight_bytes
from specmemo_kernels.planning.search import (
    MAX_NODES,
    PlanCandidate,
    PlanRequest,
    candidates,
    fastest,
    least_bytes,
    on_device,
    parts_of,
    tree_paths,
)
from specmemo_kernels.tree.acceptance import Accuracy, deepened

Model = ModelSpec | str | Path
Device = DeviceProfile | str


def plan_request(
    model: Model | Any,
    device: Device,
    workload: Workload,
    *,
    heads: DrafterSpec | None = None,
    accuracy: Accuracy | None = None,
    tp: int = 1,
    max_nodes: int = MAX_NODES,
    workspace_bytes: int = 0,
    kv_dtype: str | None = None,
) -> PlanRequest:
    """Check the input of :func:`plan_memory` and :func:`minimum_budget`.

    Args:
        model: a :class:`ModelSpec`, or a configuration (object, file, folder or hub id).
        device: a profile, or the name of a known device.
        heads: the drafter; default: five Medusa heads with their own vocabulary matrices, as published.
            With ``head_bits=4`` its matrices are in 4-bit codes; the accuracies are those of unquantised ones.
        accuracy: ``[depth][k]``, probability that one of its best ``k + 1`` guesses is right; the last row stands for
            all deeper ones, except for heads. ``None``: an assumption, which the plan's reasons name.
        kv_dtype: ``"int8"`` or ``"fp8"`` for pages of codes with scales, half the bytes of 16 bits and not lossless;
            ``None``: the model's dtype.

    Raises:
        ValueError: an unknown device, impossible sizes, or a dtype or head size without a kernel on the device.
    """
    if not isinstance(model, ModelSpec):
        model = ModelSpec.load(model) if isinstance(model, str | Path) else ModelSpec.from_config(model)
    if model.recurrent and model.mixers is None:
        raise ValueError(
            f"{model.name} has recurrent layers, whose sizes follow from transformers' code; give the result of "
            "specmemo_kernels.integrations.hf.hybrid_sizes.recurrent_spec"
        )
    if model.mixers is not None and tp > 1:
        raise ValueError(f"{model.name} has recurrent layers and tp is {tp}; such models run on one device")
    check_ranks(model, tp)
    profile = known_device(device) if isinstance(device, str) else device
    drafter, assumed = heads or HeadsSpec(), ""
    if accuracy is None:
        accuracy, assumed = _assumed_accuracy(drafter)
    if not isinstance(drafter, HeadsSpec):
        accuracy = deepened(accuracy, drafter.max_depth)
    request = PlanRequest(
        on_device(model, profile), profile, workload, drafter, accuracy, tp, max_nodes, workspace_bytes, kv_dtype,
        assumed, recorded=profile.backend is not None and tp == 1 and model.mixers is None,
    )  # fmt: skip
    if profile.backend == "cpu":
        buffers = cpu_workspace(request.spec, drafter, kv_dtype, tp)
        return replace(request, workspace_bytes=workspace_bytes + buffers)
    kernels, target = _kernels(request), profile.kernel_target
    if kernels is None or target is None:
        return request
    states = max_state_bytes(kernels, TARGETS[target].multiprocessors, request.spec.v_head_dim)
    return replace(request, workspace_bytes=workspace_bytes + states)


def _assumed_accuracy(drafter: DrafterSpec) -> tuple[Accuracy, str]:
    """Accuracies of a drafter without known ones, and a sentence about them."""
    accuracy = drafter.assumed_accuracy
    if not drafter.max_depth:
        return accuracy, ""
    if len(accuracy) == 1:
        return accuracy, f"acceptance is assumed: {accuracy[0][0]:.0%} of the guesses behind right ones are right"
    deeper = "" if isinstance(drafter, HeadsSpec) else ", the last row repeated for deeper nodes"
    return accuracy, f"acceptance is assumed: Medusa's published accuracies on Vicuna-7B{deeper}"


def _kernels(request: PlanRequest) -> tuple[KernelConfig, ...] | None:
    """Block sizes of the GPU kernels, ``None`` on other devices.

    Raises:
        ValueError: no kernel for these sizes.
    """
    spec, device = request.spec, request.device
    if device.kernel_target is None:
        return None
    group = spec.num_qo_heads // request.tp // spec.kv_heads_of_rank(request.tp)
    sizes = (spec.head_dim, spec.v_head_dim, group, getattr(torch, spec.dtype))
    try:
        return attention_configs(device.kernel_target, *sizes, quantised=request.kv_dtype is not None)
    except ValueError as error:
        raise ValueError(f"{spec.name} on {device.name}: {error}") from error


def plan_memory(
    model: Model | Any, device: Device, budget: int | str | None, workload: Workload, **options: Any
) -> MemoryPlan:
    """The plan with the most predicted tokens per second within ``budget``, the model's weights included.

    An exhaustive search over heads, tree, batch limit, prefill chunk and page size (:mod:`search`); of equally fast
    plans the smallest.

    Args:
        model, device, options: as for :func:`plan_request`.
        budget: bytes, or ``"16GiB"``, clamped to the device's memory; ``None``: the device's memory.

    Raises:
        BudgetError: nothing fits; the message has the largest part and what would fit.
    """
    request = plan_request(model, device, workload, **options)
    return choose(request, candidates(request), budget)


def choose(request: PlanRequest, choices: list[PlanCandidate], budget: int | str | None) -> MemoryPlan:
    """:func:`plan_memory` over existing candidates."""
    given = request.device.memory if budget is None else parse_bytes(budget)
    limit = min(given, request.device.memory)
    best, unlimited = fastest(choices, limit), fastest(choices, math.inf)
    if best is None or unlimited is None:
        raise BudgetError(_nothing_fits(request, choices, limit))
    tree = request.heads.tree(tree_paths(request, best.heads, best.tree_size))
    return MemoryPlan(
        tree=tree, max_sequences=best.sequences, page_size=best.page_size, max_pages=best.max_pages,
        prefill_chunk=best.chunk, budget=limit, parts=parts_of(request, best), drafter=request.heads.kind,
        heads=best.heads if isinstance(request.heads, HeadsSpec) else None, head_bits=request.heads.head_bits,
        kv_dtype=request.kv_dtype,
        tokens_per_step=best.tokens_per_step, tokens_per_second=best.speed.tokens_per_second,
        step_seconds=best.speed.step_seconds,
        reasons=tuple(_reasons(request, choices, best, unlimited, given)), kernels=_kernels(request),
    )  # fmt: skip


def minimum_budget(model: Model | Any, device: Device, workload: Workload, retain: float = 0.96, **options: Any) -> int:
    """The smallest budget, in bytes, with at least ``retain`` of the speed of unlimited memory.

    ``retain=0``: the smallest budget that runs. Options as for :func:`plan_memory`.

    Raises:
        ValueError: ``retain`` outside 0..1.
    """
    request = plan_request(model, device, workload, **options)
    return smallest_budget(candidates(request), retain)


def smallest_budget(choices: list[PlanCandidate], retain: float) -> int:
    """:func:`minimum_budget` over existing candidates."""
    if not 0 <= retain <= 1:
        raise ValueError(f"retain is {retain}, it must lie within 0..1")
    least_speed = retain * max(c.speed.tokens_per_second for c in choices)
    return min(c.total_bytes for c in choices if c.speed.tokens_per_second >= least_speed)


def _reasons(
    request: PlanRequest, choices: list[PlanCandidate], best: PlanCandidate, unlimited: PlanCandidate, given: int
) -> list[str]:
    device = request.device
    trees = [c for c in choices if (c.sequences, c.chunk) == (best.sequences, best.chunk)]
    plain = next(c for c in trees if c.heads == 0)
    largest = max(trees, key=lambda c: (c.tree_size, c.tokens_per_step))
    lines = []
    for choice in (best, largest) if largest.tree_size > best.tree_size else (best,):
        cost = choice.speed.step_seconds / plain.speed.step_seconds
        lines.append(
            f"a step over {counted(choice.tree_size, 'node')} takes {cost:.2f} times a plain step and writes "
            f"{choice.tokens_per_step:.2f} tokens: {choice.tokens_per_step / cost:.2f} times the plain speed"
        )
    if largest.tree_size > best.tree_size and largest.total_bytes <= min(given, device.memory):
        lines.append(f"a larger tree would fit, but costs more time on {device.name} than it gains")
    if best.speed.tokens_per_second < unlimited.speed.tokens_per_second:
        share = best.speed.tokens_per_second / unlimited.speed.tokens_per_second
        lines.append(
            f"memory is the limit: {share:.1%} of the speed that {format_bytes(unlimited.total_bytes)} would allow"
        )
    if best.sequences < request.workload.batch:
        lines.append(f"{request.workload.batch} sequences run {best.sequences} at a time")
    if request.assumed:
        lines.append(request.assumed)
    if request.kv_dtype is not None:
        lines.append(f"keys and values are kept in {request.kv_dtype}: tokens may differ from the model's own")
    if given > device.memory:
        lines.append(f"{device.name} has {format_bytes(device.memory)}, less than the budget")
    if device.backend is None:
        lines.append(f"{device.name}: {device.without_kernels}")
    return [*lines, *request.spec.notes, *request.spec.quantised.notes]


def _nothing_fits(request: PlanRequest, choices: list[PlanCandidate], limit: int) -> str:
    """The parts of the smallest plan, the missing bytes, and what would fit."""
    spec = request.spec
    least = min(choices, key=lambda c: c.total_bytes)
    parts = parts_of(request, least)
    needed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    largest = max(parts, key=lambda name: parts[name])
    advice = [f"a budget of {format_at_least(least.total_bytes)}"]
    generation_bytes = least.total_bytes - parts["weights"]
    for bits in (8.0, 4.5):
        smaller = spec.with_weights(bits)
        if not spec.quantised.method and weight_bytes(smaller, request.tp) + generation_bytes <= limit:
            advice.append(f"weights in {bits:g} bits ({format_bytes(smaller.weight_bytes)})")
            break
    if generation_bytes and limit > least.total_bytes - parts["kv_pages"]:
        room = limit - (least.total_bytes - parts["kv_pages"])
        pages = room // (page_token_bytes(spec, request.kv_dtype, request.tp) * least.page_size) // least.sequences
        if (tokens := pages * least.page_size - least.heads) > 1:
            advice.append(f"a context of about {tokens} tokens")
    if request.kv_dtype is None and (coded := least_bytes(replace(request, kv_dtype="int8"))) <= limit:
        advice.append(f"pages in int8, which is not lossless (kv_dtype='int8': {format_at_least(coded)})")
    for ranks in (2, 4, 8):
        can_shard = request.tp == 1 and ranks_share(spec.num_qo_heads, spec.num_kv_heads, ranks)
        if can_shard and least_bytes(replace(request, tp=ranks)) <= limit:
            advice.append(f"{ranks} such devices (tp={ranks})")
            break
    return (
        f"{format_bytes(limit)} is too small for {spec.name} on {request.device.name}: the smallest plan needs "
        f"{needed}; {format_bytes(least.total_bytes - limit)} missing, the largest part is {largest}. What would fit: "
        + "; or ".join(advice)
        + "".join(f". Note: {note}" for note in (*spec.notes, *spec.quantised.notes))
    )
