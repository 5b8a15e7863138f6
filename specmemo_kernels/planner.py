"""The memory plan: what generation may use, part by part, decided before anything is allocated.

:func:`plan_memory` chooses everything for a model that needn't be loaded, by predicted speed;
:func:`divide_budget` divides a budget for a loaded model and a tree, on what was measured of it.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specmemo_kernels.acceptance import DEFAULT_ACCURACY, Accuracy
from specmemo_kernels.baselines import Workload
from specmemo_kernels.device import DeviceProfile, known_device
from specmemo_kernels.footprint import GenerationShape, HeadsSpec, Load, fixed_parts, page_parts
from specmemo_kernels.model_spec import ModelSpec
from specmemo_kernels.search import Choice, Problem, candidates, fastest, least_bytes, on_device, parts_of, tree_paths
from specmemo_kernels.tree import DraftTree

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


class BudgetError(ValueError):
    """The budget can't hold what was asked for; the message names the part, the limit and what to do."""


def parse_bytes(size: int | str) -> int:
    """``"2GiB"``, ``"512 MB"``, ``"1000"`` or a number of bytes.

    Raises:
        ValueError: not a size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(size))
    count = float(match[1]) * _UNITS.get(match[2], math.nan) if match else math.nan
    if not 1 <= count < math.inf:
        raise ValueError(f"memory_budget is {size!r}, expected bytes or a size such as '2GiB' or '512MB'")
    return int(count)


def format_bytes(size: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _at_least(size: int) -> str:
    """``size`` as :func:`format_bytes` writes it, rounded up, so that it is enough when given as a budget."""
    unit = 1024 ** next(power for power in range(4) if size < 1024 ** (power + 1) or power == 3)
    # What is shown has one decimal for KiB and MiB, two for GiB.
    decimals = {1: 1, 1024: 10, 1024**2: 10}.get(unit, 100)
    return format_bytes(math.ceil(size * decimals / unit) * unit / decimals)


@dataclass(frozen=True)
class MemoryPlan:
    """What generation may use.

    Attributes:
        tree: the tree of a step, root included; pruned for the device and the budget.
        max_sequences: sequences decoded at once; more wait for a free place.
        page_size: tokens per page. max_pages: the most pages there will ever be (``None``: no budget was given, a
            call of generate gets what its lengths need).
        prefill_chunk: most prompt tokens per forward pass.
        budget: bytes that the parts may take together, or ``None``. Plans of :func:`plan_memory` count the model's
            weights among the parts, those of patching don't.
        parts: bytes of each part at most; with a budget their sum stays within it. Prompts of more rows than
            ``max_sequences`` add their ids, 24 bytes per padded token.
        heads: Medusa heads to load, where the plan chose them.
        kv_dtype: of keys and values in pages, ``None`` for the model's own; ``"int8"`` and ``"fp8"`` are codes with
            scales, never chosen unasked.
        tokens_per_step, tokens_per_second, step_seconds: predicted, where the plan knows the device.
        reasons: what decided, in sentences.
        kernels: the GPU kernels' block sizes, one per class of sequences, where the device has such kernels.
    """

    tree: DraftTree
    max_sequences: int
    page_size: int
    max_pages: int | None
    prefill_chunk: int
    budget: int | None
    parts: dict[str, int] = field(default_factory=dict)
    heads: int | None = None
    kv_dtype: str | None = None
    tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    reasons: tuple[str, ...] = ()
    kernels: tuple[Any, ...] = ()

    @property
    def num_pages(self) -> int | None:
        """The same as ``max_pages``."""
        return self.max_pages

    @property
    def total_bytes(self) -> int:
        """Predicted peak: all parts together."""
        return sum(self.parts.values())

    @property
    def generation_bytes(self) -> int:
        """All parts but the model's weights, which is what ``patch(memory_budget=...)`` bounds."""
        return self.total_bytes - self.parts.get("weights", 0)

    @property
    def max_nodes(self) -> int:
        """Scratch slots: the nodes of one step over all sequences."""
        return self.tree.size * self.max_sequences

    @property
    def max_tokens(self) -> int | None:
        """Tokens that the pages hold, over all sequences."""
        return None if self.max_pages is None else self.max_pages * self.page_size

    def to_json(self) -> dict[str, object]:
        """A plain dict for ``json.dump``; the tree as rank paths."""
        return asdict(self) | {"tree": [list(path) for path in self.tree.paths]}

    def __str__(self) -> str:
        pages = "as needed"
        if self.max_pages is not None:
            pages = f"{_count(self.max_pages, 'page')} of {_count(self.page_size, 'token')}"
        speed: tuple[str, ...] = ()
        if self.tokens_per_second is not None:
            speed = (f"predicted {self.tokens_per_second:.1f} tokens/s, {self.tokens_per_step:.2f} tokens per step",)
        return "; ".join(
            (
                f"budget {'none' if self.budget is None else format_bytes(self.budget)}",
                f"tree of {_count(self.tree.size, 'node')}, depth {self.tree.max_depth}",
                f"KV: {pages}" + (f" in {self.kv_dtype}" if self.kv_dtype in ("int8", "fp8") else ""),
                f"prefill chunk {self.prefill_chunk}",
                f"at most {_count(self.max_sequences, 'sequence')} at once",
                ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts.items()),
                *speed,
            )
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def divide_budget(
    shape: GenerationShape,
    tree: DraftTree,
    *,
    budget: int | None,
    page_size: int,
    max_sequences: int = 8,
    prefill_chunk: int = 256,
    kv_dtype: str | None = None,
) -> MemoryPlan:
    """Divide ``budget`` bytes: heads, scratch and a forward pass first, pages get the rest.

    ``kv_dtype`` is what ``shape`` was made for; the plan only says so.

    Under pressure the prefill chunk shrinks before anything else (it costs little speed), down to the nodes of a
    step; then fewer sequences run at once.

    Raises:
        BudgetError: not even one page fits.
    """
    if budget is None:
        parts = fixed_parts(shape, Load(tree.size, max_sequences, prefill_chunk, page_size))
        return MemoryPlan(tree, max_sequences, page_size, None, prefill_chunk, None, parts, kv_dtype=kv_dtype)
    loads = [
        Load(tree.size, sequences, chunk, page_size)
        for sequences in _halvings(max_sequences, 1)
        for chunk in _halvings(prefill_chunk, min(32, prefill_chunk))
    ]
    for load in loads:
        parts, page = fixed_parts(shape, load), page_parts(shape, load)
        left, page_bytes = budget - sum(parts.values()), sum(page.values())
        # A quarter for pages is the least that keeps a large chunk or batch from starving the cache.
        if left >= max(page_bytes, budget // 4) or (load == loads[-1] and left >= page_bytes):
            pages = left // page_bytes
            parts = {name: parts.get(name, 0) + pages * page.get(name, 0) for name in parts | page}
            return MemoryPlan(tree, load.sequences, page_size, pages, load.chunk, budget, parts, kv_dtype=kv_dtype)
    raise BudgetError(_too_small(budget, page_size, parts, page_bytes))


def _too_small(budget: int, page_size: int, parts: dict[str, int], page_bytes: int) -> str:
    """Which parts the least plan has, how much is missing for it, and what would do."""
    least = sum(parts.values()) + page_bytes
    needed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    largest = max(parts, key=lambda name: parts[name])
    instead = ", or heads='prompt-lookup', which has no weights" if parts["heads"] else ""
    return (
        f"memory_budget {format_bytes(budget)} is too small for one page of {page_size} tokens "
        f"({format_bytes(page_bytes)}) beside {needed}: {format_bytes(least - budget)} missing, the largest part is "
        f"{largest}; give at least {_at_least(least)}, or a smaller tree or fewer heads{instead}"
    )


def _halvings(start: int, least: int) -> list[int]:
    values = [start]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return values


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
) -> Problem:
    """What :func:`plan_memory` and :func:`minimum_budget` work on, from what a caller has.

    Args:
        model: a :class:`ModelSpec`, a configuration (object, file, folder or hub id).
        device: a profile, or the name of a known device.
        heads: the heads that could be loaded; five with vocabulary matrices of their own, as Medusa publishes.

    Raises:
        ValueError: an unknown device, sizes that make no sense.
    """
    if not isinstance(model, ModelSpec):
        model = ModelSpec.load(model) if isinstance(model, str | Path) else ModelSpec.from_config(model)
    profile = known_device(device) if isinstance(device, str) else device
    return Problem(
        on_device(model, profile), profile, workload, heads or HeadsSpec(), accuracy, tp, max_nodes, workspace_bytes
    )


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


