"""``specmemo plan``: what generation will need and how fast it should be, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specmemo_kernels.cli.common import existing_or_hub, setting_up, terminal, torch_device
from specmemo_kernels.cli.errors import UserError
from specmemo_kernels.ops.weight_codes import CODE_BITS
from specmemo_kernels.planning.baselines import Workload, medusa_parts, plain_parts
from specmemo_kernels.planning.cost import Message, Speed, decode_pass, medusa_speed, plain_speed, step_messages
from specmemo_kernels.planning.device import KNOWN_DEVICES, DeviceProfile, known_device
from specmemo_kernels.planning.device_probe import profile_of
from specmemo_kernels.planning.footprint import HeadsSpec, weight_bytes
from specmemo_kernels.planning.memory_plan import MemoryPlan, format_bytes
from specmemo_kernels.planning.model_spec import ModelSpec
from specmemo_kernels.planning.planner import choose, problem_of, smallest_budget
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
from specmemo_kernels.tree.acceptance import DEFAULT_ACCURACY, Accuracy, expected_tokens_per_step

RETAIN = 0.96


@dataclass(frozen=True)
class PlanOptions:
    """The command line of ``specmemo plan``."""

    model: str
    device: str | None
    devices: str | None
    memory_budget: str | None
    context: int
    prompt: int | None
    batch: int
    tp: int
    heads: str
    shared_lm_head: bool
    dtype: str | None
    kv_dtype: str | None
    head_bits: int | None
    weight_bits: float | None
    as_json: bool
    plot: Path | None


@dataclass(frozen=True)
class Row:
    """A way to run the workload: generation bytes are all but the model's weights, on one rank."""

    name: str
    generation_bytes: int
    total_bytes: int
    tokens_per_step: float
    speed: Speed
    heads: int = 0
    nodes: int = 1
    chunk: int | None = None
    sequences: int | None = None


def device_profile(name: str) -> DeviceProfile:
    """A known device, a file that ``specmemo probe`` wrote, or ``this`` / a torch device of this machine."""
    if name in KNOWN_DEVICES:
        return known_device(name)
    if name == "this" or name.split(":")[0] == "cuda":
        return profile_of("cpu" if name == "this" else str(torch_device(name)))
    path = Path(os.path.expanduser(name))
    return DeviceProfile.load(path) if path.suffix == ".json" or path.is_file() else known_device(name)


def run_plan(options: PlanOptions) -> None:
    """Choose, compare with the alternatives, print and draw.

    Raises:
        UserError: a model or device that isn't there, a workload that makes no sense.
        BudgetError: nothing fits; it says what would.
    """
    if options.plot is not None:
        from specmemo_kernels.cli.plan_plot import check_plot, draw

        check_plot(options.plot)
    model = existing_or_hub(options.model, "--model takes a config.json, a folder with one, or a hub id", files=True)
    with setting_up():
        spec = ModelSpec.load(model)
        if options.weight_bits is not None:
            spec = spec.with_weights(options.weight_bits)
        if options.dtype is not None:
            spec = spec.with_dtype(options.dtype)
        workload = Workload(options.context, options.batch, options.prompt or 0)
        heads, accuracy = heads_of(options, spec)
        device, tp = devices_of(options)
        problem = problem_of(spec, device, workload, heads=heads, accuracy=accuracy, tp=tp, kv_dtype=options.kv_dtype)
        choices = candidates(problem)
        plan = choose(problem, choices, options.memory_budget)
    rows = alternatives(problem, choices, plan)
    if options.as_json:
        print(json.dumps(to_json(problem, choices, plan, rows), indent=1))
    else:
        show(terminal(), problem, choices, plan, rows)
    if options.plot is not None:
        draw(options.plot, problem, choices, plan, rows)


def devices_of(options: PlanOptions) -> tuple[DeviceProfile, int]:
    """The device, and how many of them share the model.

    Raises:
        UserError: ``--devices`` isn't a name and a number, or comes with ``--device`` or ``--tp``.
    """
    if options.devices is None:
        return device_profile("this" if options.device is None else options.device), options.tp
    name, _, count = options.devices.rpartition(":")
    if not name or not count.isdecimal() or int(count) < 1:
        raise UserError(f"--devices {options.devices}: expected a device and how many of them, as in mi250:8")
    if options.device is not None or options.tp != 1:
        raise UserError(f"--devices {options.devices} says what --device and --tp say; give one or the other")
    return device_profile(name), int(count)


