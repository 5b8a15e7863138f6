"""The output of ``specmemo plan``: the plan and its alternatives as tables and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specmemo_kernels.cli.common import show_tables
from specmemo_kernels.planning.baselines import medusa_parts, plain_parts
from specmemo_kernels.planning.cost import Message, Speed, decode_pass, medusa_speed, plain_speed, step_messages
from specmemo_kernels.planning.drafter_spec import HeadsSpec
from specmemo_kernels.planning.memory_plan import MemoryPlan, format_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import smallest_budget
from specmemo_kernels.planning.predicted_shape import weight_bytes
from specmemo_kernels.planning.search import (
    MAX_NODES,
    PlanCandidate,
    PlanRequest,
    candidates,
    fastest,
    frontier,
    parts_of,
    tree_paths,
)
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, expected_tokens_per_step
from specmemo_kernels.tree.tree_budget import TreeBudget

#: Share of the highest speed that the smallest alternative keeps.
RETAIN = 0.96


@dataclass(frozen=True)
class Row:
    """One way to run the workload, per rank. ``generation_bytes`` exclude the model's weights."""

    name: str
    generation_bytes: int
    total_bytes: int
    tokens_per_step: float
    speed: Speed
    heads: int = 0
    nodes: int = 1
    chunk: int | None = None
    sequences: int | None = None


def alternatives(request: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan) -> list[Row]:
    """The plan, other plans for the same workload, and two baselines (the last two rows)."""
    spec, device, work, tp = request.spec, request.device, request.workload, request.tp
    weights, budget = weight_bytes(spec, tp), plan.budget or 0
    plans: list[tuple[str, PlanCandidate | None]] = [
        ("this plan", fastest(choices, budget)),
        ("fastest of all", max(choices, key=lambda c: (c.speed.tokens_per_second, -c.total_bytes))),
        (f"{RETAIN:.0%} of that, at least", fastest(choices, smallest_budget(choices, RETAIN))),
        ("least that runs", min(choices, key=lambda c: c.total_bytes)),
    ]
    if request.kv_dtype is None:
        int8_pages = replace(request, kv_dtype="int8")
        plans.append(("int8 pages, not lossless", fastest(candidates(int8_pages), budget)))
    if (coded := request.heads.in_codes()) is not None:
        name = "heads in 4 bits" if isinstance(coded, HeadsSpec) else "drafter in 4 bits"
        plans.append((name, fastest(candidates(replace(request, heads=coded)), budget)))
    rows = [
        Row(name, c.total_bytes - weights, c.total_bytes, c.tokens_per_step, c.speed, c.heads, c.tree_size, c.chunk,
            c.sequences)
        for name, c in plans if c is not None
    ]  # fmt: skip
    published, tokens = HeadsSpec(), _medusa_tokens(request)
    medusa = medusa_speed(spec, device, work, published, MAX_NODES, tokens, tp)
    plain_bytes, medusa_bytes = (
        sum(p.values()) for p in (plain_parts(spec, work, tp), medusa_parts(spec, work, tp=tp))
    )
    return [
        *rows,
        Row("plain generate", plain_bytes, plain_bytes + weights, 1.0, plain_speed(spec, device, work, tp)),
        Row(
            "Medusa as published", medusa_bytes, medusa_bytes + weights, tokens, medusa, published.num_heads, MAX_NODES
        ),
    ]


def _medusa_tokens(request: PlanRequest) -> float:
    """Tokens per step of Medusa's published tree, with the accuracies of the planned heads if these are Medusa's."""
    if not isinstance(request.heads, HeadsSpec):
        request = replace(request, heads=HeadsSpec(), accuracy=DEFAULT_ACCURACY)
    paths = tree_paths(request, min(4, len(request.accuracy)), MAX_NODES)
    return expected_tokens_per_step(paths, request.accuracy)


def show(
    console: Console, request: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan, rows: list[Row]
) -> None:
    """Print the plan part by part, its reasons and the alternatives."""
    spec, work, budget = request.spec, request.workload, plan.budget or 0
    where = request.device.name + (f", each of {request.tp} ranks" if request.tp > 1 else "")
    title = Text.assemble((spec.name, "bold"), f" on {where}; all figures are predicted")
    console.print(title, soft_wrap=True)
    console.print(
        f"workload: {work.batch} x {work.context} tokens, {work.prompt} of them prompt; "
        f"budget {format_bytes(budget)}, model weights included",
        soft_wrap=True,
    )
    chosen = Table("chosen", "value")
    for name, value in (_chosen(plan, spec) | _communication(request, rows[0])).items():
        chosen.add_row(name, value)
    parts = Table("part", "bytes")
    for name, size in plan.parts.items():
        parts.add_row(name.replace("_", " "), format_bytes(size))
    parts.add_section()
    parts.add_row("generation", format_bytes(plan.generation_bytes))
    parts.add_row("all", format_bytes(plan.total_bytes))
    show_tables(console, chosen, parts)
    if spec.mixers is not None:
        one, each = spec.mixers.state_bytes, plan.tree.size * spec.mixers.state_bytes
        console.print(
            f"- recurrent states: {format_bytes(one)} per sequence; with a state per candidate, as other engines keep "
            f"them, the same tree would take {format_bytes(one + each)}",
            soft_wrap=True,
        )
    for reason in plan.reasons:
        console.print(f"- {reason}", soft_wrap=True)
    depth = "heads" if isinstance(request.heads, HeadsSpec) else "heads/depth"
    table = Table("alternative", depth, "nodes", "chunk", "at once", "generation", "tokens/s", "fits")
    for row in rows:
        table.add_row(
            row.name, str(row.heads), str(row.nodes), str(row.chunk or "all"), str(row.sequences or "all"),
            format_bytes(row.generation_bytes), f"{row.speed.tokens_per_second:.1f}",
            "yes" if row.total_bytes <= budget else "no",
        )  # fmt: skip
    show_tables(console, table)
    for line in (*_gains(request, rows), _against_medusa(choices, rows)):
        console.print(line, soft_wrap=True)