def choose(problem: Problem, choices: list[Choice], budget: int | str | None) -> MemoryPlan:
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
        heads=best.heads, kv_dtype=problem.spec.dtype, tokens_per_step=best.tokens_per_step,
        tokens_per_second=best.speed.tokens_per_second, step_seconds=best.speed.step_seconds,
        reasons=tuple(_reasons(problem, choices, best, free, asked)),
    )  # fmt: skip


def minimum_budget(model: Model | Any, device: Device, workload: Workload, retain: float = 0.96, **options: Any) -> int:
    """The smallest budget that keeps ``retain`` of the speed that unlimited memory allows, in bytes.

    ``retain=0`` is the smallest that runs at all. The same options and formulas as :func:`plan_memory`.

    Raises:
        ValueError: ``retain`` outside 0..1.
    """
    problem = problem_of(model, device, workload, **options)
    return smallest_budget(candidates(problem), retain)


def smallest_budget(choices: list[Choice], retain: float) -> int:
    """:func:`minimum_budget` over choices that are there already."""
    if not 0 <= retain <= 1:
        raise ValueError(f"retain is {retain}, it must lie within 0..1")
    wanted = retain * max(c.speed.tokens_per_second for c in choices)
    return min(c.total_bytes for c in choices if c.speed.tokens_per_second >= wanted)