def heads_of(options: PlanOptions, spec: ModelSpec) -> tuple[HeadsSpec, Accuracy]:
    """The heads that could be loaded and how good they are: what a folder says, or so many of Vicuna's.

    Raises:
        UserError: neither a number nor a folder or file, or a folder of heads with ``--shared-lm-head``.
        HeadsError: no heads in it, or heads for another model.
        ValueError: ``--head-bits`` other than 4, or for heads without vocabulary matrices.
    """
    bits = options.head_bits
    if options.heads.isdecimal():
        if int(options.heads) > len(DEFAULT_ACCURACY):
            raise UserError(f"--heads is {options.heads}; accuracies are known for up to {len(DEFAULT_ACCURACY)} heads")
        return HeadsSpec(int(options.heads), 1, not options.shared_lm_head, bits), DEFAULT_ACCURACY
    source = existing_or_hub(options.heads, "--heads is neither a number nor a folder or file", files=True, hub=False)
    if options.shared_lm_head:
        raise UserError(f"--shared-lm-head is for a number of heads; {options.heads} says it itself")
    from specmemo_kernels.drafting.load_heads import describe_heads

    found = describe_heads(source, spec.hidden_size, spec.vocab_size)
    sizes = HeadsSpec(found.num_heads, found.num_layers, found.own_lm_head, bits or found.head_bits)
    return sizes, found.accuracy or DEFAULT_ACCURACY


def alternatives(problem: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan) -> list[Row]:
    """The plan, what nearly the same speed costs at least, and what other ways to generate cost."""
    spec, device, work, tp = problem.spec, problem.device, problem.workload, problem.tp
    weights = weight_bytes(spec, tp)

    def row(name: str, choice: PlanCandidate) -> Row:
        return Row(
            name, choice.total_bytes - weights, choice.total_bytes, choice.tokens_per_step, choice.speed,
            choice.heads, choice.tree_size, choice.chunk, choice.sequences,
        )  # fmt: skip

    best = fastest(choices, plan.budget or 0)
    enough = smallest_budget(choices, RETAIN)
    lean = fastest(choices, enough)
    least = min(choices, key=lambda c: c.total_bytes)
    free = max(choices, key=lambda c: (c.speed.tokens_per_second, -c.total_bytes))
    assert best is not None, "a plan was made, so something fits"
    assert lean is not None, "the budget is that of a choice"
    plain, medusa = plain_parts(spec, work, tp), medusa_parts(spec, work, tp=tp)
    published = HeadsSpec()
    paths = tree_paths(problem, min(4, len(problem.accuracy)), MAX_NODES)
    tokens = expected_tokens_per_step(paths, problem.accuracy)
    theirs = medusa_speed(spec, device, work, published, MAX_NODES, tokens, tp)
    size, dense = sum(plain.values()), sum(medusa.values())
    coded = None
    if problem.kv_dtype is None:
        coded = fastest(candidates(dataclasses.replace(problem, kv_dtype="int8")), plan.budget or 0)
    packed = None
    own = problem.heads.own_lm_head and problem.heads.num_heads > 0
    if own and problem.heads.head_bits is None:
        few_bits = dataclasses.replace(problem.heads, head_bits=CODE_BITS)
        packed = fastest(candidates(dataclasses.replace(problem, heads=few_bits)), plan.budget or 0)
    return [
        row("this plan", best),
        row("fastest of all", free),
        row(f"{RETAIN:.0%} of that, at least", lean),
        row("least that runs", least),
        *([] if coded is None else [row("int8 pages, not lossless", coded)]),
        *([] if packed is None else [row("heads in 4 bits", packed)]),
        Row("plain generate", size, size + weights, 1.0, plain_speed(spec, device, work, tp)),
        Row("Medusa as published", dense, dense + weights, tokens, theirs, published.num_heads, MAX_NODES),
    ]


def show(
    console: Console, problem: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan, rows: list[Row]
) -> None:
    """The plan part by part, why, and the alternatives. Everything is predicted."""
    spec, work = problem.spec, problem.workload
    where = problem.device.name + (f", each of {problem.tp} ranks" if problem.tp > 1 else "")
    title = Text.assemble((spec.name, "bold"), f" on {where}; all figures are predicted")
    console.print(title, soft_wrap=True)
    console.print(
        f"workload: {work.batch} x {work.context} tokens, {work.prompt} of them prompt; "
        f"budget {format_bytes(plan.budget or 0)}, model weights included",
        soft_wrap=True,
    )
    chosen = Table("chosen", "value")
    for name, value in (_chosen(plan, spec.dtype) | _communication(problem, rows[0])).items():
        chosen.add_row(name, value)
    parts = Table("part", "bytes")
    for name, size in plan.parts.items():
        parts.add_row(name.replace("_", " "), format_bytes(size))
    parts.add_section()
    parts.add_row("generation", format_bytes(plan.generation_bytes))
    parts.add_row("all", format_bytes(plan.total_bytes))
    both = Table.grid(padding=(0, 2))
    both.add_row(chosen, parts)
    console.print(both)
    for reason in plan.reasons:
        console.print(f"- {reason}", soft_wrap=True)
    table = Table("alternative", "heads", "nodes", "chunk", "at once", "generation", "tokens/s", "fits")
    for row in rows:
        fits = "yes" if row.total_bytes <= (plan.budget or 0) else "no"
        table.add_row(
            row.name, str(row.heads), str(row.nodes), str(row.chunk or "all"), str(row.sequences or "all"),
            format_bytes(row.generation_bytes), f"{row.speed.tokens_per_second:.1f}", fits,
        )  # fmt: skip
    console.print(table)
    for line in (*_gains(problem, rows), _against_medusa(choices, rows)):
        console.print(line, soft_wrap=True)