def _against_medusa(choices: list[PlanCandidate], rows: list[Row]) -> str:
    """The least memory that keeps Medusa's speed, and 96 % of it, compared with Medusa's memory."""
    medusa, weights = rows[-1], rows[-1].total_bytes - rows[-1].generation_bytes
    parts = []
    for share in (1.0, RETAIN):
        least = share * medusa.speed.tokens_per_second
        sizes = [c.total_bytes - weights for c in choices if c.speed.tokens_per_second >= least]
        if sizes:
            saved = 1 - min(sizes) / medusa.generation_bytes
            change = f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'}"
            parts.append(f"{format_bytes(min(sizes))} at {share:.0%} of its speed ({change})")
    if not parts:
        return f"no plan reaches {RETAIN:.0%} of the speed of Medusa as published"
    memory = format_bytes(medusa.generation_bytes)
    return f"generation memory, against {memory} of Medusa as published: " + ", ".join(parts)


def _gains(request: PlanRequest, rows: list[Row]) -> list[str]:
    """Speed relative to plain generate, and of a batch relative to one sequence."""
    best, plain, work = rows[0].speed.tokens_per_second, rows[-2].speed.tokens_per_second, request.workload
    batch = f", {work.batch} sequences" if work.batch > 1 else ""
    lines = [f"{best / plain:.2f} times plain generate{batch}"]
    if work.batch > 1:
        single = fastest(candidates(replace(request, workload=replace(work, batch=1))), request.device.memory)
        if single is not None:
            lines.append(f"{best / single.speed.tokens_per_second:.2f} times the plan for one sequence")
    return lines


def _message_totals(request: PlanRequest, row: Row) -> dict[str, float]:
    """Messages between the ranks in a step of ``row``; zeros for a single device."""
    messages: tuple[Message, ...] = ()
    if request.tp > 1:
        run = decode_pass(request.workload, row.sequences or request.workload.batch, row.nodes, row.heads)
        messages = step_messages(request.spec, run, request.heads)
    return {
        "messages": sum(m.count for m in messages),
        "bytes": sum(m.count * m.nbytes for m in messages),
        "seconds": sum(m.seconds(request.device, request.tp) for m in messages),
    }


def _communication(request: PlanRequest, row: Row) -> dict[str, str]:
    if request.tp == 1:
        return {}
    totals = _message_totals(request, row)
    size = f"{totals['messages']}, {format_bytes(int(totals['bytes']))}"
    return {"messages of a step": size, "of its time": f"{1e3 * totals['seconds']:.2f} ms"}


def _chosen(plan: MemoryPlan, spec: ModelSpec) -> dict[str, str]:
    bits = f", in {plan.head_bits} bits" if plan.head_bits and plan.heads != 0 else ""
    drafter = {"drafter": f"{plan.drafter}{bits}"} if plan.heads is None else {"heads": f"{plan.heads}{bits}"}
    dynamic = "dynamic, " if isinstance(plan.tree, TreeBudget) else ""
    rest = f"others {spec.dtype}" if spec.quantised.in_codes else f"dequantised to {spec.dtype}"
    weights = {"weights": f"{spec.quantised.method}, {rest}"} if spec.quantised.method else {}
    return weights | drafter | {
        "tree": f"{dynamic}{plan.tree.size} nodes, depth {plan.tree.max_depth}",
        "pages": f"{plan.max_pages} of {plan.page_size} tokens, {plan.kv_dtype or spec.dtype}",
        "prefill chunk": f"{plan.prefill_chunk} tokens",
        "sequences at once": str(plan.max_sequences),
        "tokens per step": f"{plan.tokens_per_step:.2f}",
        "step": f"{1e3 * (plan.step_seconds or 0):.2f} ms",
        "tokens/s": f"{plan.tokens_per_second:.1f}",
    } | {
        f"kernel, {c.min_nodes}+ nodes": f"{c.block_m} x {c.block_n}, split {c.split_size}"
        for c in plan.kernels or ()
    }  # fmt: skip


def to_json(request: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan, rows: list[Row]) -> dict[str, Any]:
    """All printed figures and the frontier, in bytes and seconds."""
    work = request.workload
    return {
        "model": request.spec.to_json(),
        "device": request.device.to_json(),
        "workload": {"context": work.context, "prompt": work.prompt, "batch": work.batch, "tp": request.tp},
        "predicted": True,
        "plan": plan.to_json() | {"generation_bytes": plan.generation_bytes, "total_bytes": plan.total_bytes},
        "communication": _message_totals(request, rows[0]),
        "alternatives": [
            {"name": row.name, "heads": row.heads, "nodes": row.nodes, "generation_bytes": row.generation_bytes,
             "total_bytes": row.total_bytes, "chunk": row.chunk, "sequences": row.sequences,
             "tokens_per_step": row.tokens_per_step,
             "tokens_per_second": row.speed.tokens_per_second, "step_seconds": row.speed.step_seconds}
            for row in rows
        ],
        "frontier": [
            {"total_bytes": c.total_bytes, "tokens_per_second": c.speed.tokens_per_second, "heads": c.heads,
             "tree_size": c.tree_size, "chunk": c.chunk, "sequences": c.sequences, "parts": parts_of(request, c)}
            for c in frontier(choices)
        ],
    }  # fmt: skip