def _reasons(problem: Problem, choices: list[Choice], best: Choice, free: Choice, asked: int) -> list[str]:
    """Why this tree, whether memory or the device decided, and what was adapted."""
    device = problem.device
    alike = [c for c in choices if (c.sequences, c.chunk) == (best.sequences, best.chunk)]
    plain = next(c for c in alike if c.heads == 0)
    widest = max(alike, key=lambda c: (c.tree_size, c.tokens_per_step))
    lines = []
    for other in (best, widest) if widest.tree_size > best.tree_size else (best,):
        cost = other.speed.step_seconds / plain.speed.step_seconds
        lines.append(
            f"a step over {_count(other.tree_size, 'node')} takes {cost:.2f} times a plain step and writes "
            f"{other.tokens_per_step:.2f} tokens: {other.tokens_per_step / cost:.2f} times the plain speed"
        )
    if widest.tree_size > best.tree_size and widest.total_bytes <= min(asked, device.memory):
        lines.append(f"a larger tree would fit, but costs more time on {device.name} than it gains")
    if best.speed.tokens_per_second < free.speed.tokens_per_second:
        share = best.speed.tokens_per_second / free.speed.tokens_per_second
        lines.append(f"memory is the limit: {share:.1%} of the speed that {format_bytes(free.total_bytes)} would allow")
    if best.sequences < problem.workload.batch:
        lines.append(f"{problem.workload.batch} sequences run {best.sequences} at a time")
    if asked > device.memory:
        lines.append(f"{device.name} has {format_bytes(device.memory)}, less than the budget")
    return lines


def _nothing_fits(problem: Problem, choices: list[Choice], limit: int) -> str:
    """Which parts the least plan has, how much is missing, and what would do."""
    spec = problem.spec
    least = min(choices, key=lambda c: c.total_bytes)
    parts = parts_of(problem, least)
    needed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    largest = max(parts, key=lambda name: parts[name])
    advice = [f"a budget of {_at_least(least.total_bytes)}"]
    others = least.total_bytes - parts["weights"]
    for bits in (8.0, 4.5):
        smaller = spec.with_weights(bits)
        if spec.weight_bits is None and smaller.weight_bytes // problem.tp + others <= limit:
            advice.append(f"weights in {bits:g} bits ({format_bytes(smaller.weight_bytes)})")
            break
    if others and limit > least.total_bytes - parts["kv_pages"]:
        tokens = (limit - (least.total_bytes - parts["kv_pages"])) // (spec.kv_bytes_per_token // problem.tp)
        advice.append(f"a context of about {tokens // least.sequences} tokens")
    for ranks in (2, 4, 8):
        if problem.tp == 1 and not spec.num_kv_heads % ranks and least_bytes(replace(problem, tp=ranks)) <= limit:
            advice.append(f"{ranks} such devices (tp={ranks})")
            break
    return (
        f"{format_bytes(limit)} is too small for {spec.name} on {problem.device.name}: the least plan needs {needed}; "
        f"{format_bytes(least.total_bytes - limit)} missing, the largest part is {largest}. What would do: "
        + "; or ".join(advice)
    )