def _against_medusa(choices: list[PlanCandidate], rows: list[Row]) -> str:
    """The least memory that keeps 96 % of Medusa's speed, beside Medusa's."""
    medusa, weights = rows[-1], rows[-1].total_bytes - rows[-1].generation_bytes
    wanted = RETAIN * medusa.speed.tokens_per_second
    enough = [c.total_bytes - weights for c in choices if c.speed.tokens_per_second >= wanted]
    if not enough:
        return f"no plan reaches {RETAIN:.0%} of the speed of Medusa as published"
    least = min(enough)
    saved = 1 - least / medusa.generation_bytes
    return (
        f"{RETAIN:.0%} of the speed of Medusa as published needs {format_bytes(least)} of generation memory, "
        f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'} than its {format_bytes(medusa.generation_bytes)}"
    )


def _gains(problem: PlanRequest, rows: list[Row]) -> list[str]:
    """Against plain generate with the same batch, and of the batch against one sequence."""
    best, plain, work = rows[0].speed.tokens_per_second, rows[-2].speed.tokens_per_second, problem.workload
    batch = f", {work.batch} sequences" if work.batch > 1 else ""
    lines = [f"{best / plain:.2f} times plain generate{batch}"]
    if work.batch > 1:
        single = dataclasses.replace(problem, workload=dataclasses.replace(work, batch=1))
        alone = fastest(candidates(single), problem.device.memory)
        if alone is not None:
            lines.append(f"{best / alone.speed.tokens_per_second:.2f} times the plan for one sequence")
    return lines


def messages_of(problem: PlanRequest, row: Row) -> tuple[Message, ...]:
    """What the ranks tell each other in a step of ``row``; nothing for a single device."""
    if problem.tp == 1:
        return ()
    run = decode_pass(problem.workload, row.sequences or problem.workload.batch, row.nodes, row.heads)
    return step_messages(problem.spec, run, problem.heads)


def _communication(problem: PlanRequest, row: Row) -> dict[str, str]:
    messages = messages_of(problem, row)
    if not messages:
        return {}
    seconds = sum(m.seconds(problem.device, problem.tp) for m in messages)
    count, size = sum(m.count for m in messages), sum(m.count * m.nbytes for m in messages)
    return {"messages of a step": f"{count}, {format_bytes(size)}", "of its time": f"{1e3 * seconds:.2f} ms"}


def _chosen(plan: MemoryPlan, dtype: str) -> dict[str, str]:
    bits = f", lm_heads in {plan.head_bits} bits" if plan.head_bits and plan.heads else ""
    return {
        "heads": f"{plan.heads}{bits}",
        "tree": f"{plan.tree.size} nodes, depth {plan.tree.max_depth}",
        "pages": f"{plan.num_pages} of {plan.page_size} tokens, {plan.kv_dtype or dtype}",
        "prefill chunk": f"{plan.prefill_chunk} tokens",
        "sequences at once": str(plan.max_sequences),
        "tokens per step": f"{plan.tokens_per_step:.2f}",
        "step": f"{1e3 * (plan.step_seconds or 0):.2f} ms",
        "tokens/s": f"{plan.tokens_per_second:.1f}",
    } | {
        f"kernel, {c.min_nodes}+ nodes": f"{c.block_m} x {c.block_n}, split {c.split_size}"
        for c in plan.kernels or ()
    }  # fmt: skip


def to_json(problem: PlanRequest, choices: list[PlanCandidate], plan: MemoryPlan, rows: list[Row]) -> dict[str, Any]:
    """Everything that is printed, and the frontier; bytes and seconds."""

    def point(row: Row) -> dict[str, Any]:
        return {
            "name": row.name, "heads": row.heads, "nodes": row.nodes, "generation_bytes": row.generation_bytes,
            "total_bytes": row.total_bytes, "tokens_per_step": row.tokens_per_step,
            "tokens_per_second": row.speed.tokens_per_second, "step_seconds": row.speed.step_seconds,
        }  # fmt: skip

    work, messages = problem.workload, messages_of(problem, rows[0])
    return {
        "model": problem.spec.to_json(),
        "device": problem.device.to_json(),
        "workload": {"context": work.context, "prompt": work.prompt, "batch": work.batch, "tp": problem.tp},
        "predicted": True,
        "plan": plan.to_json() | {"generation_bytes": plan.generation_bytes, "total_bytes": plan.total_bytes},
        "communication": {
            "messages": sum(m.count for m in messages),
            "bytes": sum(m.count * m.nbytes for m in messages),
            "seconds": sum(m.seconds(problem.device, problem.tp) for m in messages),
        },
        "alternatives": [point(row) for row in rows],
        "frontier": [
            {"total_bytes": c.total_bytes, "tokens_per_second": c.speed.tokens_per_second, "heads": c.heads,
             "tree_size": c.tree_size, "chunk": c.chunk, "sequences": c.sequences, "parts": parts_of(problem, c)}
            for c in frontier(choices)
        ],
    }  # fmt: skip
